// Host side of vk.cuh: every primitive of device.cuh in plain C++.
//
// Results are bit-equal to the device for exchange, ldmatrix, cp.async and conversions (NaN included). Where the device
// approximates (exp2, rsqrtf, log2f, exp, log1p) the host is the C library's, within 1 ulp. mma adds its sixteen exact
// products and the accumulator in double and rounds once; with VK_TRUNCATE it cuts bits off instead, as tensor cores do.
#pragma once
#include "runtime.hpp"

#define VK_DEVICE inline __attribute__((always_inline))
#define VK_CALL __attribute__((noinline))  // rendezvous: inlining them would only slow the compiler down
#define VK_KERNEL
#define VK_KERNEL_BOUNDS(threads, min_blocks)
#define VK_DYN_SHARED(name) unsigned char* const name = ::vk::host::current.shared

namespace vk {

using host::Site;

VK_DEVICE int tid() { return host::current.thread; }
VK_DEVICE int anew(int x) { return x; }
VK_DEVICE constexpr int blocks_that_fit(int, int most) { return most; }
VK_DEVICE int nthreads() { return host::current.size; }
VK_DEVICE int bidx() { return host::current.block[0]; }
VK_DEVICE int bidy() { return host::current.block[1]; }
VK_DEVICE int bidz() { return host::current.block[2]; }
VK_DEVICE int gdimx() { return host::current.grid[0]; }
VK_DEVICE int gdimy() { return host::current.grid[1]; }
VK_DEVICE int gdimz() { return host::current.grid[2]; }

inline void sync(Site site = Site::here()) { host::barrier(site); }
inline void syncwarp(Site site = Site::here()) {
    host::collective("syncwarp()", site, nullptr, nullptr);
}

// ---- bits and rounding --------------------------------------------------------------------------

VK_DEVICE float as_float(u32 x) {
    float y;
    __builtin_memcpy(&y, &x, 4);
    return y;
}
VK_DEVICE u32 as_u32(float x) {
    u32 y;
    __builtin_memcpy(&y, &x, 4);
    return y;
}

// Exponent and mantissa move to their float places; times 2^112 corrects the bias and normalises subnormals exactly.
VK_DEVICE float f16_value(u16 h) {
    const u32 magnitude = u32(h & 0x7fff) << 13;
    const u32 special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    const float scaled = as_float(magnitude) * as_float(0x77800000u);
    return as_float(as_u32(scaled) | special | u32(h & 0x8000) << 16);
}
VK_DEVICE u16 f16_round(float x) {
    const u32 bits = as_u32(x), a = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    if (a > 0x7f800000u) return 0x7fff;
    if (a >= 0x477ff000u) return u16(sign | 0x7c00u);  // 65520 and above
    if (a < 0x38800000u)                               // below 2^-14: 0.5 has the spacing of f16's subnormals, 2^-24
        return u16(sign | (as_u32(as_float(a) + 0.5f) - 0x3f000000u));
    return u16(sign | (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13);
}
VK_DEVICE u16 bf16_round(float x) {
    const u32 bits = as_u32(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return u16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
VK_DEVICE u32 f16x2_round(float lo, float hi) { return f16_round(lo) | u32(f16_round(hi)) << 16; }
VK_DEVICE u32 bf16x2_round(float lo, float hi) { return bf16_round(lo) | u32(bf16_round(hi)) << 16; }

// ---- math ---------------------------------------------------------------------------------------

VK_DEVICE float exp2(float x) { return __builtin_exp2f(x); }
VK_DEVICE float exp2_flush(float x) { return x < -126.f ? 0.f : __builtin_exp2f(x); }
VK_DEVICE float log2f(float x) { return __builtin_log2f(x); }
VK_DEVICE float exp(float x) { return __builtin_expf(x); }
VK_DEVICE float log1p(float x) { return __builtin_log1pf(x); }
VK_DEVICE float rsqrtf(float x) { return float(1.0 / __builtin_sqrt(double(x))); }
VK_DEVICE float sqrt_rn(float x) { return __builtin_sqrtf(x); }
VK_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
VK_DEVICE float fmax(float a, float b) { return __builtin_fmaxf(a, b); }
VK_DEVICE float fmin(float a, float b) { return __builtin_fminf(a, b); }
VK_DEVICE float fabs(float x) { return __builtin_fabsf(x); }

// ---- 16 bytes at a time -------------------------------------------------------------------------

inline u128 ld128(const void* p, Site site = Site::here()) {
    host::require_aligned("ld128", p, site);
    u128 x;
    __builtin_memcpy(&x, p, 16);
    return x;
}
inline void st128(void* p, const u128& x, Site site = Site::here()) {
    host::require_aligned("st128", p, site);
    __builtin_memcpy(p, &x, 16);
}

// ---- exchange between the 32 lanes of a warp ----------------------------------------------------

namespace host {

// Each lane leaves its value, its operand and room for the answer; Source(lane, operand) is the lane it reads.
template <int (*Source)(int, int), class T> VK_CALL T exchange(const char* op, Site site, T value, int operand) {
    static_assert(sizeof(T) == 4, "shuffles move 4-byte values");
    struct Registers {
        T value, answer;
        int operand;
    } mine{value, value, operand};
    collective(op, site, &mine, [](void* const* slots) {
        for (int l = 0; l < 32; ++l) {
            auto* const r = static_cast<Registers*>(slots[l]);
            r->answer = static_cast<Registers*>(slots[Source(l, r->operand)])->value;
        }
    });
    return mine.answer;
}
inline int lane_itself(int, int from) { return from & 31; }
inline int lane_xor(int l, int mask) { return (l ^ mask) & 31; }
inline int lane_below(int l, int delta) { return l - delta >= 0 ? l - delta : l; }
inline int lane_above(int l, int delta) { return l + delta <= 31 ? l + delta : l; }

}  // namespace host

template <class T> T shfl(T x, int lane, Site site = Site::here()) {
    return host::exchange<host::lane_itself>("shfl", site, x, lane);
}
template <class T> T shfl_xor(T x, int mask, Site site = Site::here()) {
    return host::exchange<host::lane_xor>("shfl_xor", site, x, mask);
}
template <class T> T shfl_up(T x, int delta, Site site = Site::here()) {
    return host::exchange<host::lane_below>("shfl_up", site, x, delta);
}
template <class T> T shfl_down(T x, int delta, Site site = Site::here()) {
    return host::exchange<host::lane_above>("shfl_down", site, x, delta);
}

// ---- tensor core --------------------------------------------------------------------------------

namespace host {

template <int Matrices, bool Transposed> VK_CALL void ldmatrix(const char* op, u32* r, const void* row, Site site) {
    struct Registers {
        u32* r;
        const unsigned char* row;
        int thread;
    } mine{r, static_cast<const unsigned char*>(row), current.thread};
    if (current.thread % 32 < 8 * Matrices) {
        require_aligned(op, row, site);
        require_shared(op, row, 16, site);
    }
    collective(op, site, &mine, [](void* const* slots) {
        for (int j = 0; j < Matrices; ++j)
            for (int l = 0; l < 32; ++l) {
                u16 pair[2];
                for (int e = 0; e < 2; ++e) {
                    const int outer = l / 4, inner = 2 * (l % 4) + e;
                    const int i = Transposed ? inner : outer, c = Transposed ? outer : inner;
                    __builtin_memcpy(&pair[e], static_cast<Registers*>(slots[8 * j + i])->row + 2 * c, 2);
                }
                static_cast<Registers*>(slots[l])->r[j] = pair[0] | u32(pair[1]) << 16;
            }
    });
}

// What an accumulator keeps of an exact sum. VK_TRUNCATE: bits are cut off, as tensor cores do, and not rounded.
inline float accumulated(double exact) {
    const float y = float(exact);
#ifdef VK_TRUNCATE
    if (__builtin_fabs(double(y)) > __builtin_fabs(exact)) return as_float(as_u32(y) - 1);
#endif
    return y;
}

template <class T> float value16(u32 bits) {
    if constexpr (is_same<T, f16>) return f16_value(u16(bits));
    else return as_float(bits << 16);
}

}  // namespace host

inline void ldmatrix_x4(u32 (&r)[4], const void* row, Site site = Site::here()) {
    host::ldmatrix<4, false>("ldmatrix_x4", r, row, site);
}
inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row, Site site = Site::here()) {
    host::ldmatrix<4, true>("ldmatrix_x4_trans", r, row, site);
}
inline void ldmatrix_x2(u32 (&r)[2], const void* row, Site site = Site::here()) {
    host::ldmatrix<2, false>("ldmatrix_x2", r, row, site);
}
inline void ldmatrix_x2_trans(u32 (&r)[2], const void* row, Site site = Site::here()) {
    host::ldmatrix<2, true>("ldmatrix_x2_trans", r, row, site);
}

template <class T>
VK_CALL void mma16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Site site = Site::here()) {
    static_assert(is_16bit<T>, "mma16816 is for f16 and bf16");
    struct Registers {
        float* d;
        const u32 *a, *b;
    } mine{d, a, b};
    host::collective(is_same<T, f16> ? "mma16816<f16>" : "mma16816<bf16>", site, &mine, [](void* const* slots) {
        u32 a16[16][8], b16[8][8];  // pairs along k, as the registers hold them: A by row, B by column
        for (int l = 0; l < 32; ++l) {
            const auto* const r = static_cast<const Registers*>(slots[l]);
            const int g = l / 4, t = l % 4;
            a16[g][t] = r->a[0], a16[g + 8][t] = r->a[1], a16[g][t + 4] = r->a[2], a16[g + 8][t + 4] = r->a[3];
            b16[g][t] = r->b[0], b16[g][t + 4] = r->b[1];
        }
        float B[16][8];
        for (int p = 0; p < 8; ++p)
            for (int n = 0; n < 8; ++n) {
                B[2 * p][n] = host::value16<T>(b16[n][p] & 0xffffu);
                B[2 * p + 1][n] = host::value16<T>(b16[n][p] >> 16);
            }
        for (int i = 0; i < 16; ++i) {
            float even[8], odd[8];
            for (int p = 0; p < 8; ++p) {
                even[p] = host::value16<T>(a16[i][p] & 0xffffu);
                odd[p] = host::value16<T>(a16[i][p] >> 16);
            }
            double sum[8] = {};
            for (int p = 0; p < 8; ++p) {
                for (int n = 0; n < 8; ++n) sum[n] += double(even[p]) * B[2 * p][n];
                for (int n = 0; n < 8; ++n) sum[n] += double(odd[p]) * B[2 * p + 1][n];
            }
            for (int n = 0; n < 8; ++n) {
                float& c = static_cast<const Registers*>(slots[4 * (i % 8) + n / 2])->d[n % 2 + 2 * (i / 8)];
                c = host::accumulated(double(c) + sum[n]);
            }
        }
    });
}

VK_CALL inline void mma1688(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Site site = Site::here()) {
    struct Registers {
        float* d;
        const u32 *a, *b;
    } mine{d, a, b};
    host::collective("mma1688", site, &mine, [](void* const* slots) {
        const auto read = [](u32 bits) { return double(as_float(bits & 0xffffe000u)); };
        double A[16][8], B[8][8];
        for (int l = 0; l < 32; ++l) {
            const auto* const r = static_cast<const Registers*>(slots[l]);
            const int g = l / 4, t = l % 4;
            for (int i = 0; i < 4; ++i) A[g + 8 * (i % 2)][t + 4 * (i / 2)] = read(r->a[i]);
            for (int i = 0; i < 2; ++i) B[t + 4 * i][g] = read(r->b[i]);
        }
        for (int i = 0; i < 16; ++i) {
            double sum[8] = {};
            for (int k = 0; k < 8; ++k)
                for (int n = 0; n < 8; ++n) sum[n] += A[i][k] * B[k][n];
            for (int n = 0; n < 8; ++n) {
                float& c = static_cast<const Registers*>(slots[4 * (i % 8) + n / 2])->d[n % 2 + 2 * (i / 8)];
                c = host::accumulated(double(c) + sum[n]);
            }
        }
    });
}

// ---- asynchronous copies ------------------------------------------------------------------------

inline void cp_async16(void* smem, const void* gmem, bool pred, Site site = Site::here()) {
    host::copy_async(smem, gmem, pred, site);
}
inline void cp_async_commit() { host::copy_commit(); }
template <int N> void cp_async_wait() { host::copy_wait(N); }

}  // namespace vk
