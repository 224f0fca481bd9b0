// What the backward kernels share: where warps stand in a C x 64 tile, fragments to and from memory, decays of a slice of
// channels, sums over the rows of a fragment.
#pragma once
#include "chunks.cuh"
#include "gate.cuh"
#include "tile_store.cuh"

namespace vk {

// Blocks of 4 C threads on a multiprocessor, each with Shape::bytes of shared memory: 128 registers a thread; float products
// take more, and more shared memory.
template <class T, int C, class Shape> VK_DEVICE constexpr int blocks_per_sm() {
    return blocks_that_fit(Shape::bytes, (is_16bit<T> ? 128 : 64) / C);
}

// 4 C threads cover C rows x 64 columns: each warp has 16 rows and 32 columns, and C/2 columns of a C x C product.
template <int C> struct Place {
    static_assert(C == 16 || C == 32 || C == 64, "chunks have 16, 32 or 64 rows");
    static constexpr int threads = 4 * C, row_blocks = C / 16;
    static constexpr int width = 32, square = C / 2;
    int thread, lane, row, column, square_column;
    VK_DEVICE explicit Place(int thread)
        : thread(thread),
          lane(thread % warp_size),
          row(16 * (thread / warp_size % row_blocks)),
          column(width * (thread / warp_size / row_blocks)),
          square_column(square * (thread / warp_size / row_blocks)) {}
};

struct alignas(8) pair32 { float x, y; };

// acc to global rows of `stride` elements from `G` (this warp's first row and column), rounded to T; rows and columns
// beyond are not touched.
template <class T, int NT_>
VK_DEVICE void store_fragment(T* G, int stride, const float (&acc)[1][NT_][4], int rows, int columns, int l = lane()) {
    const int r = l / 4, c = 2 * (l % 4);
    T* const p = G + r * stride + c;
    const bool pairs = stride % 2 == 0 && (reinterpret_cast<u64>(G) & (2 * sizeof(T) - 1)) == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (r + 8 * h >= rows) continue;
        T* const row = p + 8 * h * stride;
        if (pairs && columns >= 8 * NT_) {
#pragma unroll
            for (int n = 0; n < NT_; ++n) {
                if constexpr (is_16bit<T>)
                    *reinterpret_cast<u32*>(row + 8 * n) = pack2<T>(acc[0][n][2 * h], acc[0][n][2 * h + 1]);
                else *reinterpret_cast<pair32*>(row + 8 * n) = pair32{acc[0][n][2 * h], acc[0][n][2 * h + 1]};
            }
        } else {
#pragma unroll
            for (int n = 0; n < NT_; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (c + 8 * n + i < columns) row[8 * n + i] = from_float<T>(acc[0][n][2 * h + i]);
        }
    }
}

// 16 bytes, or the first `count` elements of them where fewer are wanted or p is not aligned.
template <bool Whole = false, class T> VK_DEVICE u128 load_piece(const T* p, int count) {
    if constexpr (Whole) return count > 0 ? ld128(p) : u128{{0, 0, 0, 0}};
    else return count >= vec<T> && aligned16(p) ? ld128(p) : ld_elements(p, count);
}

// The first `count` of 16 elements `stride` apart, the rest zero and never read.
template <class T> VK_DEVICE void load_column(float (&x)[16], const T* p, int stride, int count) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = i < count ? to_float(*p) : 0.f;
        p += stride;
    }
}

// Log decays, or what the gate makes them from, of one slice of 64 channels from k0: 4 C threads, one for each channel and
// block of 16 rows. `at` is the offset of row 0 of this value head. Loaded apart from their use, to hide their latency.
template <class T>
VK_DEVICE void load_gate(float (&x)[16], const Gate& gate, i64 at, int stride, int rows, int k0, int K) {
    const int first = tid() / 64 * 16, channel = k0 + tid() % 64, count = channel < K ? rows - first : 0;
    const i64 from = at + i64(first) * stride + channel;
    if (gate.g_is_float) load_column(x, static_cast<const float*>(gate.g) + from, stride, count);
    else load_column(x, static_cast<const T*>(gate.g) + from, stride, count);
}

// Local sums sc[r][d] = log decays summed from the first row of r's block of 16 to r, so that no exponent is a difference
// of large sums. Rows that do not exist and channels >= K add nothing. `single`, where it is given, gets the log decays
// themselves. A barrier must follow.
template <class T>
VK_DEVICE void local_sums(float* sc, int ld, const float (&x)[16], const Gate& gate, int head, int rows, int k0, int K,
                          float* single = nullptr, int thread = tid()) {
    const int d = thread % 64, first = thread / 64 * 16, channel = k0 + d;
    float* const column = sc + first * ld + d;
    float* const alone = single ? single + first * ld + d : nullptr;
    float sum = 0.f;
    if (gate.kind == gate_log) {
        const Gate given{nullptr, nullptr, nullptr, 0.f, gate_log, 0};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float log = log_decay<T>(given, x[i], 1.f, 0.f);
            sum += log;
            column[i * ld] = sum;
            if (alone) alone[i * ld] = log;
        }
    } else {
        const float rate = gate_rate(gate, head);
        const float bias = gate.dt_bias && channel < K ? gate.dt_bias[i64(head) * K + channel] : 0.f;
        const int count = channel < K ? rows - first : 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) column[i * ld] = x[i];
#pragma unroll 1
        for (int i = 0; i < 16; ++i) {  // a long body: its code must not be there sixteen times
            const float log = i < count ? log_decay<T>(gate, column[i * ld], rate, bias) : 0.f;
            sum += log;
            column[i * ld] = sum;
            if (alone) alone[i * ld] = log;
        }
    }
}

// ---- fragments -------------------------------------------------------------------------------------------------------

// f(row, column, n, i) for elements i, i + 1 (i = 0 or 2) of each fragment n of a warp that stands at (row, column).
template <int NT_, class F> VK_DEVICE void each_pair(int row, int column, F f, int l = lane()) {
#pragma unroll
    for (int n = 0; n < NT_; ++n)
#pragma unroll
        for (int i = 0; i < 4; i += 2) f(row + l / 4 + 4 * i, column + 8 * n + 2 * (l % 4), n, i);
}

// Two neighbours of a tile.
template <class T> VK_DEVICE void load2(const T* p, float& x, float& y) {
    if constexpr (is_16bit<T>) unpack2<T>(*reinterpret_cast<const u32*>(p), x, y);
    else {
        const pair32 both = *reinterpret_cast<const pair32*>(p);
        x = both.x, y = both.y;
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

// g[row] <- sum of g over rows >= row, of k over rows < row, and carried[column]; of all NB blocks of rows, 64 columns, for a
// warp that stands at row 16 `block` and `column`. k is used up. total_g, total_k: [NB][64], shared; barriers inside.
template <int NB, int NT_>
VK_DEVICE void sum_over_rows(float (&g)[1][NT_][4], float (&k)[1][NT_][4], const float* carried, float* total_g,
                             float* total_k, int block, int column) {
#pragma unroll
    for (int n = 0; n < NT_; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float a = suffix_rows(g[0][n][j], g[0][n][j + 2]), b = prefix_rows(k[0][n][j], k[0][n][j + 2]);
            const int at = block * 64 + column + 2 * (lane() % 4) + 8 * n + j;
            if (lane() < 4) total_g[at] = a, total_k[at] = b;
        }
    sync();
    if (tid() < 64) {  // what each block gets from the others
        float a[NB], b[NB], after = carried[tid()], before = 0.f;
#pragma unroll
        for (int i = 0; i < NB; ++i) a[i] = total_g[i * 64 + tid()], b[i] = total_k[i * 64 + tid()];
#pragma unroll
        for (int i = 0; i < NB; ++i) {
            total_g[(NB - 1 - i) * 64 + tid()] = after, total_k[i * 64 + tid()] = before;
            after += a[NB - 1 - i], before += b[i];
        }
    }
    sync();
    each_pair<NT_>(16 * block, column, [&](int, int col, int n, int i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float& x = g[0][n][i + j];
            x = (x + total_g[block * 64 + col + j]) + (k[0][n][i + j] + total_k[block * 64 + col + j]);
        }
    });
}

}  // namespace vk
