// Device side of vk.cuh: each primitive is one PTX instruction or one builtin of the CUDA language (sm_80 and later).
//
// `volatile` marks what must stay in program order against barriers (ldmatrix, cp.async). mma and the conversions are
// pure functions of registers and are not volatile, so that the scheduler may move them between loads.
#pragma once

#define VK_DEVICE __device__ __forceinline__
#define VK_KERNEL __global__
#define VK_KERNEL_BOUNDS(threads, min_blocks) __global__ __launch_bounds__(threads, min_blocks)
#define VK_DYN_SHARED(name)                                              \
    extern __shared__ __align__(128) unsigned char vk_dynamic_shared[]; \
    unsigned char* const name = vk_dynamic_shared

namespace vk {

VK_DEVICE int tid() { return int(threadIdx.x); }
// Blocks with `bytes` of shared memory that fit on a multiprocessor together, at most `most`: for VK_KERNEL_BOUNDS, because
// to hold registers to a number of blocks that cannot be there only spills. A block takes 1 KB more than it asks for.
VK_DEVICE constexpr int blocks_that_fit(int bytes, int most) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9 || __CUDA_ARCH__ / 100 == 10
    constexpr int shared = 228 * 1024;
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
    constexpr int shared = 164 * 1024;
#else
    constexpr int shared = 100 * 1024;
#endif
    const int fit = shared / (bytes + 1024);
    return fit < 1 ? 1 : fit < most ? fit : most;
}

// x, but what is computed from it is computed where it is used: an address that a compiler would rather keep from one phase
// of a kernel to the next takes a register, and where registers are short that is one spilled.
VK_DEVICE int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
VK_DEVICE int nthreads() { return int(blockDim.x); }
VK_DEVICE int bidx() { return int(blockIdx.x); }
VK_DEVICE int bidy() { return int(blockIdx.y); }
VK_DEVICE int bidz() { return int(blockIdx.z); }
VK_DEVICE int gdimx() { return int(gridDim.x); }
VK_DEVICE int gdimy() { return int(gridDim.y); }
VK_DEVICE int gdimz() { return int(gridDim.z); }

VK_DEVICE void sync() { __syncthreads(); }
VK_DEVICE void syncwarp() { __syncwarp(0xffffffffu); }

// ---- exchange between the 32 lanes of a warp ----------------------------------------------------

template <class T> VK_DEVICE T shfl(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
template <class T> VK_DEVICE T shfl_xor(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
template <class T> VK_DEVICE T shfl_up(T x, int delta) { return __shfl_up_sync(0xffffffffu, x, delta); }
template <class T> VK_DEVICE T shfl_down(T x, int delta) { return __shfl_down_sync(0xffffffffu, x, delta); }

// ---- bits and rounding --------------------------------------------------------------------------

VK_DEVICE float as_float(u32 x) { return __uint_as_float(x); }
VK_DEVICE u32 as_u32(float x) { return __float_as_uint(x); }

VK_DEVICE float f16_value(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
VK_DEVICE u16 f16_round(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
VK_DEVICE u16 bf16_round(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
// PTX names the high half first.
VK_DEVICE u32 f16x2_round(float lo, float hi) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
VK_DEVICE u32 bf16x2_round(float lo, float hi) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

// ---- math ---------------------------------------------------------------------------------------

// 2^x, error <= 2 ulp, subnormal results kept (no .ftz), exp2(-inf) = 0.
VK_DEVICE float exp2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The same with results below 2^-126 flushed to 0: a quarter of the instructions.
VK_DEVICE float exp2_flush(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
VK_DEVICE float log2f(float x) { return ::log2f(x); }    // <= 1 ulp
VK_DEVICE float exp(float x) { return ::expf(x); }       // <= 2 ulp (1 ulp in recent toolkits)
VK_DEVICE float log1p(float x) { return ::log1pf(x); }   // <= 1 ulp (2 on the host)
VK_DEVICE float rsqrtf(float x) {                        // <= 2^-22.4 relative
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
VK_DEVICE float sqrt_rn(float x) {
    float y;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
VK_DEVICE float fma(float a, float b, float c) {
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}
// As in IEEE maxNum: a NaN is dropped when the other operand is a number.
VK_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }
VK_DEVICE float fmin(float a, float b) { return ::fminf(a, b); }
VK_DEVICE float fabs(float x) { return ::fabsf(x); }

// ---- tensor core --------------------------------------------------------------------------------

VK_DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Lane i gives the address of row i % 8 of 8x8 matrix i / 8 (16 bytes, 16-byte aligned). Register j of lane l receives
// elements (l/4, 2(l%4)) and (l/4, 2(l%4)+1) of matrix j; `trans` transposes each matrix. x2 reads the addresses of
// lanes 0..15 only.
VK_DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
VK_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}
VK_DEVICE void ldmatrix_x2(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)));
}
VK_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)));
}

// d += a b: a 16x16 (row), b 16x8 (col), d 16x8 in float. Lane l, g = l/4, t = l%4:
//   a[0] = A(g, 2t..)  a[1] = A(g+8, 2t..)  a[2] = A(g, 2t+8..)  a[3] = A(g+8, 2t+8..)
//   b[0] = B(2t.., g)  b[1] = B(2t+8.., g)  d[0,1] = D(g, 2t..)  d[2,3] = D(g+8, 2t..)
template <class T> VK_DEVICE void mma16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    static_assert(is_16bit<T>, "mma16816 is for f16 and bf16");
    if constexpr (is_same<T, f16>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b in TF32: a 16x8 (row), b 8x8 (col), d as above. The lower 13 bits of each operand are ignored.
//   a[0] = A(g, t)  a[1] = A(g+8, t)  a[2] = A(g, t+4)  a[3] = A(g+8, t+4)     b[0] = B(t, g)  b[1] = B(t+4, g)
VK_DEVICE void mma1688(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- 16 bytes at a time -------------------------------------------------------------------------

// p is 16-byte aligned, in global or shared memory.
VK_DEVICE u128 ld128(const void* p) { return *static_cast<const u128*>(p); }
VK_DEVICE void st128(void* p, const u128& x) { *static_cast<u128*>(p) = x; }

// ---- asynchronous copies ------------------------------------------------------------------------

// 16 bytes from global to shared memory, both 16-byte aligned, past the registers. With pred false the destination is
// filled with zeros and the source is not read. Visible to this thread after cp_async_wait, to others after a barrier.
VK_DEVICE void cp_async16(void* smem, const void* gmem, bool pred) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(smem)), "l"(gmem), "r"(pred ? 16 : 0) : "memory");
}
VK_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when at most N of the newest groups are still in flight.
template <int N> VK_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

}  // namespace vk
