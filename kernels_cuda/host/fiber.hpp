// Fibers: one guarded stack each, and a switch that saves what the calling convention says a callee keeps.
//
// x86-64 switches in about 5 ns with the twelve instructions below; other processors (or -DVK_UCONTEXT) use ucontext,
// which is forty times slower because it also swaps the signal mask.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(VK_UCONTEXT)
#define VK_UCONTEXT
#endif
#ifdef VK_UCONTEXT
#include <ucontext.h>
#else
extern "C" void vk_switch_stack(void** save, void* load) __attribute__((visibility("hidden")));
asm(R"(
    .text
    .p2align 4
    .globl vk_switch_stack
    .hidden vk_switch_stack
    .type vk_switch_stack, @function
vk_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size vk_switch_stack, .-vk_switch_stack
)");
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace vk::host {

class Fiber {
   public:
    Fiber() = default;
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;
    ~Fiber() {
        if (map_) munmap(map_, mapped_);
    }

    // Gives this fiber a stack (once) and sets it to begin at `entry`, which must never return. `color` staggers the
    // stack tops: without it the hot frames of all fibers would share the same few cache sets.
    bool prepare(void (*entry)(), unsigned color) {
        const std::size_t page = std::size_t(sysconf(_SC_PAGESIZE));
        if (!map_) {
            mapped_ = stack_bytes + 2 * page;
            void* p = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) return false;
            map_ = static_cast<char*>(p);
            bottom_ = map_ + page;  // the first and last page stay inaccessible
            if (mprotect(bottom_, stack_bytes, PROT_READ | PROT_WRITE) != 0) return false;
        }
#ifdef __SANITIZE_ADDRESS__
        __asan_unpoison_memory_region(bottom_, stack_bytes);
        fake_stack_ = nullptr;
#endif
        const std::size_t size = stack_bytes - 64 * (color % 61);
#ifdef VK_UCONTEXT
        getcontext(&context_);
        context_.uc_stack.ss_sp = bottom_;
        context_.uc_stack.ss_size = size;
        context_.uc_link = nullptr;
        makecontext(&context_, entry, 0);
#else
        // As if `entry` had been called: six registers to pop, its address, and a null return address that ends the
        // chain of frames. `entry` then finds the stack 8 bytes below a 16-byte boundary, as after any call.
        void** top = reinterpret_cast<void**>(bottom_ + size);
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(entry);
        for (int i = 0; i < 6; ++i) *--top = nullptr;
        saved_ = top;
#endif
        return true;
    }

    // Leaves `from`, continues `to`; returns when somebody switches back to `from`.
    static void swap(Fiber& from, Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_start_switch_fiber(&from.fake_stack_, to.bottom_, to.size_or(stack_bytes));
#endif
#ifdef VK_UCONTEXT
        swapcontext(&from.context_, &to.context_);
#else
        vk_switch_stack(&from.saved_, to.saved_);
#endif
        from.arrived();
    }

    // The sanitizer's half of a switch, on the stack just entered. `origin`, the launching thread itself, learns the
    // bounds of its own stack here.
    void arrived([[maybe_unused]] Fiber* origin = nullptr) {
#ifdef __SANITIZE_ADDRESS__
        const void* bottom = nullptr;
        std::size_t size = 0;
        __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
        if (origin && !origin->map_ && !origin->bottom_) {
            origin->bottom_ = static_cast<char*>(const_cast<void*>(bottom));
            origin->size_ = size;
        }
#endif
    }

   private:
#ifdef __SANITIZE_ADDRESS__
    static constexpr std::size_t stack_bytes = std::size_t(1) << 20;
    std::size_t size_or(std::size_t otherwise) const { return size_ ? size_ : otherwise; }
    void* fake_stack_ = nullptr;
    std::size_t size_ = 0;
#else
    static constexpr std::size_t stack_bytes = std::size_t(1) << 17;
#endif
    char* map_ = nullptr;
    char* bottom_ = nullptr;
    std::size_t mapped_ = 0;
#ifdef VK_UCONTEXT
    ucontext_t context_{};
#else
    void* saved_ = nullptr;
#endif
};

}  // namespace vk::host
