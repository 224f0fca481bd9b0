// One CUDA block on one processor: its threads are fibers, its barriers and warp collectives are rendezvous.
//
// A thread runs until it must wait, then switches straight to the next ready thread. Which one is next is the `order`
// of the launch: ascending, descending or seeded random. The first two let one warp run as far ahead of the others as
// its barriers allow, so a missing barrier reads poison or stale data in one of them. Blocks run in the same order.
//
// What could hang on a GPU (a barrier that some threads never reach, lanes in different collectives) ends the launch
// with a sentence that names the operation and its source line.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../include/types.cuh"
#include "copies.hpp"
#include "fiber.hpp"
#include "runtime.hpp"

namespace vk::host {

Current current;

namespace {

constexpr int max_threads = 1024;
constexpr u64 max_shared_bytes = 227 * 1024;
constexpr u64 guard_bytes = 4096;
constexpr unsigned char guard_value = 0xa5;

enum Order : u32 { forward, reverse, shuffled };

}  // namespace

// The layout that kernels_cuda/modules.py mirrors.
struct Options {
    u32 order = forward;
    u32 seed = 0;              // of order `shuffled`
    u32 late_copies = 1;       // cp.async: poison when issued, data at the wait; 0: data when issued
    u32 poison = 0x7fff7fffu;  // NaN as f16, bf16 and float; fills shared memory before each block
};

namespace {

int first_difference(const unsigned* a, const unsigned* b, int count) {
    int i = 0;
    while (i < count && a[i] == b[i]) ++i;
    return i;
}
bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }
bool same(const Site& a, const Site& b) { return a.line == b.line && same(a.file, b.file); }

std::string text(const Site& site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string triple(long long x, long long y, long long z) {
    return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
}

std::string block() { return triple(current.block[0], current.block[1], current.block[2]); }

struct Thread {
    Fiber fiber;
    const char* waits_in = nullptr;  // name of the primitive, null while it may run
    Site site{};
    bool done = false;
    Copies copies;
};

// A warp collective, or the barrier, in progress.
struct Rendezvous {
    int arrived = 0;
    int first = 0;  // the thread that came first, and how
    const char* op = nullptr;
    Site site{};
};

class Runtime {
   public:
    std::string launch(const Kernel& kernel, void** args, const unsigned* grid, int threads, u64 bytes,
                       const Options& options);
    void barrier(Site site);
    void collective(const char* op, Site site, void* registers, void (*compute)(void* const*));
    void copy_async(void* dst, const void* src, bool pred, Site site);
    void copy_commit() { self().copies.commit(); }
    void copy_wait(u64 newest) { self().copies.wait(newest); }
    [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));

   private:
    Options options_;
    void (*kernel_)(void**) = nullptr;
    void** args_ = nullptr;
    std::string error_;

    std::vector<std::unique_ptr<Thread>> threads_;
    Fiber main_;
    u64 ready_[max_threads / 64] = {};  // one bit per thread
    int done_ = 0;
    Rendezvous barrier_;
    Rendezvous warps_[max_threads / 32];
    void* slots_[max_threads];  // the registers each lane left
    u64 random_ = 0;

    unsigned char* memory_ = nullptr;
    u64 capacity_ = 0;

    Thread& thread(int t) { return *threads_[std::size_t(t)]; }
    Thread& self() { return thread(current.thread); }

    bool make_threads(int count);
    void make_shared(u64 bytes);
    void run_block();
    void check_guard();
    [[noreturn]] static void entry();
    void finish();

    void arrive(Rendezvous& r, const char* op, Site site);
    void sleep(const char* op, Site site);
    void wake(int first, int count);
    void next();
    int pick();
    int first_ready(int from) const;
    unsigned random(u64 below);
    [[noreturn]] void stop(const std::string& error);
    std::string stuck();

    void poison(void* p, u64 bytes) const;
};

Runtime runtime;

// ---- launch -------------------------------------------------------------------------------------

std::string Runtime::launch(const Kernel& kernel, void** args, const unsigned* grid, int threads, u64 bytes,
                            const Options& options) {
    kernel_ = kernel.call, args_ = args, options_ = options, error_.clear();
    random_ = options.seed;
    if (!make_threads(threads)) return "no memory for the stacks of " + std::to_string(threads) + " threads";
    make_shared(bytes);
    current.size = threads;
    for (int i = 0; i < 3; ++i) current.grid[i] = int(grid[i]);

    const u64 blocks = u64(grid[0]) * grid[1] * grid[2];
    std::vector<u64> permutation(options.order == shuffled ? std::size_t(blocks) : 0);
    for (u64 i = 0; i < permutation.size(); ++i) {
        const u64 j = random(i + 1);
        permutation[i] = permutation[j];
        permutation[j] = i;
    }
    for (u64 i = 0; i < blocks && error_.empty(); ++i) {
        const u64 b = options.order == forward ? i : options.order == reverse ? blocks - 1 - i : permutation[i];
        current.block[0] = int(b % grid[0]);
        current.block[1] = int(b / grid[0] % grid[1]);
        current.block[2] = int(b / grid[0] / grid[1]);
        run_block();
    }
    return error_;
}

bool Runtime::make_threads(int count) {
    while (int(threads_.size()) < count) {
        auto fresh = std::make_unique<Thread>();
        if (!fresh->fiber.prepare(&Runtime::entry, unsigned(threads_.size()))) return false;
        threads_.push_back(std::move(fresh));
    }
    return true;
}

// Dynamic shared memory: 128-byte aligned, followed by a guard that is checked after each block, or that the address
// sanitizer watches.
void Runtime::make_shared(u64 bytes) {
    const u64 rounded = (bytes + 127) / 128 * 128;
#ifdef __SANITIZE_ADDRESS__
    if (memory_) __asan_unpoison_memory_region(memory_, capacity_ + guard_bytes);
#endif
    if (!memory_ || capacity_ < rounded) {
        std::free(memory_);
        capacity_ = rounded;
        memory_ = static_cast<unsigned char*>(std::aligned_alloc(128, capacity_ + guard_bytes));
        if (!memory_) std::abort();
    }
    current.shared = memory_, current.shared_bytes = bytes;
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(memory_ + bytes, capacity_ + guard_bytes - bytes);
#else
    std::memset(memory_ + bytes, guard_value, guard_bytes);
#endif
}

void Runtime::check_guard() {
#ifndef __SANITIZE_ADDRESS__
    for (u64 i = 0; i < guard_bytes; ++i)
        if (memory_[current.shared_bytes + i] != guard_value) {
            error_ = "shared memory overrun: byte " + std::to_string(current.shared_bytes + i) +
                     " was written, the block has " + std::to_string(current.shared_bytes) + " (block " + block() + ")";
            return;
        }
#endif
}

void Runtime::run_block() {
    done_ = barrier_.arrived = 0;
    for (Rendezvous& w : warps_) w.arrived = 0;
    for (int t = 0; t < current.size; ++t) thread(t).done = false;
    wake(0, current.size);
    poison(current.shared, current.shared_bytes);
    current.thread = pick();
    Fiber::swap(main_, self().fiber);
    if (error_.empty()) return check_guard();

    for (std::size_t t = 0; t < threads_.size(); ++t) {  // abandoned where they stood: set them to begin anew
        threads_[t]->copies.clear();
        threads_[t]->fiber.prepare(&Runtime::entry, unsigned(t));
    }
    std::memset(ready_, 0, sizeof ready_);
}

// First function of every fiber.
void Runtime::entry() {
    runtime.self().fiber.arrived(&runtime.main_);
    for (;;) {
        runtime.kernel_(runtime.args_);
        runtime.finish();
    }
}

// The running thread has returned from the kernel. Its fiber sleeps here until the next block.
void Runtime::finish() {
    Thread& me = self();
    if (me.copies.pending() > 0)
        fail("thread %d returned with %zu cp.async copies never waited for, the first issued at %s", current.thread,
             me.copies.pending(), text(me.copies.oldest()).c_str());
    me.copies.clear();
    me.done = true;
    ready_[current.thread / 64] &= ~(1ull << (current.thread % 64));
    if (++done_ < current.size) next();
    else Fiber::swap(me.fiber, main_);
}

// ---- rendezvous ---------------------------------------------------------------------------------

void Runtime::barrier(Site site) {
    arrive(barrier_, "sync()", site);
    if (barrier_.arrived < current.size) return sleep("sync()", site);
    barrier_.arrived = 0;
    wake(0, current.size);
    next();
}

void Runtime::collective(const char* op, Site site, void* registers, void (*compute)(void* const*)) {
    const int warp = current.thread / 32;
    arrive(warps_[warp], op, site);
    slots_[current.thread] = registers;
    if (warps_[warp].arrived < 32) return sleep(op, site);
    warps_[warp].arrived = 0;
    if (compute) compute(slots_ + 32 * warp);
    wake(32 * warp, 32);
    next();
}

void Runtime::arrive(Rendezvous& r, const char* op, Site site) {
    if (r.arrived == 0) r.op = op, r.site = site, r.first = current.thread;
    else if (!same(r.op, op) || !same(r.site, site))
        fail("divergent threads: thread %d calls %s at %s while thread %d waits in %s at %s (block %s)", current.thread,
             op, text(site).c_str(), r.first, r.op, text(r.site).c_str(), block().c_str());
    ++r.arrived;
}

void Runtime::sleep(const char* op, Site site) {
    self().waits_in = op, self().site = site;
    ready_[current.thread / 64] &= ~(1ull << (current.thread % 64));
    next();
}

// `first` and `count` are multiples of 32.
void Runtime::wake(int first, int count) {
    for (int t = first; t < first + count; t += 32) ready_[t / 64] |= 0xffffffffull << (t % 64);
}

// ---- scheduling ---------------------------------------------------------------------------------

// Continues with the next ready thread; returns when this one is picked again.
void Runtime::next() {
    const int t = pick();
    if (t < 0) stop(stuck());
    if (t == current.thread) return;
    Thread& me = self();
    current.thread = t;
    Fiber::swap(me.fiber, self().fiber);
}

int Runtime::pick() {
    if (options_.order == forward) return first_ready(0);
    if (options_.order == reverse) {
        for (int word = (current.size - 1) / 64; word >= 0; --word)
            if (ready_[word]) return word * 64 + 63 - __builtin_clzll(ready_[word]);
        return -1;
    }
    const int t = first_ready(int(random(u64(current.size))));
    return t >= 0 ? t : first_ready(0);
}

// The lowest ready thread >= from, or -1.
int Runtime::first_ready(int from) const {
    u64 above = ~0ull << (from % 64);
    for (int word = from / 64; word * 64 < current.size; ++word, above = ~0ull)
        if (const u64 bits = ready_[word] & above) return word * 64 + __builtin_ctzll(bits);
    return -1;
}

unsigned Runtime::random(u64 below) {  // splitmix64
    u64 r = random_ += 0x9e3779b97f4a7c15ull;
    r = (r ^ (r >> 30)) * 0xbf58476d1ce4e5b9ull;
    r = (r ^ (r >> 27)) * 0x94d049bb133111ebull;
    return unsigned((r ^ (r >> 31)) % below);
}

// ---- errors -------------------------------------------------------------------------------------

void Runtime::fail(const char* format, ...) {
    char sentence[512];
    va_list list;
    va_start(list, format);
    std::vsnprintf(sentence, sizeof sentence, format, list);
    va_end(list);
    stop(sentence);
}

// Ends the launch. The fibers are abandoned where they stand, so nothing of theirs is destroyed: kernels own no memory.
void Runtime::stop(const std::string& error) {
    error_ = error;
    Fiber::swap(self().fiber, main_);
    std::abort();
}

// No thread can go on: who waits where, and who has returned.
std::string Runtime::stuck() {
    std::map<std::string, std::pair<int, int>> places;  // place -> (how many, the first of them)
    for (int t = 0; t < current.size; ++t) {
        const Thread& it = thread(t);
        const std::string place =
            it.done ? "returned from the kernel" : std::string("wait in ") + it.waits_in + " at " + text(it.site);
        ++places.try_emplace(place, 0, t).first->second.first;
    }
    std::string sentence = done_ > 0 ? "early exit: " : "deadlock: ";
    for (const auto& [place, who] : places)
        sentence += std::to_string(who.first) + " of " + std::to_string(current.size) + " threads (first " +
                    std::to_string(who.second) + ") " + place + "; ";
    return sentence + "block " + block();
}

// ---- asynchronous copies --------------------------------------------------------------------------

void Runtime::copy_async(void* dst, const void* src, bool pred, Site site) {
    require_aligned("cp_async16 destination", dst, site);
    require_aligned("cp_async16 source", src, site);
    require_shared("cp_async16 destination", dst, 16, site);
    const Copy copy{dst, pred ? src : nullptr, site};
    if (!options_.late_copies) return copy.land();
    poison(dst, 16);
    self().copies.issue(copy);
}

void Runtime::poison(void* p, u64 bytes) const {
    auto* const out = static_cast<unsigned char*>(p);
    for (u64 i = 0; i < bytes; i += 4) std::memcpy(out + i, &options_.poison, bytes - i < 4 ? bytes - i : 4);
}

}  // namespace

// ---- runtime.hpp --------------------------------------------------------------------------------

void barrier(Site site) { runtime.barrier(site); }
void collective(const char* op, Site site, void* registers, void (*compute)(void* const*)) {
    runtime.collective(op, site, registers, compute);
}
void copy_async(void* dst, const void* src, bool pred, Site site) { runtime.copy_async(dst, src, pred, site); }
void copy_commit() { runtime.copy_commit(); }
void copy_wait(u64 newest) { runtime.copy_wait(newest); }

void require_aligned(const char* what, const void* p, Site site) {
    if (reinterpret_cast<u64>(p) % 16)
        runtime.fail("%s at %s is not 16-byte aligned: address %p (thread %d, block %s)", what, text(site).c_str(), p,
                     current.thread, block().c_str());
}
void require_shared(const char* what, const void* p, u64 bytes, Site site) {
    const u64 offset = u64(static_cast<const unsigned char*>(p) - current.shared);  // wraps when below
    if (offset > current.shared_bytes || bytes > current.shared_bytes - offset)
        runtime.fail("%s at %s lies outside shared memory: byte %lld, the block has %llu (thread %d, block %s)", what,
                     text(site).c_str(), (long long)offset, current.shared_bytes, current.thread, block().c_str());
}

}  // namespace vk::host

// ---- C interface --------------------------------------------------------------------------------

// Null on success, else one sentence that stays valid until the next call. `args` points to the `count` arguments'
// values, as for cuLaunchKernel; `sizes` are their bytes. One launch at a time per process.
extern "C" __attribute__((visibility("default"))) const char* vk_launch(
    const vk::host::Kernel* kernel, const unsigned* grid, const unsigned* block, unsigned long long shared_bytes,
    void** args, const unsigned* sizes, int count, const vk::host::Options* options) {
    using namespace vk::host;
    static std::mutex mutex;
    static std::string error;
    const std::lock_guard<std::mutex> lock(mutex);
    if (block[0] == 0 || block[0] % 32 || block[0] > max_threads || block[1] != 1 || block[2] != 1)
        error = "block is " + triple(block[0], block[1], block[2]) +
                "; allowed: (n,1,1) with n a multiple of 32 up to 1024";
    else if (grid[0] - 1 >= 0x7fffffffu || grid[1] - 1 >= 65535u || grid[2] - 1 >= 65535u)  // 0 wraps
        error = "grid is " + triple(grid[0], grid[1], grid[2]) + "; allowed: 1..2147483647, 1..65535, 1..65535";
    else if (shared_bytes > max_shared_bytes)
        error = std::to_string(shared_bytes) + " bytes of shared memory asked for; allowed: " +
                std::to_string(max_shared_bytes);
    else if (count != kernel->parameters)
        error = std::string(kernel->name) + " takes " + std::to_string(kernel->parameters) + " arguments; given: " +
                std::to_string(count);
    else if (const int wrong = first_difference(kernel->sizes, sizes, count); wrong < count)
        error = "argument " + std::to_string(wrong) + " of " + kernel->name + " has " +
                std::to_string(kernel->sizes[wrong]) + " bytes; given: " + std::to_string(sizes[wrong]);
    else
        error = runtime.launch(*kernel, args, grid, int(block[0]), shared_bytes, *options);
    return error.empty() ? nullptr : error.c_str();
}
