// Products of rows inside a chunk, each channel decayed between them:
//
//   Aqk_ij = sum_d Q_id K_jd exp(Gamma_id - Gamma_jd)   i >= j        L_ij = sum_d K_id K_jd exp(Gamma_id - Gamma_jd)   i > j
//
// No exponent is ever positive for g <= 0, and no row sees a later token. A product is factored through an anchor a that
// lies between j and i, exp(Gamma_i - Gamma_a) exp(Gamma_a - Gamma_j), and the anchor's place depends on i and j alone:
//
//   16x16 blocks below the diagonal        a = last row before the block of i
//   8x8 and 4x4 blocks inside a 16x16      a = last row of the upper half
//   4x4 blocks on the diagonal             per pair, running products of decays in fused multiply-adds
//
// Anchored factors are rounded to T. Keeping 16 bits of them (x = hi + lo, three products for one) was tried on 168 inputs,
// bfloat16 and float16, repeated keys and beta near 2 among them: the error of o fell by 4 % and that of the state by less
// than 1 %, under the rounding of Aqk and A that follows either way. Float calls stay in float.
//
// Local sums c of decays start anew in each block of 16 rows, so no exponent is a difference of large sums.
#pragma once
#include "tile.cuh"

namespace vk {

// Four neighbouring elements as float.
template <class T> VK_DEVICE void load4(float (&x)[4], const T* p) {
    if constexpr (is_16bit<T>) {
        const u64 w = *reinterpret_cast<const u64*>(p);
        unpack2<T>(u32(w), x[0], x[1]);
        unpack2<T>(u32(w >> 32), x[2], x[3]);
    } else {
        const u128 w = ld128(p);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = as_float(w.w[i]);
    }
}

// Sixteen rows by sixteen channels, given as x[h][i] = element (g + 8h, 4t + i) of lane 4g + t. The four channels of a lane
// take the places 2t, 2t+1, 2t+8, 2t+9 of the k index: a permutation of the sum, the same on both sides.
template <class T> struct Operand {
    u32 part[4];
    VK_DEVICE void set(const float (&x)[2][4], float*) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            part[h] = pack2<T>(x[h][0], x[h][1]);
            part[h + 2] = pack2<T>(x[h][2], x[h][3]);
        }
    }
};
// Float: a tile in this warp's scratch.
template <> struct Operand<float> {
    static constexpr int ld = 20, size = 16 * ld;
    const float* p;
    VK_DEVICE void set(const float (&x)[2][4], float* scratch) {
        const int g = lane() / 4, t = lane() % 4;
        syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h)
            st128(scratch + (g + 8 * h) * ld + 4 * t,
                  u128{{as_u32(x[h][0]), as_u32(x[h][1]), as_u32(x[h][2]), as_u32(x[h][3])}});
        syncwarp();
        p = scratch;
    }
};

// acc += A (16 rows) times rows 8n .. 8n+7 of B, transposed.
template <class T> VK_DEVICE void add_product(float (&acc)[4], const Operand<T>& a, const Operand<T>& b, int n) {
    if constexpr (is_16bit<T>) {
        const u32 columns[2] = {b.part[n], b.part[n + 2]};
        mma16816<T>(acc, a.part, columns);
    } else {
        constexpr int ld = Operand<float>::ld;
        const int g = lane() / 4, t = lane() % 4;
#pragma unroll
        for (int k = 0; k < 16; k += 4)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x[4], y[4];
                load4(x, a.p + (g + 8 * (i / 2)) * ld + k);
                load4(y, b.p + (8 * n + 2 * t + i % 2) * ld + k);
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i] = fma(x[j], y[j], acc[i]);
            }
    }
}

// Sums of 16 numbers over the eight lanes of equal lane / 8: lane e of them ends with sums 2e and 2e + 1 in x[0], x[1].
VK_DEVICE void sum_eight_lanes(float (&x)[16]) {
#pragma unroll
    for (int mask = 4, half = 8; mask > 0; mask /= 2, half /= 2) {
        const bool upper = lane() & mask;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float give = upper ? x[i] : x[i + half], keep = upper ? x[i + half] : x[i];
            x[i] = keep + shfl_xor(give, mask);
        }
    }
}

// One warp's share: the block of rows 16a .. 16a+15, all columns up to the diagonal. The accumulators live across slices
// of channels; `add` takes one slice, `store` ends it.
template <class T, int C> struct IntraProducts {
    static constexpr int blocks = C / 16;
    float below[blocks > 1 ? blocks - 1 : 1][2][2][4];  // [column block][Aqk, L][8 columns]
    float half8[4], half4[4];                           // rows: 8 of Aqk, then 8 of L
    float pairs[16];                                    // 4x4 block lane / 8: Aqk (i,j) j <= i, then L j < i, row by row

    VK_DEVICE void clear() {
#pragma unroll
        for (int b = 0; b < (blocks > 1 ? blocks - 1 : 1); ++b) vk::clear(below[b]);
#pragma unroll
        for (int i = 0; i < 4; ++i) half8[i] = half4[i] = 0.f;
#pragma unroll
        for (int i = 0; i < 16; ++i) pairs[i] = 0.f;
    }

    // q, k: tiles of pitch `ld`; c: tile of pitch `ldc` of local sums; Columns channels. scratch: 3 operands (float only).
    template <int Columns> VK_DEVICE void add(int a, const T* q, const T* k, int ld, const float* c, int ldc, float* scratch) {
        const int g = lane() / 4, t = lane() % 4, row = 16 * a;
#pragma unroll 1
        for (int d = 4 * t; d < Columns; d += 16) {
            float ck[2][4], half[4], x[2][4], y[2][4], qx[2][4], kx[2][4];
            Operand<T> left, left_k, right;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                load4(ck[h], c + (row + g + 8 * h) * ldc + d);
                load4(qx[h], q + (row + g + 8 * h) * ld + d);
                load4(kx[h], k + (row + g + 8 * h) * ld + d);
            }
            // 8x8: rows 8..15 of q and of k against rows 0..7
            load4(half, c + (row + 7) * ldc + d);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float fall = exp2(ck[1][i] - half[i]);
                x[0][i] = qx[1][i] * fall;
                x[1][i] = kx[1][i] * fall;
                y[0][i] = kx[0][i] * exp2(half[i] - ck[0][i]);
                y[1][i] = 0.f;
            }
            left.set(x, scratch);
            right.set(y, scratch + scratch_step);
            add_product<T>(half8, left, right, 0);
            add_quarters(row, d, q, k, ld, c, ldc, scratch);
            if (blocks == 1 || a == 0) continue;
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float fall = exp2(ck[h][i]);
                    qx[h][i] *= fall;
                    kx[h][i] *= fall;
                }
            left.set(qx, scratch);
            left_k.set(kx, scratch + scratch_step);
            float between[4] = {0.f, 0.f, 0.f, 0.f};  // whole blocks between the columns' block and row's
#pragma unroll
            for (int b = blocks - 2; b >= 0; --b) {
                if (b >= a) continue;
                float total[4];
                load4(total, c + (16 * b + 15) * ldc + d);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    load4(ck[h], c + (16 * b + g + 8 * h) * ldc + d);
                    load4(y[h], k + (16 * b + g + 8 * h) * ld + d);
#pragma unroll
                    for (int i = 0; i < 4; ++i) y[h][i] *= exp2(total[i] - ck[h][i] + between[i]);
                }
                right.set(y, scratch + 2 * scratch_step);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    add_product<T>(below[b][0][n], left, right, n);
                    add_product<T>(below[b][1][n], left_k, right, n);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) between[i] += total[i];
            }
        }
        add_pairs<Columns>(row, q, k, ld, c, ldc);
    }

    // 4x4: rows 4..7 and 12..15 of q and of k against rows 0..3 and 8..11; the two cross terms are not used.
    VK_DEVICE void add_quarters(int row, int d, const T* q, const T* k, int ld, const float* c, int ldc, float* scratch) {
        const int g = lane() / 4, j = row + g + g / 4 * 4, i0 = j + 4, anchor = row + g / 4 * 8 + 3;
        float ci[4], cj[4], ca[4], x[2][4], y[2][4];
        load4(ci, c + i0 * ldc + d);
        load4(cj, c + j * ldc + d);
        load4(ca, c + anchor * ldc + d);
        load4(x[0], q + i0 * ld + d);
        load4(x[1], k + i0 * ld + d);
        load4(y[0], k + j * ld + d);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float fall = exp2(ci[i] - ca[i]);
            x[0][i] *= fall;
            x[1][i] *= fall;
            y[0][i] *= exp2(ca[i] - cj[i]);
            y[1][i] = 0.f;
        }
        Operand<T> left, right;
        left.set(x, scratch);
        right.set(y, scratch + scratch_step);
        add_product<T>(half4, left, right, 0);
    }

    template <int Columns>
    VK_DEVICE void add_pairs(int row, const T* q, const T* k, int ld, const float* c, int ldc) {
        row += 4 * (lane() / 8);
#pragma unroll 1
        for (int d = 4 * (lane() % 8); d < Columns; d += 32) {
            float qx[4][4], kx[4][4], cx[4][4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                load4(qx[r], q + (row + r) * ld + d);
                load4(kx[r], k + (row + r) * ld + d);
                load4(cx[r], c + (row + r) * ldc + d);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float decay[4];
#pragma unroll
                for (int r = 1; r < 4; ++r) decay[r] = exp2(cx[r][e] - cx[r - 1][e]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float kj = kx[j][e];
                    pairs[aqk_pair(j, j)] = fma(qx[j][e], kj, pairs[aqk_pair(j, j)]);
#pragma unroll
                    for (int i = j + 1; i < 4; ++i) {
                        kj *= decay[i];
                        pairs[aqk_pair(i, j)] = fma(qx[i][e], kj, pairs[aqk_pair(i, j)]);
                        pairs[l_pair(i, j)] = fma(kx[i][e], kj, pairs[l_pair(i, j)]);
                    }
                }
            }
        }
    }

    // aqk(i, j, x) and l(i, j, x) for every element of the row block up to its diagonal, each by one lane.
    template <class Aqk, class L> VK_DEVICE void store(int a, Aqk aqk, L l) {
        const int row = 16 * a;
#pragma unroll
        for (int b = 0; b < blocks - 1; ++b) {
            if (b >= a) continue;
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int r = row + frag_row(lane(), i), s = 16 * b + 8 * n + frag_col(lane(), i);
                    aqk(r, s, below[b][0][n][i]);
                    l(r, s, below[b][1][n][i]);
                }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int g = lane() / 4, s = frag_col(lane(), i);  // element i < 2 belongs to Aqk, the others to L
            if (i < 2) aqk(row + 8 + g, row + s, half8[i]);
            else l(row + 8 + g, row + s, half8[i]);
            if (g / 4 != s / 4) continue;
            const int r4 = row + 4 + g + g / 4 * 4, s4 = row + s + s / 4 * 4;
            if (i < 2) aqk(r4, s4, half4[i]);
            else l(r4, s4, half4[i]);
        }
        sum_eight_lanes(pairs);
        const int corner = row + 4 * (lane() / 8);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j <= i; ++j) {
                const int p = aqk_pair(i, j), m = j < i ? l_pair(i, j) : 0;
                if (p / 2 == lane() % 8) aqk(corner + i, corner + j, pairs[p % 2]);
                if (j < i && m / 2 == lane() % 8) l(corner + i, corner + j, pairs[m % 2]);
            }
    }

    static constexpr int scratch_step = is_16bit<T> ? 0 : 16 * 20;

   private:
    static VK_DEVICE constexpr int aqk_pair(int i, int j) { return i * (i + 1) / 2 + j; }
    static VK_DEVICE constexpr int l_pair(int i, int j) { return 10 + i * (i - 1) / 2 + j; }
};

template <bool Gated, class T, int C> struct Intra { using type = IntraProducts<T, C>; };

// Without a gate the operands are q and k themselves, exact in T.
template <class T, int C> struct PlainProducts {
    static constexpr int blocks = C / 16;
    float block[blocks][2][1][2][4];

    VK_DEVICE void clear() {
#pragma unroll
        for (int b = 0; b < blocks; ++b)
#pragma unroll
            for (int m = 0; m < 2; ++m) vk::clear(block[b][m]);
    }

    template <int Columns> VK_DEVICE void add(int a, const T* q, const T* k, int ld, const float*, int, float*) {
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            if (b > a) continue;
            warp_mma<T, 16, 16, Columns, NT>(block[b][0], q + 16 * a * ld, ld, k + 16 * b * ld, ld);
            warp_mma<T, 16, 16, Columns, NT>(block[b][1], k + 16 * a * ld, ld, k + 16 * b * ld, ld);
        }
    }

    template <class Aqk, class L> VK_DEVICE void store(int a, Aqk aqk, L l) {
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            if (b > a) continue;
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int r = 16 * a + frag_row(lane(), i), s = 16 * b + 8 * n + frag_col(lane(), i);
                    if (s <= r) aqk(r, s, block[b][0][0][n][i]);
                    if (s < r) l(r, s, block[b][1][0][n][i]);
                }
        }
    }
};
template <class T, int C> struct Intra<false, T, C> { using type = PlainProducts<T, C>; };

}  // namespace vk
