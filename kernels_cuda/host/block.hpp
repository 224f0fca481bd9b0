// One CUDA block on one processor: its threads are fibers, its barriers and warp collectives are rendezvous.
//
// A thread runs until it must wait, then switches straight to the next ready thread. Which one is next is the `order` of
// the launch: ascending, descending or seeded random. The first two let one warp run as far ahead of the others as its
// barriers allow, so a missing barrier reads poison or stale data in one of them.
//
// What could hang on a GPU (a barrier that some threads never reach, lanes in different collectives) ends the launch with
// a sentence that names the operation and its source line.
#pragma once
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fiber.hpp"

namespace vk::host {

// Where a primitive was called: the default argument of each primitive is evaluated at its call.
struct Site {
    const char* file;
    int line;
    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
    bool operator==(const Site& other) const { return line == other.line && std::strcmp(file, other.file) == 0; }
    std::string text() const {
        const char* slash = std::strrchr(file, '/');
        return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
    }
};

enum Order : unsigned { forward = 0, reverse = 1, shuffled = 2 };

struct Options {
    unsigned order = forward;
    unsigned late_copies = 1;       // cp.async: poison at the issue, data at the wait; 0: data at once
    unsigned poison = 0x7fff7fffu;  // NaN as f16, bf16 and float; fills shared memory before each block
    unsigned seed = 0;              // of order `shuffled`
};

struct Copy {
    void* dst;
    const void* src;  // null: zeros
    Site site;
};

struct Thread {
    Fiber fiber;
    int id = 0;
    const char* waits_in = nullptr;  // name of the primitive, null while it may run
    Site site{};
    bool done = false;
    std::vector<Copy> copies;             // cp.async issued and not landed, oldest first
    std::vector<std::size_t> group_ends;  // prefix lengths of `copies`: the committed groups, oldest first
};

// A warp collective in progress. Each lane leaves a pointer to its registers; the last to arrive computes for all.
struct Warp {
    int arrived = 0;
    const char* op = nullptr;
    Site site{};
    int first_lane = 0;
    void* slots[32];
};

class Block {
   public:
    static constexpr int max_threads = 1024;
    static constexpr std::size_t guard_bytes = 4096;

    int x = 0, y = 0, z = 0, grid[3] = {1, 1, 1}, size = 0;
    Thread* self = nullptr;
    unsigned char* shared = nullptr;
    std::size_t shared_bytes = 0;
    Options options;

    // Runs `kernel(args)` for every block of the grid; returns an empty string or what went wrong.
    std::string launch(void (*kernel)(void**), void** args, const unsigned (&grid_size)[3], int threads,
                       std::size_t bytes, const Options& opts) {
        kernel_ = kernel, args_ = args, size = threads, options = opts, error_.clear();
        for (int i = 0; i < 3; ++i) grid[i] = int(grid_size[i]);
        random_ = 0x9e3779b97f4a7c15ull * (opts.seed + 1ull);
        while (int(threads_.size()) < threads) {
            threads_.push_back(std::make_unique<Thread>());
            threads_.back()->id = int(threads_.size()) - 1;
            if (!threads_.back()->fiber.prepare(&Block::entry, unsigned(threads_.size()))) {
                threads_.pop_back();
                return "no memory for the stacks of " + std::to_string(threads) + " threads";
            }
        }
        allocate(bytes);
        const long long blocks = 1ll * grid[0] * grid[1] * grid[2];
        std::vector<long long> sequence;
        if (options.order == shuffled) {
            sequence.resize(std::size_t(blocks));
            for (long long i = 0; i < blocks; ++i) sequence[std::size_t(i)] = i;
            for (long long i = blocks - 1; i > 0; --i) std::swap(sequence[std::size_t(i)], sequence[std::size_t(random(unsigned(i + 1)))]);
        }
        for (long long i = 0; i < blocks && error_.empty(); ++i) {
            const long long b = options.order == forward ? i : options.order == reverse ? blocks - 1 - i : sequence[std::size_t(i)];
            x = int(b % grid[0]), y = int(b / grid[0] % grid[1]), z = int(b / grid[0] / grid[1]);
            run_block();
        }
        return error_;
    }

    // ---- what primitives call, on a fiber ----------------------------------------------------------------------------

    void barrier(Site site) {
        if (barrier_arrived_ > 0 && !(barrier_site_ == site))
            fail("divergent barrier: thread %d is at sync() %s while thread %d waits at sync() %s", self->id,
                 site.text().c_str(), barrier_first_, barrier_site_.text().c_str());
        if (barrier_arrived_ == 0) barrier_site_ = site, barrier_first_ = self->id;
        if (++barrier_arrived_ < size) return wait("sync()", site);
        barrier_arrived_ = 0;
        for (int t = 0; t < size; ++t) wake(t);
        next();
    }

    // `compute(slots)` sees the pointers that the 32 lanes left.
    template <class F> void collective(const char* op, Site site, void* registers, F compute) {
        Warp& w = warps_[self->id / 32];
        const int lane = self->id % 32;
        if (w.arrived > 0 && (w.op != op || !(w.site == site)))
            fail("divergent warp collective: thread %d calls %s at %s while lane %d of its warp waits in %s at %s",
                 self->id, op, site.text().c_str(), w.first_lane, w.op, w.site.text().c_str());
        if (w.arrived == 0) w.op = op, w.site = site, w.first_lane = lane;
        w.slots[lane] = registers;
        if (++w.arrived < 32) return wait(op, site);
        w.arrived = 0;
        compute(w.slots);
        for (int t = self->id - lane, end = t + 32; t < end; ++t) wake(t);
        next();
    }

    void copy_async(void* dst, const void* src, bool pred, Site site) {
        require_aligned("cp_async16 destination", dst, site);
        require_aligned("cp_async16 source", src, site);
        require_shared("cp_async16 destination", dst, 16, site);
        const Copy copy{dst, pred ? src : nullptr, site};
        if (!options.late_copies) return land(copy);
        fill_poison(dst, 16);
        self->copies.push_back(copy);
    }
    void copy_commit() { self->group_ends.push_back(self->copies.size()); }
    void copy_wait(std::size_t newest) {
        auto& ends = self->group_ends;
        if (ends.size() <= newest) return;
        const std::size_t groups = ends.size() - newest, n = ends[groups - 1];
        for (std::size_t i = 0; i < n; ++i) land(self->copies[i]);
        self->copies.erase(self->copies.begin(), self->copies.begin() + long(n));
        ends.erase(ends.begin(), ends.begin() + long(groups));
        for (std::size_t& end : ends) end -= n;
    }

    void require_aligned(const char* what, const void* p, Site site) {
        if (reinterpret_cast<std::uintptr_t>(p) % 16)
            fail("%s at %s is not 16-byte aligned: address %p (thread %d, block %d,%d,%d)", what, site.text().c_str(), p,
                 self->id, x, y, z);
    }
    void require_shared(const char* what, const void* p, std::size_t bytes, Site site) {
        const long long offset = static_cast<const unsigned char*>(p) - shared;
        if (offset < 0 || offset + (long long)bytes > (long long)shared_bytes)
            fail("%s at %s lies outside shared memory: byte %lld of %zu (thread %d, block %d,%d,%d)", what,
                 site.text().c_str(), offset, shared_bytes, self->id, x, y, z);
    }

    // Ends the launch with this sentence. Never returns: the fibers are abandoned where they stand.
    [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3))) {
        char text[512];
        va_list list;
        va_start(list, format);
        std::vsnprintf(text, sizeof text, format, list);
        va_end(list);
        stop(text);
    }

   private:
    std::vector<std::unique_ptr<Thread>> threads_;
    Warp warps_[max_threads / 32];
    std::uint64_t ready_[max_threads / 64] = {};
    Fiber main_;
    void (*kernel_)(void**) = nullptr;
    void** args_ = nullptr;
    int done_ = 0, barrier_arrived_ = 0, barrier_first_ = 0;
    Site barrier_site_{};
    std::uint64_t random_ = 0;
    std::string error_;
    unsigned char* memory_ = nullptr;
    std::size_t capacity_ = 0;

    void run_block();
    void allocate(std::size_t bytes);
    [[noreturn]] static void entry();
    void finish();

    void wait(const char* op, Site site) {
        self->waits_in = op, self->site = site;
        ready_[self->id / 64] &= ~(1ull << (self->id % 64));
        next();
    }
    void wake(int t) {
        threads_[std::size_t(t)]->waits_in = nullptr;
        ready_[t / 64] |= 1ull << (t % 64);
    }

    unsigned random(unsigned below) {  // splitmix64
        std::uint64_t r = random_ += 0x9e3779b97f4a7c15ull;
        r = (r ^ (r >> 30)) * 0xbf58476d1ce4e5b9ull;
        r = (r ^ (r >> 27)) * 0x94d049bb133111ebull;
        return unsigned((r ^ (r >> 31)) % below);
    }

    // First ready thread at or after `from`, or -1.
    int first_ready(int from) const {
        for (int word = from / 64; word * 64 < size; ++word) {
            std::uint64_t bits = ready_[word];
            if (word == from / 64) bits &= ~0ull << (from % 64);
            if (bits) return word * 64 + __builtin_ctzll(bits);
        }
        return -1;
    }
    int pick() {
        if (options.order == forward) return first_ready(0);
        if (options.order == reverse) {
            for (int word = (size - 1) / 64; word >= 0; --word)
                if (ready_[word]) return word * 64 + 63 - __builtin_clzll(ready_[word]);
            return -1;
        }
        const int t = first_ready(int(random(unsigned(size))));
        return t >= 0 ? t : first_ready(0);
    }

    // Continues with the next ready thread; returns when this one is picked again.
    void next() {
        const int t = pick();
        if (t < 0) stop(stuck());
        if (t == self->id) return;
        Thread* const me = self;
        self = threads_[std::size_t(t)].get();
        Fiber::swap(me->fiber, self->fiber);
    }

    [[noreturn]] void stop(const std::string& error) {
        error_ = error;
        Fiber::swap(self->fiber, main_);
        std::abort();  // an abandoned fiber is prepared anew before it runs again
    }

    // No thread can go on: who waits where, and who has returned.
    std::string stuck() const {
        std::map<std::string, std::pair<int, int>> places;  // place -> how many, the first of them
        for (int t = 0; t < size; ++t) {
            const Thread& thread = *threads_[std::size_t(t)];
            const std::string place = thread.done ? "returned from the kernel" : std::string("wait in ") + thread.waits_in + " at " + thread.site.text();
            ++places.try_emplace(place, 0, t).first->second.first;
        }
        std::string text = done_ > 0 ? "early exit: " : "deadlock: ";
        const char* separator = "";
        for (const auto& [place, who] : places) {
            text += separator + std::to_string(who.first) + " of " + std::to_string(size) + " threads (first " + std::to_string(who.second) + ") " + place;
            separator = "; ";
        }
        return text + " (block " + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
    }

    void land(const Copy& copy) {
        if (copy.src) std::memcpy(copy.dst, copy.src, 16);
        else std::memset(copy.dst, 0, 16);
    }
    void fill_poison(void* p, std::size_t bytes) const {
        auto* bytes_out = static_cast<unsigned char*>(p);
        for (std::size_t i = 0; i < bytes; ++i) bytes_out[i] = (unsigned char)(options.poison >> (8 * (i % 4)));
    }
};

inline Block block;

inline void Block::entry() {
    block.self->fiber.arrived(&block.main_);
    for (;;) {
        block.kernel_(block.args_);
        block.finish();
    }
}

// The running thread has returned from the kernel. Its fiber sleeps here until the next block.
inline void Block::finish() {
    if (!self->copies.empty())
        fail("thread %d returned with %zu cp.async copies never waited for, the first issued at %s", self->id,
             self->copies.size(), self->copies.front().site.text().c_str());
    self->group_ends.clear();
    self->done = true;
    ready_[self->id / 64] &= ~(1ull << (self->id % 64));
    if (++done_ < size) return next();
    Fiber::swap(self->fiber, main_);
}

inline void Block::run_block() {
    done_ = barrier_arrived_ = 0;
    for (Warp& w : warps_) w.arrived = 0;
    for (int t = 0; t < size; ++t) {
        threads_[std::size_t(t)]->done = false;
        wake(t);
    }
    fill_poison(shared, shared_bytes);
    self = threads_[std::size_t(pick())].get();
    Fiber::swap(main_, self->fiber);
    if (error_.empty()) {
#ifndef __SANITIZE_ADDRESS__
        for (std::size_t i = 0; i < guard_bytes; ++i)
            if (shared[shared_bytes + i] != 0xa5) {
                error_ = "shared memory overrun: byte " + std::to_string(shared_bytes + i) + " of " + std::to_string(shared_bytes) + " was written";
                break;
            }
#endif
        return;
    }
    for (auto& thread : threads_) {
        thread->copies.clear();
        thread->group_ends.clear();
        thread->fiber.prepare(&Block::entry, unsigned(thread->id + 1));
    }
    std::memset(ready_, 0, sizeof ready_);
}

// Dynamic shared memory: 128-byte aligned, followed by a guard that is checked after each block (or that the address
// sanitizer watches).
inline void Block::allocate(std::size_t bytes) {
    const std::size_t rounded = (bytes + 127) / 128 * 128;
    if (memory_ == nullptr || capacity_ < rounded) {
        std::free(memory_);
        capacity_ = rounded;
        memory_ = static_cast<unsigned char*>(std::aligned_alloc(128, capacity_ + guard_bytes));
        if (!memory_) std::abort();
    }
    shared = memory_, shared_bytes = bytes;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(memory_, capacity_ + guard_bytes);
    __asan_poison_memory_region(shared + bytes, capacity_ + guard_bytes - bytes);
#else
    std::memset(shared + bytes, 0xa5, guard_bytes);
#endif
}

}  // namespace vk::host
