// Shared -> global, the other way of tile.cuh's load_tile.
#pragma once
#include "tile.cuh"

namespace vk {

// 16 bytes, or the first `count` elements of them where fewer are wanted or dst is not aligned.
template <class T> VK_DEVICE void store_piece(T* dst, const u128& x, int count) {
    if (count >= vec<T> && aligned16(dst)) st128(dst, x);
    else st_elements(dst, x, count);
}

// Rows x Columns of the tile S, without rows >= rows and columns >= columns.
template <class T, int Rows, int Columns>
VK_DEVICE void store_tile(T* G, i64 row_stride, const T* S, int ld, int rows, int columns, int thread, int threads) {
    constexpr int pieces = Columns / vec<T>;
    static_assert(Columns % vec<T> == 0, "a tile row is a whole number of 16-byte pieces");
    for (int p = thread; p < Rows * pieces; p += threads) {
        const int r = p / pieces, c = p % pieces * vec<T>;
        const int count = r < rows ? columns - c : 0;
        if (count > 0) store_piece(G + r * row_stride + c, ld128(S + r * ld + c), count);
    }
}

}  // namespace vk
