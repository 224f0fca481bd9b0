// A = (I + M)^-1 for M = diag(beta) L, strictly lower triangular.
//
//   16x16 blocks on the diagonal:  x_i = e_i - sum_{j<i} M_ij x_j           one column per lane, float
//   below:                         A_ab = -A_aa sum_{b <= c < a} M_ac A_cb  one block column per warp
//
// Forward substitution throughout: powers of M are never formed, which for repeated keys grow without bound and would have
// to cancel. Float calls multiply blocks in float. 16-bit calls split each operand x = hi + lo into bf16 (float's range,
// relative error 2^-17) and take hi hi + hi lo + lo hi on the tensor core: 30 times finer than the rounding of A to
// float16 that follows. They find the transposed column, A_ab^T = -(sum A_cb^T M_ac^T) A_aa^T, because an accumulator is
// then the left operand of the next product as it lies in registers.
#pragma once
#include "pair.cuh"
#include "tile.cuh"

namespace vk {

struct SplitOperand {
    u32 hi[4], lo[4];
    VK_DEVICE void set(const float (&x)[2][4]) {  // from the accumulator of a 16x16 product
#pragma unroll
        for (int i = 0; i < 4; ++i) split_pair(hi[i], lo[i], x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
    }
};

// acc += a B^T with B a 16x16 block of floats.
VK_DEVICE void split_product(float (&acc)[2][4], const SplitOperand& a, const float* B, int ld) {
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        u32 hi[2], lo[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* const p = B + (8 * n + g) * ld + 2 * t + 8 * i;
            split_pair(hi[i], lo[i], p[0], p[1]);
        }
        mma16816<bf16>(acc[n], a.lo, hi);
        mma16816<bf16>(acc[n], a.hi, lo);
        mma16816<bf16>(acc[n], a.hi, hi);
    }
}

// Block column b of A below its diagonal block.
template <int blocks> VK_DEVICE void split_column(float* A, const float* M, int ld, int b) {
    const int g = lane() / 4, t = lane() % 4;
    SplitOperand column[blocks];  // A_cb^T for c = b, b + 1, ..
    float x[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = A[(16 * b + 8 * (i / 4) + 2 * t + i % 2) * ld + 16 * b + g + i % 4 / 2 * 8];
    column[0].set(x);
#pragma unroll
    for (int d = 1; d < blocks; ++d) {
        const int a = b + d;
        if (a >= blocks) break;
        float sum[2][4] = {};
#pragma unroll
        for (int e = 0; e < d; ++e) split_product(sum, column[e], M + 16 * a * ld + 16 * (b + e), ld);
        SplitOperand left;
        left.set(sum);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = 0.f;
        split_product(x, left, A + 16 * a * ld + 16 * a, ld);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[n][i] = -x[n][i];
                A[(16 * a + 8 * n + frag_col(lane(), i)) * ld + 16 * b + frag_row(lane(), i)] = x[n][i];
            }
        column[d].set(x);
    }
}

// The same in float; blocks of A above the diagonal serve as scratch.
template <int blocks> VK_DEVICE void float_column(float* A, const float* M, int ld, int b) {
    float* const sum = A + 16 * b * ld + 16 * (blocks - 1);
#pragma unroll 1
    for (int a = b + 1; a < blocks; ++a) {
        float acc[1][2][4];
        clear(acc);
#pragma unroll 1
        for (int c = b; c < a; ++c)
            warp_mma<float, 16, 16, 16>(acc, M + 16 * a * ld + 16 * c, ld, A + 16 * c * ld + 16 * b, ld);
        store_acc<float>(sum, ld, acc);
        syncwarp();
        clear(acc);
        warp_mma<float, 16, 16, 16>(acc, A + 16 * a * ld + 16 * a, ld, sum, ld);
        for_each_acc(acc, [](int, int, float& x) { x = -x; });
        store_acc<float>(A + 16 * a * ld + 16 * b, ld, acc);
        syncwarp();
    }
}

// All C / 16 first warps at least. M, A: C x C of pitch `ld`, a multiple of 4, aligned to 16 bytes. Of M only what is below
// the diagonal counts. Inside the blocks on the diagonal the upper triangle of A becomes 0; blocks above the diagonal are
// undefined. Ends without a barrier.
template <class T, int C> VK_DEVICE void invert(float* A, const float* M, int ld) {
    constexpr int blocks = C / 16;
    const int b = warp();
    if (b < blocks) {
        const float* const m = M + 16 * b * ld + 16 * b;
        float* const out = A + 16 * b * ld + 16 * b;
        const int column = lane() % 16;  // both halves of the warp compute the same
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float even = i == column ? 1.f : 0.f, odd = 0.f;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const u128 four = ld128(m + i * ld + j);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (j + e >= i) continue;
                    if (e % 2) odd = fma(-as_float(four.w[e]), x[j + e], odd);
                    else even = fma(-as_float(four.w[e]), x[j + e], even);
                }
            }
            x[i] = even + odd;
            if (lane() < 16) out[i * ld + column] = x[i];
        }
    }
    sync();
    if (b >= blocks - 1) return;
    if constexpr (is_16bit<T>) split_column<blocks>(A, M, ld, b);
    else float_column<blocks>(A, M, ld, b);
}

}  // namespace vk
