// Products of tiles in shared memory, one warp at a time, with one interface for f16, bf16 and float.
//
// The accumulator of an M x N tile is float acc[M/16][N/8][4] in the layout of mma.m16n8k16, for every T:
//   lane l, g = l/4, t = l%4:   acc[m][n][i] = C(16m + g + 8(i/2), 8n + 2t + i%2)
// Tiles of 16 bits and of tf32 go through ldmatrix and the tensor core. Float tiles are true float32: one fused multiply-add per term,
// in ascending k, each thread its own elements (no TF32). Either way the order of accumulation is fixed.
//
// A tile is row-major with a pitch of `pitch<T>(columns)` elements, 16 bytes beyond the row: when the columns fill an
// even number of 16-byte pieces, eight consecutive rows start in eight different groups of four banks, and ldmatrix has
// no bank conflicts. Base and pitch must be multiples of 16 bytes. M and K are multiples of 16, N of 8.
#pragma once
#include "vk.cuh"

namespace vk {

// How the operands of C += A B lie in shared memory, first A, then B. N: as written, A [m][k], B [k][n].
// T: transposed, A [k][m], B [n][k].
enum Form { NN, NT, TN, TT };

template <class T> VK_DEVICE constexpr int pitch(int columns) { return columns + vec<T>; }

// Row and column of element i of a 16x8 accumulator fragment.
VK_DEVICE int frag_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
VK_DEVICE int frag_col(int lane, int i) { return 2 * (lane % 4) + i % 2; }

template <int MT, int NT_> VK_DEVICE void clear(float (&acc)[MT][NT_][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT_; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.f;
}

// f(row, column, element) for each of this lane's elements.
template <int MT, int NT_, class F> VK_DEVICE void for_each_acc(float (&acc)[MT][NT_][4], F f, int l = lane()) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT_; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) f(16 * m + frag_row(l, i), 8 * n + frag_col(l, i), acc[m][n][i]);
}

// acc rounded to T, into a tile S (shared memory, or global where every pair is aligned to two elements of T).
template <class T, int MT, int NT_> VK_DEVICE void store_acc(T* S, int ld, const float (&acc)[MT][NT_][4]) {
    const int l = lane();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT_; ++n)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                T* const p = S + (16 * m + frag_row(l, i)) * ld + 8 * n + frag_col(l, i);
                if constexpr (is_16bit<T>) {
                    *reinterpret_cast<u32*>(p) = pack2<T>(acc[m][n][i], acc[m][n][i + 1]);
                } else {
                    p[0] = acc[m][n][i];
                    p[1] = acc[m][n][i + 1];
                }
            }
}

// ---- 16-bit operands: fragments of mma16816 -----------------------------------------------------

// A fragment: rows m..m+15, columns k..k+15 of A, stored [m][k], or [k][m] when transposed.
template <bool Transposed, class T> VK_DEVICE void load_a(u32 (&a)[4], const T* A, int ld, int m, int k, int l = lane()) {
    static_assert(is_16bit<T>, "fragments hold f16 or bf16");
    const int r = l % 8, block = l / 8;  // which row of which 8x8 matrix this lane points at
    if constexpr (Transposed) ldmatrix_x4_trans(a, A + (k + 8 * (block / 2) + r) * ld + m + 8 * (block % 2));
    else ldmatrix_x4(a, A + (m + 8 * (block % 2) + r) * ld + k + 8 * (block / 2));
}

// Two B fragments, columns n..n+7 in b[0,1] and n+8..n+15 in b[2,3]; B stored [k][n], or [n][k] when transposed.
template <bool Transposed, class T> VK_DEVICE void load_b2(u32 (&b)[4], const T* B, int ld, int k, int n, int l = lane()) {
    static_assert(is_16bit<T>, "fragments hold f16 or bf16");
    const int r = l % 8, block = l / 8;
    if constexpr (Transposed) ldmatrix_x4(b, B + (n + 8 * (block / 2) + r) * ld + k + 8 * (block % 2));
    else ldmatrix_x4_trans(b, B + (k + 8 * (block % 2) + r) * ld + n + 8 * (block / 2));
}

// One B fragment, columns n..n+7.
template <bool Transposed, class T> VK_DEVICE void load_b(u32 (&b)[2], const T* B, int ld, int k, int n, int l = lane()) {
    static_assert(is_16bit<T>, "fragments hold f16 or bf16");
    const int r = l % 8, block = l / 8 % 2;
    if constexpr (Transposed) ldmatrix_x2(b, B + (n + r) * ld + k + 8 * block);
    else ldmatrix_x2_trans(b, B + (k + 8 * block + r) * ld + n);
}

// A fragment from two neighbouring accumulator fragments (columns k..k+7 and k+8..k+15): the product of a product
// without a trip through shared memory, rounded to T.
template <class T> VK_DEVICE void acc_to_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack2<T>(left[0], left[1]);
    a[1] = pack2<T>(left[2], left[3]);
    a[2] = pack2<T>(right[0], right[1]);
    a[3] = pack2<T>(right[2], right[3]);
}

// ---- float operands -----------------------------------------------------------------------------

// Four consecutive k of one row (of A) or column (of B): contiguous in [row][k], strided in [k][row].
template <bool KMajor> VK_DEVICE void load_k4(float (&x)[4], const float* P, int ld, int row, int k) {
    if constexpr (KMajor) {
        const u128 v = ld128(P + row * ld + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = as_float(v.w[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = P[(k + i) * ld + row];
    }
}

// ---- C += A B -----------------------------------------------------------------------------------

// All 32 lanes of a warp call this together. The operands must have been made visible by a barrier.
template <class T, int M, int N, int K, Form F = NN>
VK_DEVICE void warp_mma(float (&acc)[M / 16][N / 8][4], const T* A, int lda, const T* B, int ldb, int l = lane()) {
    static_assert(M % 16 == 0 && N % 8 == 0 && K % 16 == 0, "M and K are multiples of 16, N of 8");
    constexpr bool ta = F == TN || F == TT, tb = F == NT || F == TT;
    if constexpr (is_16bit<T>) {
#pragma unroll
        for (int k = 0; k < K; k += 16) {
            u32 a[M / 16][4];
#pragma unroll
            for (int m = 0; m < M / 16; ++m) load_a<ta>(a[m], A, lda, 16 * m, k, l);
#pragma unroll
            for (int n = 0; n + 1 < N / 8; n += 2) {
                u32 b[4];
                load_b2<tb>(b, B, ldb, k, 8 * n, l);
                const u32 b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
                for (int m = 0; m < M / 16; ++m) {
                    mma16816<T>(acc[m][n], a[m], b0);
                    mma16816<T>(acc[m][n + 1], a[m], b1);
                }
            }
            if constexpr (N / 8 % 2 == 1) {
                u32 b[2];
                load_b<tb>(b, B, ldb, k, N - 8, l);
#pragma unroll
                for (int m = 0; m < M / 16; ++m) mma16816<T>(acc[m][N / 8 - 1], a[m], b);
            }
        }
    } else if constexpr (is_same<T, tf32>) {
        static_assert(M == 16 && N == 8 && F == NT, "of tf32 only what is used");
        const int r = l % 8, block = l / 8;
#pragma unroll
        for (int k = 0; k < K; k += 16) {
            u32 b[4];  // a row of an 8x8 matrix of 16-bit elements is four of tf32
            ldmatrix_x4(b, B + r * ldb + k + 4 * block);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 a[4];
                ldmatrix_x4(a, A + (8 * (block % 2) + r) * lda + k + 8 * h + 4 * (block / 2));
                const u32 bh[2] = {b[2 * h], b[2 * h + 1]};
                mma1688(acc[0][0], a, bh);
            }
        }
    } else {
        static_assert(is_same<T, float>, "T is f16, bf16, tf32 or float");
        const int row = frag_row(l, 0), col = frag_col(l, 0);
#pragma unroll 2
        for (int k = 0; k < K; k += 4) {
            float a[M / 8][4];
#pragma unroll
            for (int m = 0; m < M / 8; ++m) load_k4<!ta>(a[m], A, lda, row + 8 * m, k);
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float b[4];
                    load_k4<tb>(b, B, ldb, 8 * n + col + j, k);
#pragma unroll
                    for (int m = 0; m < M / 8; ++m)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            acc[m / 2][n][2 * (m % 2) + j] = fma(a[m][i], b[i], acc[m / 2][n][2 * (m % 2) + j]);
                }
        }
    }
}

// ---- global -> shared ---------------------------------------------------------------------------

// Whether every row of a tile at G is a whole number of aligned 16-byte pieces.
template <class T> VK_DEVICE bool whole_pieces(const T* G, i64 row_stride, int columns, int tile_columns) {
    return aligned16(G) && row_stride % vec<T> == 0 && (columns >= tile_columns || columns % vec<T> == 0);
}

// Rows x Columns elements into the tile S by `threads` threads, of which this is number `thread`: zero in rows >= rows
// and columns >= columns, whose source is never read. Aligned 16-byte pieces travel by cp.async (the caller commits and
// waits); the others, ragged or unaligned, by plain loads. A barrier must follow either way.
template <class T, int Rows, int Columns>
VK_DEVICE void load_tile(T* S, int ld, const T* G, i64 row_stride, int rows, int columns, int thread, int threads) {
    static_assert(Columns % vec<T> == 0, "a tile row is a whole number of 16-byte pieces");
    constexpr int pieces = Columns / vec<T>;
    if (threads % pieces == 0 && whole_pieces<T>(G, row_stride, columns, Columns)) {
        // A thread keeps its column, so that a row costs one copy, one comparison and one addition to each pointer.
        const int c = thread % pieces * vec<T>, first = thread / pieces, step = threads / pieces;
        const int last = c < columns ? min(rows, Rows) : 0;
        const T* src = G + first * row_stride + c;
        T* dst = S + first * ld + c;
#pragma unroll
        for (int r = 0; r < Rows; r += step) {
            if (Rows % step == 0 || first + r < Rows) cp_async16(dst, first + r < last ? src : G, first + r < last);
            src += step * row_stride;
            dst += step * ld;
        }
        return;
    }
#pragma unroll 1
    for (int p = thread; p < Rows * pieces; p += threads) {
        const int r = p / pieces, c = p % pieces * vec<T>;
        const int count = r < rows ? columns - c : 0;
        const T* const src = count > 0 ? G + r * row_stride + c : G;
        T* const dst = S + r * ld + c;
        if (count >= vec<T> && aligned16(src)) cp_async16(dst, src, true);
        else st128(dst, ld_elements(src, count));
    }
}

}  // namespace vk
