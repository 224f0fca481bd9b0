// Shared -> global, the other way of tile.cuh's load_tile.
#pragma once
#include "tile.cuh"

namespace vk {

// Sixteen bytes of T, rounded from float.
template <class T> VK_DEVICE u128 pack(const float (&x)[vec<T>]) {
    u128 y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (is_16bit<T>) y.w[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
        else y.w[i] = as_u32(x[i]);
    }
    return y;
}

// 16 bytes, or the first `count` elements of them where fewer are wanted or dst is not aligned.
template <class T> VK_DEVICE void store_piece(T* dst, const u128& x, int count) {
    if (count >= vec<T> && aligned16(dst)) st128(dst, x);
    else st_elements(dst, x, count);
}

// load_tile of tile.cuh. Whole: the caller knows that every row is a whole number of aligned 16-byte pieces, and the code for
// other rows is left out; that code is most of a small kernel.
template <bool Whole, class T, int Rows, int Columns>
VK_DEVICE void load_pieces(T* S, int ld, const T* G, i64 row_stride, int rows, int columns, int thread, int threads) {
    if constexpr (Whole) {
        constexpr int pieces = Columns / vec<T>;
        const int c = thread % pieces * vec<T>, first = thread / pieces, step = threads / pieces;
        const int last = c < columns ? rows : 0;
        const T* src = G + first * row_stride + c;
        T* const dst = S + first * ld + c;
#pragma unroll
        for (int r = 0; r < Rows; r += step) {
            if (Rows % step == 0 || first + r < Rows) cp_async16(dst + r * ld, src, first + r < last);
            src += step * row_stride;
        }
    } else {
        load_tile<T, Rows, Columns>(S, ld, G, row_stride, rows, columns, thread, threads);
    }
}

// Rows x Columns of the tile S, without rows >= rows and columns >= columns. Whole: as in load_pieces.
template <class T, int Rows, int Columns, bool Whole = false>
VK_DEVICE void store_tile(T* G, i64 row_stride, const T* S, int ld, int rows, int columns, int thread, int threads) {
    constexpr int pieces = Columns / vec<T>;
    static_assert(Columns % vec<T> == 0, "a tile row is a whole number of 16-byte pieces");
    if (threads % pieces == 0 && (Whole || whole_pieces<T>(G, row_stride, columns, Columns))) {
        const int c = thread % pieces * vec<T>, first = thread / pieces, step = threads / pieces;
        const int last = c < columns ? min(rows, Rows) : 0;
        T* dst = G + first * row_stride + c;
        const T* src = S + first * ld + c;
#pragma unroll
        for (int r = 0; r < Rows; r += step) {
            if (first + r < last) st128(dst, ld128(src));
            dst += step * row_stride;
            src += step * ld;
        }
        return;
    }
#pragma unroll 1
    for (int p = thread; p < Rows * pieces; p += threads) {
        const int r = p / pieces, c = p % pieces * vec<T>;
        const int count = r < rows ? columns - c : 0;
        if (count > 0) store_piece(G + r * row_stride + c, ld128(S + r * ld + c), count);
    }
}

// A tile in place: scale(r, c, y) multiplies the vec<T> neighbours y of row r from column c on, in float; rounded to T once.
template <class T, int Rows, int Columns, class Scale>
VK_DEVICE void scale_tile(T* S, int ld, int thread, int threads, Scale scale) {
    constexpr int pieces = Columns / vec<T>;
#pragma unroll 1
    for (int p = thread; p < Rows * pieces; p += threads) {
        const int r = p / pieces, c = p % pieces * vec<T>;
        const u128 x = ld128(S + r * ld + c);
        float y[vec<T>];
#pragma unroll
        for (int i = 0; i < vec<T>; ++i) y[i] = to_float(get<T>(x, i));
        scale(r, c, y);
        st128(S + r * ld + c, pack<T>(y));
    }
}

}  // namespace vk
