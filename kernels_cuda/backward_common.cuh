// What the backward kernels share: where warps stand in a C x 64 tile, fragments to and from global memory, and
// products of operands that must not be rounded to 16 bits.
#pragma once
#include "chunks.cuh"
#include "gate.cuh"
#include "tile_store.cuh"

namespace vk {

// Four warps cover C rows x 64 columns: warp = row block of 16 rows + (C/16) * column group of C columns.
template <int C> struct Place {
    static_assert(C == 16 || C == 32 || C == 64, "chunks have 16, 32 or 64 rows");
    static constexpr int row_blocks = C / 16;
    static constexpr int column_groups = 4 / row_blocks;
    static constexpr int width = 64 / column_groups;  // columns of one warp; equals C
    static constexpr int square = C * C / 64 < 8 ? 8 : C * C / 64;  // its columns of a C x C product
    static constexpr int square_warps = row_blocks * (C / square);  // warps that take part in one
    int row, column;
    VK_DEVICE Place() : row(16 * (warp() % row_blocks)), column(width * (warp() / row_blocks)) {}
    VK_DEVICE int square_column() const { return square * (warp() / row_blocks); }
};

struct alignas(8) pair32 { float x, y; };

// acc to global rows of `stride` elements from `G` (this warp's first row and column), rounded to T; rows and columns
// beyond are not touched.
template <class T, int NT_>
VK_DEVICE void store_fragment(T* G, i64 stride, const float (&acc)[1][NT_][4], int rows, int columns) {
    const int l = lane();
#pragma unroll
    for (int n = 0; n < NT_; ++n)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const int r = frag_row(l, i), c = 8 * n + frag_col(l, i);
            if (r >= rows) continue;
            T* const p = G + r * stride + c;
            if (c + 1 < columns && (reinterpret_cast<u64>(p) & (2 * sizeof(T) - 1)) == 0) {
                if constexpr (is_16bit<T>) *reinterpret_cast<u32*>(p) = pack2<T>(acc[0][n][i], acc[0][n][i + 1]);
                else *reinterpret_cast<pair32*>(p) = pair32{acc[0][n][i], acc[0][n][i + 1]};
            } else {
                if (c < columns) p[0] = from_float<T>(acc[0][n][i]);
                if (c + 1 < columns) p[1] = from_float<T>(acc[0][n][i + 1]);
            }
        }
}

// 16 bytes, or the first `count` elements of them where fewer are wanted or p is not aligned.
template <class T> VK_DEVICE u128 load_piece(const T* p, int count) {
    return count >= vec<T> && aligned16(p) ? ld128(p) : ld_elements(p, count);
}

// Local sums of one slice of 64 channels from k0: sc[r][d] = log2 decays summed from the first row of r's block of 16 to
// r, so that no exponent is a difference of large sums. Rows that do not exist and channels >= K add nothing. `at` is the
// offset of row 0 of this value head. A barrier must follow.
template <class T, int C>
VK_DEVICE void local_sums(float* sc, int ld, const Gate& gate, i64 at, i64 stride, int head, int rows, int k0, int K) {
    const float rate = gate_rate(gate, head);
    for (int p = tid(); p < C * 4; p += 128) {
        const int d = p % 64, first = p / 64 * 16, channel = k0 + d;
        const bool inside = channel < K;
        const float bias = gate.dt_bias && inside ? gate.dt_bias[i64(head) * K + channel] : 0.f;
        float x[16], sum = 0.f;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int r = first + i;
            x[i] = inside && r < rows ? load_either<T>(gate.g, at + r * stride + channel, gate.g_is_float) : 0.f;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (inside && first + i < rows) sum += log2_decay(gate, x[i], rate, bias);
            sc[(first + i) * ld + d] = sum;
        }
    }
}

// ---- operands kept to float32 precision ------------------------------------------------------------------------------
// Anchored operands, dAqk and X must not lose bits to the 16-bit storage type. Float keeps them as they are; for 16-bit
// calls x = hi + lo in bf16 (float's range, relative error 2^-17), and a product is hi hi + hi lo + lo hi.

template <class T> struct Wide {  // 16-bit
    using E = bf16;
    static constexpr int parts = 2;
};
template <> struct Wide<float> {
    using E = float;
    static constexpr int parts = 1;
};

// Tile of Rows x Columns wide elements: `parts` planes.
template <class T, int Rows, int Columns> struct WideTile {
    using E = typename Wide<T>::E;
    static constexpr int ld = pitch<E>(Columns);
    static constexpr int plane = Rows * ld;
    static constexpr int bytes = Wide<T>::parts * plane * int(sizeof(E));
    E* p;
    VK_DEVICE void set2(int r, int c, float x0, float x1) const {
        E* const q = p + r * ld + c;
        if constexpr (Wide<T>::parts == 2) {
            const u32 hi = pack2<bf16>(x0, x1);
            float h0, h1;
            unpack2<bf16>(hi, h0, h1);
            *reinterpret_cast<u32*>(q) = hi;
            *reinterpret_cast<u32*>(q + plane) = pack2<bf16>(x0 - h0, x1 - h1);
        } else {
            q[0] = x0;
            q[1] = x1;
        }
    }
};

// acc += A B with A at (ar, ac) of tile a, B at (br, bc) of tile b, in the given form.
template <class T, int M, int N, int K, Form F, int Ra, int Ca, int Rb, int Cb>
VK_DEVICE void wide_mma(float (&acc)[M / 16][N / 8][4], const WideTile<T, Ra, Ca>& a, int ar, int ac,
                        const WideTile<T, Rb, Cb>& b, int br, int bc) {
    using A = WideTile<T, Ra, Ca>;
    using B = WideTile<T, Rb, Cb>;
    const auto* const pa = a.p + ar * A::ld + ac;
    const auto* const pb = b.p + br * B::ld + bc;
    warp_mma<typename A::E, M, N, K, F>(acc, pa, A::ld, pb, B::ld);
    if constexpr (Wide<T>::parts == 2) {
        warp_mma<bf16, M, N, K, F>(acc, pa, A::ld, pb + B::plane, B::ld);
        warp_mma<bf16, M, N, K, F>(acc, pa + A::plane, A::ld, pb, B::ld);
    }
}

// ---- sums of a fragment's 16 rows ------------------------------------------------------------------------------------
// Lane 4g + t holds rows g and g + 8. Orders are fixed.

// x[row] -> sum over rows' >= row of x; returns the total. Element pair (low: row g, high: row g + 8) of one column.
VK_DEVICE float suffix_rows(float& low, float& high) {
    const int l = lane();
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
        const float a = shfl_down(low, d), b = shfl_down(high, d);
        if (l + d < 32) low += a, high += b;
    }
    low += shfl(high, l % 4);
    return shfl(low, l % 4);
}
// x[row] -> sum over rows' < row of x; returns the total.
VK_DEVICE float prefix_rows(float& low, float& high) {
    const int l = lane();
    float a = low, b = high;
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
        const float x = shfl_up(a, d), y = shfl_up(b, d);
        if (l >= d) a += x, b += y;
    }
    const float half = shfl(a, 28 + l % 4), rest = shfl(b, 28 + l % 4);
    const float xa = shfl_up(a, 4), xb = shfl_up(b, 4);  // exclusive: the row before
    low = l < 4 ? 0.f : xa;
    high = half + (l < 4 ? 0.f : xb);
    return half + rest;
}

}  // namespace vk
