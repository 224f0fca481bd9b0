// What the backward kernels share: where warps stand in a C x 64 tile, fragments to and from global memory, and
// products of operands that must not be rounded to 16 bits.
#pragma once
#include "chunks.cuh"
#include "tile.cuh"

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

// Rows x Columns of the tile S to global memory, 16 bytes at a time where aligned.
template <class T, int Rows, int Columns>
VK_DEVICE void store_tile(T* G, i64 row_stride, const T* S, int ld, int rows, int columns, int thread, int threads) {
    constexpr int pieces = Columns / vec<T>;
    for (int p = thread; p < Rows * pieces; p += threads) {
        const int r = p / pieces, c = p % pieces * vec<T>;
        const int count = r < rows ? columns - c : 0;
        if (count <= 0) continue;
        T* const dst = G + r * row_stride + c;
        const u128 x = ld128(S + r * ld + c);
        if (count >= vec<T> && aligned16(dst)) st128(dst, x);
        else st_elements(dst, x, count);
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
