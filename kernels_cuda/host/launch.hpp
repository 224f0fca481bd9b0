// The C interface of a host library: the generated unit lists its kernels in `vk_kernels`, callers use `vk_launch`.
#pragma once
#include <mutex>

#include "block.hpp"

namespace vk::host {

struct Kernel {
    const char* name;
    void (*call)(void**);
};

// Calls F with its arguments read through `args`, as cuLaunchKernel does.
template <auto F> struct Invoke;
template <class... A, void (*F)(A...)> struct Invoke<F> {
    static void call(void** args) { with(args, std::index_sequence_for<A...>{}); }

   private:
    template <std::size_t... I> static void with([[maybe_unused]] void** args, std::index_sequence<I...>) {
        F(*static_cast<std::remove_cv_t<A>*>(args[I])...);
    }
};

}  // namespace vk::host

#define VK_API extern "C" __attribute__((visibility("default")))
#define VK_EXPORT(name, ...) {name, &::vk::host::Invoke<__VA_ARGS__>::call}

extern const vk::host::Kernel vk_kernels[];
extern const int vk_kernel_count;

// Null on success, else one sentence that stays valid until the next call. One launch at a time per library.
VK_API const char* vk_launch(const char* name, const unsigned* grid, const unsigned* block, unsigned long long shared_bytes,
                             void** args, const vk::host::Options* options) {
    static std::mutex mutex;
    static std::string error;
    const std::lock_guard<std::mutex> lock(mutex);
    const vk::host::Kernel* kernel = nullptr;
    for (int i = 0; i < vk_kernel_count; ++i)
        if (std::strcmp(vk_kernels[i].name, name) == 0) kernel = &vk_kernels[i];
    const std::string size = std::to_string(block[0]) + "," + std::to_string(block[1]) + "," + std::to_string(block[2]);
    if (!kernel) error = std::string("no kernel named ") + name + " in this library";
    else if (block[1] != 1 || block[2] != 1 || block[0] == 0 || block[0] % 32 || block[0] > vk::host::Block::max_threads)
        error = "block is (" + size + "); allowed: (n,1,1) with n a multiple of 32 up to 1024";
    else if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[0] > 0x7fffffffu || grid[1] > 65535u || grid[2] > 65535u)
        error = "grid is (" + std::to_string(grid[0]) + "," + std::to_string(grid[1]) + "," + std::to_string(grid[2]) + "); allowed: 1..2^31-1, 1..65535, 1..65535";
    else if (shared_bytes > 227u * 1024u)
        error = std::to_string(shared_bytes) + " bytes of shared memory; allowed: 232448";
    else
        error = vk::host::block.launch(kernel->call, args, {grid[0], grid[1], grid[2]}, int(block[0]), shared_bytes,
                                       options ? *options : vk::host::Options{});
    return error.empty() ? nullptr : error.c_str();
}
