// What the host twin of a primitive may ask of the runtime (runtime.cpp). No standard header, since every kernel
// includes this: a kernel then compiles in a fraction of a second.
#pragma once

namespace vk::host {

// Where a primitive was called: the default argument of each primitive is evaluated at its call.
struct Site {
    const char* file;
    int line;
    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

// The thread that runs now, its block and its grid.
struct Current {
    int thread, size;       // tid(), nthreads()
    int block[3], grid[3];  // x, y, z of each
    unsigned char* shared;  // dynamic shared memory of the block
    u64 shared_bytes;
};

#pragma GCC visibility push(default)  // one runtime serves all kernel libraries of a process

extern Current current;

void barrier(Site site);

// A warp collective: each lane leaves a pointer to its registers, the last to arrive computes for all 32.
void collective(const char* op, Site site, void* registers, void (*compute)(void* const* slots));

void copy_async(void* dst, const void* src, bool pred, Site site);
void copy_commit();
void copy_wait(u64 newest);

void require_aligned(const char* what, const void* p, Site site);
void require_shared(const char* what, const void* p, u64 bytes, Site site);

#pragma GCC visibility pop

// One kernel instance, as vk_launch takes it.
struct Kernel {
    const char* name;
    void (*call)(void** args);
    int parameters;
    const unsigned* sizes;  // bytes of each parameter
};

// Calls F with its arguments read through `args`, as cuLaunchKernel does.
template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { using type = Indices<I...>; };

template <auto F> struct Invoke;
template <class... A, void (*F)(A...)> struct Invoke<F> {
    static constexpr int parameters = sizeof...(A);
    static constexpr unsigned sizes[parameters + 1] = {unsigned(sizeof(A))..., 0};
    static void call(void** args) { with(args, typename Count<parameters>::type{}); }

   private:
    template <int... I> static void with([[maybe_unused]] void** args, Indices<I...>) {
        F(*static_cast<A*>(args[I])...);
    }
};

template <auto F> constexpr Kernel make_kernel(const char* name) {
    return {name, &Invoke<F>::call, Invoke<F>::parameters, Invoke<F>::sizes};
}

}  // namespace vk::host
