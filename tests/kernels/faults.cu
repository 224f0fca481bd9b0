// Kernels with one planted fault each, and their healthy forms: what the host runtime must see and must let pass.
#include "tile.cuh"

namespace vk {

// out[t] = x[n-1-t] through shared memory.
template <bool Barrier> VK_KERNEL void reversed(const float* x, float* out) {
    VK_DYN_SHARED(smem);
    float* const s = reinterpret_cast<float*>(smem);
    s[tid()] = x[tid()];
    if constexpr (Barrier) sync();
    out[tid()] = s[nthreads() - 1 - tid()];
}

// The same inside each warp.
template <bool Barrier> VK_KERNEL void warp_reversed(const float* x, float* out) {
    VK_DYN_SHARED(smem);
    float* const s = reinterpret_cast<float*>(smem);
    s[tid()] = x[tid()];
    if constexpr (Barrier) syncwarp();
    out[tid()] = s[tid() ^ 31];
}

// Several rounds through one buffer: without the second barrier a fast warp refills what a slow one still reads.
template <bool Barrier> VK_KERNEL void rounds(const float* x, float* out, i32 n) {
    VK_DYN_SHARED(smem);
    float* const s = reinterpret_cast<float*>(smem);
    float sum = 0;
    for (int i = 0; i < n; ++i) {
        s[tid()] = x[i * nthreads() + tid()];
        sync();
        sum += s[nthreads() - 1 - tid()] * float(i + 1);
        if constexpr (Barrier) sync();
    }
    out[tid()] = sum;
}

// A double buffer of asynchronous copies: stage i is read while stage i+1 travels. `Pending` groups may still be in
// flight when stage i is read: 1 is right, 2 is too lax. Without the barrier the next copy refills what others read.
template <int Pending, bool Barrier> VK_KERNEL void pipeline(const float* x, float* out, i32 stages) {
    VK_DYN_SHARED(smem);
    float* const s = reinterpret_cast<float*>(smem);
    const int n = nthreads(), t = tid();  // each thread copies four floats and reads another thread's
    auto issue = [&](int i) {
        if (i < stages) cp_async16(s + (i % 2) * 4 * n + 4 * t, x + i * 4 * n + 4 * t, true);
        cp_async_commit();
    };
    issue(0);
    float sum = 0;
    for (int i = 0; i < stages; ++i) {
        issue(i + 1);
        cp_async_wait<Pending>();
        sync();
        for (int j = 0; j < 4; ++j) sum += s[(i % 2) * 4 * n + 4 * (n - 1 - t) + j];
        if constexpr (Barrier) sync();
    }
    cp_async_wait<0>();
    out[t] = sum;
}

// Sum over a tile whose last rows do not exist. Unfilled, they hold whatever shared memory held.
template <bool Fill> VK_KERNEL void tail(const float* x, float* out, i32 n) {
    VK_DYN_SHARED(smem);
    float* const s = reinterpret_cast<float*>(smem);
    if (tid() < n) s[tid()] = x[tid()];
    else if (Fill) s[tid()] = 0;
    sync();
    float sum = 0;
    for (int i = 0; i < nthreads(); ++i) sum += s[i];
    out[tid()] = sum;
}

// Past the end by `over` elements, of shared or of global memory.
VK_KERNEL void shared_overrun(float* out, i32 over) {
    VK_DYN_SHARED(smem);
    float* const s = reinterpret_cast<float*>(smem);
    s[tid() + over] = 1;  // FAULT: shared_overrun
    sync();
    out[tid()] = s[tid()];
}
VK_KERNEL void global_overrun(float* out, i32 over) {
    out[tid() + over] = 1;  // FAULT: global_overrun
}

VK_KERNEL void early_exit(float* out, i32 leave) {
    if (tid() >= leave) return;
    sync();  // FAULT: early_exit
    out[tid()] = 1;
}
VK_KERNEL void divergent_barriers(float* out, i32 half) {
    if (tid() < half) {
        sync();  // FAULT: divergent_barriers, first
    } else {
        sync();  // FAULT: divergent_barriers, second
    }
    out[tid()] = 1;
}
VK_KERNEL void absent_lanes(float* out, i32 lanes) {
    float x = 1;
    if (lane() < lanes) x = shfl_xor(x, 1);  // FAULT: absent_lanes
    sync();                                  // FAULT: absent_lanes, the others
    out[tid()] = x;
}
VK_KERNEL void mixed_collectives(float* out, i32 lanes) {
    float x = 1;
    if (lane() < lanes) x = shfl_xor(x, 1);
    else x = shfl_up(x, 1);
    out[tid()] = x;
}

VK_KERNEL void misaligned(const float* x, float* out, i32 what) {
    VK_DYN_SHARED(smem);
    u32 r[4];
    if (what == 0) st128(out + 4 * tid(), ld128(x + 4 * tid() + 1));
    if (what == 1) cp_async16(smem + 16 * tid() + 4, x + 4 * tid(), true);
    if (what == 2) cp_async16(smem + 16 * tid(), x + 4 * tid() + 2, true);
    if (what == 3) ldmatrix_x4(r, smem + 16 * tid() + 8);
    if (what == 4) ldmatrix_x4(r, smem + 16 * (tid() + 1));  // beyond the end for the last lane
    if (what == 5) ldmatrix_x4(r, x);
    if (what == 6) cp_async16(out, x, true);
    if (what == 7) cp_async16(smem + 16 * tid(), x + 4 * tid(), true);  // never waited for
}

VK_KERNEL void many_parameters(i32 a, i64 b, float c, float* out) { out[tid()] = float(a) + float(b) + c; }

// Order of arrival, written through a counter: only one thread runs at a time on the host.
VK_KERNEL void arrivals(i32* count, i32* order) {
    order[(*count)++] = bidx() * nthreads() + tid();
    sync();
}

VK_KERNEL void uninitialised(u32* out) {
    VK_DYN_SHARED(smem);
    out[tid()] = reinterpret_cast<u32*>(smem)[tid()];
    reinterpret_cast<u32*>(smem)[tid()] = 7;  // the next block must not see it
}

template <int Bytes> VK_KERNEL void deep(float* out, i32 n) {  // a thread has 128 KB of stack
    volatile unsigned char frame[Bytes];
    frame[0] = 1;
    for (int i = 0; i < n; ++i) frame[(i * 64) % Bytes] = u8(i);
    out[tid()] = frame[0];
}

}  // namespace vk
