// Products of rows inside a chunk, each channel decayed between them:
//
//   Aqk_ij = sum_d Q_id K_jd exp(Gamma_id - Gamma_jd)   i >= j        L_ij = sum_d K_id K_jd exp(Gamma_id - Gamma_jd)   i > j
//
// No exponent is ever positive for g <= 0, and no row sees a later token. A product is factored through an anchor a that
// lies between j and i, exp(Gamma_i - Gamma_a) exp(Gamma_a - Gamma_j), and the anchor's place depends on i and j alone:
//
//   16x16 blocks below the diagonal              a = last row before the block of i
//   inside a 16x16 block, for s = 8, 4, 2, 1     a = last row of the lower-numbered s of 2s neighbours, where i lies in
//                                                the other s
//   i = j                                        no decay: fused multiply-adds of q and k themselves
//
// So every pair is found at exactly one level, every factor is a product of the decays between anchor and row, and at each
// level a row is either an i or a j. 16-bit calls round operands once, to the 11 bits of tf32: the site QK of the contract
// `operands_tf32`. Rounded to bf16 they would be 10 % of the error of o at slow gates.
#pragma once
#include "gate.cuh"
#include "pair.cuh"
#include "tile.cuh"

namespace vk {

// An element of a decayed row as the products take it.
template <class T> struct OperandOf { using type = tf32; };
template <> struct OperandOf<float> { using type = float; };
template <class T> using Operand = typename OperandOf<T>::type;

// 1 + 2^-11.5. The tensor core cuts off up to 1 of the last bits that it reads; a number times this has 0.35 to 0.71 of them
// more, so that on average nothing is lost, and one of 11 bits is read as itself. Costs nothing where a decay is multiplied
// anyway (rounding takes three instructions for each element), and unlike an addition to the bits it keeps NaN.
constexpr float to_tf32 = 1.f + 3.4526698e-4f;

template <class T> VK_DEVICE float to_operand(float decay) { return is_16bit<T> ? decay * to_tf32 : decay; }

// The decay over a run of rows, times `start`. 16-bit: a product of factors. Float: exp of a sum, so that many rows cost one
// rounding of a small number instead of many roundings near 1; there `start` is not used.
template <class T> struct Fall {
    float v;
    VK_DEVICE explicit Fall(float start = 1.f) : v(is_16bit<T> ? start : 0.f) {}
    // What `then` takes, from log_decay.
    static VK_DEVICE float of(float log) { return is_16bit<T> ? exp_decay_flush<T>(log) : log; }
    VK_DEVICE void then(float d) { v = is_16bit<T> ? v * d : v + d; }
    VK_DEVICE float value() const { return is_16bit<T> ? v : exp_decay<T>(v); }
};

// Eight numbers summed over the 32 lanes: lane l ends with the sum of number l / 4.
VK_DEVICE float sum_lanes(float (&x)[8]) {
#pragma unroll
    for (int mask = 16, half = 4; half > 0; mask /= 2, half /= 2) {
        const bool upper = lane() & mask;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float give = upper ? x[i] : x[i + half], keep = upper ? x[i + half] : x[i];
            x[i] = keep + shfl_xor(give, mask);
        }
    }
    const float y = x[0] + shfl_xor(x[0], 2);
    return y + shfl_xor(y, 1);
}

// Eight rows, two channels of one lane: a warp holds 8 rows by 64 channels, one half of a 16-row block.
template <class T> struct RowGroup {
    Pair<T> q[8], k[8];
    float fall[8][2];  // Fall::of each row's decay

    // This half's share of a level's operands, 24 rows at `tile`, this lane's channels: rows 0..7 are the q of the upper
    // rows, 8..15 their k, 16..23 the k of the lower rows.
    template <int s> VK_DEVICE void level(Operand<T>* tile, int ld, int half) const {
        constexpr int groups = s == 8 ? 1 : 4 / s;
        tile += s == 8 ? 0 : 4 * half * ld;
#pragma unroll
        for (int group = 0; group < groups; ++group) {
            if (s < 8 || half == 1) {
                Fall<T> x(to_tf32), y(to_tf32);
#pragma unroll
                for (int j = 0; j < s; ++j) {
                    const int i = s == 8 ? j : group * 2 * s + s + j, row = group * s + j;
                    x.then(fall[i][0]), y.then(fall[i][1]);
                    put(tile + row * ld, q[i], x.value(), y.value());
                    put(tile + (row + 8) * ld, k[i], x.value(), y.value());
                }
            }
            if (s < 8 || half == 0) {
                Fall<T> x(to_tf32), y(to_tf32);
#pragma unroll
                for (int j = s - 1; j >= 0; --j) {
                    const int i = group * 2 * s + j, row = group * s + j;
                    put(tile + (row + 16) * ld, k[i], x.value(), y.value());
                    x.then(fall[i][0]), y.then(fall[i][1]);
                }
            }
        }
    }

    static VK_DEVICE void put(Operand<T>* to, const Pair<T>& p, float x, float y) {
        const pair32 u = unpack<T>(p);
        *reinterpret_cast<pair32*>(to) = pair32{u.x * x, u.y * y};
    }
};

// The accumulators of one warp, alive across slices of channels: two of the four levels inside row block warp / 2, and an
// equal share of the 16x8 products below the diagonal, in the order (pair of blocks, q or k, half).
template <class T, int C> struct IntraProducts {
    static constexpr int blocks = C / 16, pairs = blocks * (blocks - 1) / 2, warps = C / 8;
    static constexpr int share = ceil_div(4 * pairs, warps);
    float inside[2][1][1][4];
    float below[max(share, 1)][1][1][4];
    float diagonal;  // of row lane / 4 of the warp's eight

    VK_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 2; ++i) vk::clear(inside[i]);
#pragma unroll
        for (int i = 0; i < max(share, 1); ++i) vk::clear(below[i]);
        diagonal = 0.f;
    }

    // Pairs of blocks (a, b), a > b, by their distance: (1,0) (2,1) (3,2) (2,0) (3,1) (3,0).
    static VK_DEVICE constexpr int distance(int pair) { return pair < blocks - 1 ? 1 : pair < 2 * blocks - 3 ? 2 : 3; }
    static VK_DEVICE constexpr int pair_of(int column_block, int distance) {
        return column_block + (distance == 1 ? 0 : distance == 2 ? blocks - 1 : 2 * blocks - 3);
    }
    static VK_DEVICE constexpr int column_block(int pair) { return pair - pair_of(0, distance(pair)); }

    // Level 0, 1, 2, 3 (s = 1, 2, 4, 8) is accumulated by the warp of half level % 2.
    VK_DEVICE void add_inside(int level, const Operand<T>* tile, int ld) {
        if (level % 2 == warp() % 2) warp_mma<Operand<T>, 16, 8, 64, NT>(inside[level / 2], tile, ld, tile + 16 * ld, ld);
    }

    // q, k: rows 16.. of the chunk, decayed from the start of their block. columns: 16 rows of k for each pair of blocks,
    // decayed to the start of the pair's upper block.
    VK_DEVICE void add_below(const Operand<T>* q, const Operand<T>* k, const Operand<T>* columns, int ld) {
#pragma unroll
        for (int i = 0; i < share; ++i) {
            const int unit = share * warp() + i, pair = unit / 4;
            if (unit >= 4 * pairs) continue;
            const int a = column_block(pair) + distance(pair);
            warp_mma<Operand<T>, 16, 8, 64, NT>(below[i], (unit / 2 % 2 ? k : q) + 16 * (a - 1) * ld, ld,
                                       columns + (16 * pair + 8 * (unit % 2)) * ld, ld);
        }
    }

    // Every element up to the diagonal, each by one lane: put(of_l, row, column, x), and pair(of_l, row, column, x, y) for
    // two neighbours, the first in an even column; of_l: of L, else of Aqk.
    template <class Put, class PutPair> VK_DEVICE void store(Put put, PutPair pair) {
        const int g = lane() / 4, j = frag_col(lane(), 0), row = 16 * (warp() / 2);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int bits = 2 * n + warp() % 2, group = g >> bits;  // level s = 1 << bits
            const int r = row + g + ((group + 1) << bits);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (group == (j + i) >> bits)
#pragma unroll
                    for (int of_l = 0; of_l < 2; ++of_l) put(of_l, r, row + j + i + (group << bits), inside[n][0][0][2 * of_l + i]);
        }
        if (lane() % 4 == 0) put(0, 8 * warp() + g, 8 * warp() + g, diagonal);
#pragma unroll
        for (int u = 0; u < share; ++u) {
            const int unit = share * warp() + u, b = column_block(unit / 4), of_l = unit / 2 % 2;
            if (unit >= 4 * pairs) continue;
            const int column = 16 * b + 8 * (unit % 2) + j, r = 16 * (b + distance(unit / 4)) + g;
            pair(of_l, r, column, below[u][0][0][0], below[u][0][0][1]);
            pair(of_l, r + 8, column, below[u][0][0][2], below[u][0][0][3]);
        }
    }
};

template <bool Gated, class T, int C> struct Intra { using type = IntraProducts<T, C>; };

// Without a gate the operands are q and k themselves, exact in T: an equal share of all 16x8 products to each warp.
template <class T, int C> struct PlainProducts {
    static constexpr int blocks = C / 16, units = 2 * blocks * (blocks + 1), warps = C / 8, share = ceil_div(units, warps);
    float part[share][1][1][4];

    VK_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < share; ++i) vk::clear(part[i]);
    }
    static VK_DEVICE constexpr int row_block(int pair) { return pair < 1 ? 0 : pair < 3 ? 1 : pair < 6 ? 2 : 3; }
    static VK_DEVICE constexpr int column_block(int pair) { return pair - row_block(pair) * (row_block(pair) + 1) / 2; }

    VK_DEVICE void add(const T* q, const T* k, int ld) {
#pragma unroll
        for (int i = 0; i < share; ++i) {
            const int unit = share * warp() + i, pair = unit / 4;
            if (unit >= units) continue;
            warp_mma<T, 16, 8, 64, NT>(part[i], (unit / 2 % 2 ? k : q) + 16 * row_block(pair) * ld, ld,
                                       k + (16 * column_block(pair) + 8 * (unit % 2)) * ld, ld);
        }
    }
    template <class Put, class PutPair> VK_DEVICE void store(Put put, PutPair pair) {
        const int g = lane() / 4, j = frag_col(lane(), 0);
#pragma unroll
        for (int u = 0; u < share; ++u) {
            const int unit = share * warp() + u, of_l = unit / 2 % 2, a = row_block(unit / 4), b = column_block(unit / 4);
            if (unit >= units) continue;
            const int column = 16 * b + 8 * (unit % 2) + j;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = 16 * a + g + 8 * i;
                const float x = part[u][0][0][2 * i], y = part[u][0][0][2 * i + 1];
                if (column + 1 + of_l <= r) pair(of_l, r, column, x, y);
                else if (column + of_l <= r) put(of_l, r, column, x);
            }
        }
    }
};
template <class T, int C> struct Intra<false, T, C> { using type = PlainProducts<T, C>; };

}  // namespace vk
