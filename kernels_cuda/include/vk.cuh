// vk: the small vocabulary in which every kernel of this directory is written.
//
// One source, two machines. `device.cuh` gives each primitive as the PTX instruction it is; `host/twin.hpp` gives the
// same primitive as plain C++ with CUDA threads as fibers. This file picks one, and nothing above it knows which.
// NVRTC, nvcc and g++/clang++ compile it; no toolkit or standard header is needed on the device.
//
// Rules for kernels: one-dimensional blocks; shared memory only through VK_DYN_SHARED (the host poisons it before
// every block, which it cannot do for static arrays); no atomics (results are bitwise reproducible);
// no lambda with `auto` parameters (NVRTC 13.0 refuses it).
#pragma once

#include "types.cuh"

// What a side must define:
//   macros    VK_DEVICE, VK_KERNEL, VK_KERNEL_BOUNDS(threads, min_blocks), VK_DYN_SHARED(name)
//   position  tid nthreads bidx bidy bidz gdimx gdimy gdimz, anew, blocks_that_fit
//   order     sync syncwarp
//   exchange  shfl shfl_xor shfl_up shfl_down (4-byte types, all 32 lanes)
//   matrix    ldmatrix_x4 ldmatrix_x4_trans ldmatrix_x2 ldmatrix_x2_trans mma16816<T> mma1688
//   copies    ld128 st128 cp_async16 cp_async_commit cp_async_wait<N>
//   bits      as_float as_u32 f16_value f16_round bf16_round f16x2_round bf16x2_round
//   math      exp2 exp2_flush log2f exp log1p rsqrtf sqrt_rn fma fmax fmin fabs
#if defined(__CUDACC__)
#include "device.cuh"
#else
#include "../host/twin.hpp"
#endif

namespace vk {

VK_DEVICE int lane() { return tid() % warp_size; }
VK_DEVICE int warp() { return tid() / warp_size; }

VK_DEVICE constexpr int min(int a, int b) { return a < b ? a : b; }
VK_DEVICE constexpr int max(int a, int b) { return a > b ? a : b; }
VK_DEVICE constexpr i64 min(i64 a, i64 b) { return a < b ? a : b; }
VK_DEVICE constexpr i64 max(i64 a, i64 b) { return a > b ? a : b; }
VK_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
VK_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// ---- 16-bit floats ------------------------------------------------------------------------------

VK_DEVICE float to_float(float x) { return x; }
VK_DEVICE float to_float(f16 x) { return f16_value(x.x); }
VK_DEVICE float to_float(bf16 x) { return as_float(u32(x.x) << 16); }

// Round to nearest, ties to even; overflow gives infinity; NaN stays NaN (the canonical 0x7fff in 16 bits).
template <class T> VK_DEVICE T from_float(float x) {
    if constexpr (is_same<T, f16>) return T{f16_round(x)};
    else if constexpr (is_same<T, bf16>) return T{bf16_round(x)};
    else {
        static_assert(is_same<T, float>, "T is f16, bf16 or float");
        return x;
    }
}

// Two 16-bit floats in one register, `lo` in the low half: the element with the lower address.
template <class T> VK_DEVICE u32 pack2(float lo, float hi) {
    static_assert(is_16bit<T>, "pack2 is for f16 and bf16");
    if constexpr (is_same<T, f16>) return f16x2_round(lo, hi);
    else return bf16x2_round(lo, hi);
}

template <class T> VK_DEVICE void unpack2(u32 x, float& lo, float& hi) {
    static_assert(is_16bit<T>, "unpack2 is for f16 and bf16");
    lo = to_float(T{u16(x & 0xffffu)});
    hi = to_float(T{u16(x >> 16)});
}

// ---- 16 bytes at a time -------------------------------------------------------------------------

// How many elements 16 bytes hold: 8 of f16 and bf16, 4 of float.
template <class T> inline constexpr int vec = 16 / int(sizeof(T));

VK_DEVICE bool aligned16(const void* p) { return (reinterpret_cast<u64>(p) & 15) == 0; }

template <class T> VK_DEVICE T get(const u128& x, int i) {
    if constexpr (sizeof(T) == 4) return as_float(x.w[i]);
    else return T{u16(x.w[i / 2] >> (16 * (i % 2)))};
}
template <class T> VK_DEVICE void set(u128& x, int i, T value) {
    if constexpr (sizeof(T) == 4) x.w[i] = as_u32(value);
    else {
        const int shift = 16 * (i % 2);
        x.w[i / 2] = (x.w[i / 2] & ~(0xffffu << shift)) | (u32(value.x) << shift);
    }
}

// The first `count` elements at p, element by element (p need only be aligned to T); the rest zero and never touched.
// Any count is allowed: <= 0 reads nothing, >= vec<T> reads vec<T> elements.
template <class T> VK_DEVICE u128 ld_elements(const T* p, int count) {
    u128 x = {{0, 0, 0, 0}};
#pragma unroll
    for (int i = 0; i < vec<T>; ++i)
        if (i < count) set<T>(x, i, p[i]);
    return x;
}
template <class T> VK_DEVICE void st_elements(T* p, const u128& x, int count) {
#pragma unroll
    for (int i = 0; i < vec<T>; ++i)
        if (i < count) p[i] = get<T>(x, i);
}

// ---- warp reductions: butterfly, so every lane ends with the same bits --------------------------

VK_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int m = warp_size / 2; m > 0; m /= 2) x += shfl_xor(x, m);
    return x;
}
VK_DEVICE float warp_max(float x) {
#pragma unroll
    for (int m = warp_size / 2; m > 0; m /= 2) x = fmax(x, shfl_xor(x, m));
    return x;
}

}  // namespace vk
