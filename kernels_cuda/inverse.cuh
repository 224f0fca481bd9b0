// A = (I + M)^-1 for M = diag(beta) L, strictly lower triangular, in float.
//
//   16x16 blocks on the diagonal:  x_i = e_i - sum_{j<i} M_ij x_j           one column per lane
//   below:                         A_ab = -A_aa sum_{b <= c < a} M_ac A_cb  one block column per warp
//
// Forward substitution throughout: powers of M are never formed, which for repeated keys grow without bound and would have
// to cancel.
#pragma once
#include "tile.cuh"

namespace vk {

// All 128 threads. M, A: C x C of pitch `ld`. Inside the blocks on the diagonal the upper triangle of A becomes 0; the
// blocks above the diagonal serve as scratch. Ends without a barrier.
template <int C> VK_DEVICE void invert(float* A, const float* M, int ld) {
    constexpr int blocks = C / 16;
    const int w = warp();
    if (w < blocks) {
        const float* const m = M + 16 * w * ld + 16 * w;
        float* const out = A + 16 * w * ld + 16 * w;
        const int column = lane() % 16;  // both halves of the warp compute the same
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float even = i == column ? 1.f : 0.f, odd = 0.f;
#pragma unroll
            for (int j = 0; j < i; ++j) {
                if (j % 2) odd = fma(-m[i * ld + j], x[j], odd);
                else even = fma(-m[i * ld + j], x[j], even);
            }
            x[i] = even + odd;
            if (lane() < 16) out[i * ld + column] = x[i];
        }
    }
    sync();
    if (w >= blocks - 1) return;
    float* const sum = A + 16 * w * ld + 16 * (blocks - 1);
#pragma unroll 1
    for (int a = w + 1; a < blocks; ++a) {
        float acc[1][2][4];
        clear(acc);
#pragma unroll 1
        for (int c = w; c < a; ++c)
            warp_mma<float, 16, 16, 16>(acc, M + 16 * a * ld + 16 * c, ld, A + 16 * c * ld + 16 * w, ld);
        store_acc<float>(sum, ld, acc);
        syncwarp();
        clear(acc);
        warp_mma<float, 16, 16, 16>(acc, A + 16 * a * ld + 16 * a, ld, sum, ld);
        for_each_acc(acc, [](int, int, float& x) { x = -x; });
        store_acc<float>(A + 16 * a * ld + 16 * w, ld, acc);
        syncwarp();
    }
}

}  // namespace vk
