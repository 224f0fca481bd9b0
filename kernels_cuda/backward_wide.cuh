// Products inside a chunk whose operands must not be rounded to 16 bits, because dg is a difference of them:
//
//     sum_j M_ij K_j exp(Gamma_i - Gamma_j)     sum_i M_ij Q_i exp(Gamma_i - Gamma_j)     for M = dAqk and X
//
// Float calls keep operands as they are; for 16-bit calls x = hi + lo in bf16 (float's range, relative error 2^-17), and a
// product is that of both sums. Pairs inside a block of 16 rows are summed in float.
//
// dg adds a pair of tokens to the rows of one and takes it from the rows of the other. For both to be the same number, to
// float's precision, the row that is multiplied last is the sum hi + lo too: `as_split`.
#pragma once
#include "backward_common.cuh"

namespace vk {

template <class T> struct Wide {  // 16-bit
    using E = bf16;
    static constexpr int parts = 2;
};
template <> struct Wide<float> {
    using E = float;
    static constexpr int parts = 1;
};

VK_DEVICE void split2(u32& hi, u32& lo, float x, float y) {
    hi = bf16x2_round(x, y);
    lo = bf16x2_round(x - as_float(hi << 16), y - as_float(hi & 0xffff0000u));
}

// Two numbers as their products see them.
template <class T> VK_DEVICE void as_split(float& x, float& y) {
    if constexpr (is_16bit<T>) {
        u32 hi, lo;
        split2(hi, lo, x, y);
        x = as_float(hi << 16) + as_float(lo << 16);
        y = as_float(hi & 0xffff0000u) + as_float(lo & 0xffff0000u);
    }
}

// Rows x Columns wide elements; 16-bit calls have a second plane with the low parts.
template <class T, int Rows, int Columns> struct WideTile {
    using E = typename Wide<T>::E;
    static constexpr int ld = pitch<E>(Columns), plane = Rows * ld;
    static constexpr int bytes = Wide<T>::parts * plane * int(sizeof(E));
    E* p;
    // Eight (16-bit) or four (float) neighbours, column c a multiple of as many.
    VK_DEVICE void set_piece(int r, int c, const float (&x)[vec<T>]) const {
        E* const q = p + r * ld + c;
        u128 hi, lo;
        if constexpr (is_16bit<T>) {
#pragma unroll
            for (int i = 0; i < 4; ++i) split2(hi.w[i], lo.w[i], x[2 * i], x[2 * i + 1]);
            st128(q + plane, lo);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) hi.w[i] = as_u32(x[i]);
        }
        st128(q, hi);
    }
};

// Lower triangle of a C x C matrix in blocks of 16: block row I holds I + 1 blocks, with a pitch of its own.
template <class T, int C> struct WideTriangle {
    using E = typename Wide<T>::E;
    static constexpr int pad = vec<E>, blocks = C / 16;
    static constexpr int plane = 16 * blocks * (8 * (blocks + 1) + pad);
    static constexpr int bytes = Wide<T>::parts * plane * int(sizeof(E));
    E* p;
    static VK_DEVICE int ld(int I) { return 16 * (I + 1) + pad; }
    VK_DEVICE E* at(int I, int r, int c) const { return p + 16 * I * (8 * (I + 1) + pad) + r * ld(I) + c; }
    VK_DEVICE void set2(int I, int r, int c, float x, float y) const {  // row 16I + r, columns c, c + 1
        E* const q = at(I, r, c);
        if constexpr (is_16bit<T>) {
            u32 hi, lo;
            split2(hi, lo, x, y);
            *reinterpret_cast<u32*>(q) = hi;
            *reinterpret_cast<u32*>(q + plane) = lo;
        } else {
            q[0] = x;
            q[1] = y;
        }
    }
    // In place of diagonal block I, where products do not read it: 16 x 16 floats, those of column j together.
    VK_DEVICE float* diagonal(int I, int j, int i) const {
        E* const row = at(I, j, 16 * I);
        if constexpr (is_16bit<T>) return reinterpret_cast<float*>(row + i / 8 * plane) + i % 8;
        else return row + i;
    }
};

// dAqk and X of a chunk, rows `stride` apart, to m[0] and m[1]; if Gated, diagonal blocks as `diagonal` has them. 4 C threads,
// each with four neighbours of a row at a time, all loaded before the first is used.
template <class T, int C, bool Gated>
VK_DEVICE void load_triangles(const WideTriangle<T, C> (&m)[2], const float* dAqk, const float* X, int stride, int rows) {
    constexpr int NB = C / 16, threads = 4 * C, steps = NB * NB * 64 / threads;
    u128 x[steps][2];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        const int p = tid() + i * threads, I = p / 64 / NB, J = p / 64 % NB, r = 16 * I + p % 64 / 4;
        x[i][0] = x[i][1] = u128{{0, 0, 0, 0}};
        if (J <= I && r < rows) {
            const int from = r * stride + 16 * J + p % 4 * 4;
            x[i][0] = ld128(dAqk + from);
            x[i][1] = ld128(X + from);
        }
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) {
        const int p = tid() + i * threads, I = p / 64 / NB, J = p / 64 % NB, r = p % 64 / 4, j = p % 4 * 4;
        if (J > I) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float y[4];
#pragma unroll
            for (int h = 0; h < 4; ++h) y[h] = as_float(x[i][e].w[h]);
            if (Gated && I == J) {
#pragma unroll
                for (int h = 0; h < 4; ++h) *m[e].diagonal(I, j + h, r) = y[h];
            } else {
                m[e].set2(I, r, 16 * J + j, y[0], y[1]);
                m[e].set2(I, r, 16 * J + j + 2, y[2], y[3]);
            }
        }
    }
}

// One or two products with the same right-hand side: acc_e += block (I, J) of m_e, or its transpose, times 16 rows of x from
// row br; N columns from column bc.
template <bool Transposed, int N, class T, int C, int Rows, int E>
VK_DEVICE void wide_mma(float (&acc)[E][1][N / 8][4], const WideTriangle<T, C> (&m)[E], int I, int J,
                        const WideTile<T, Rows, 64>& x, int br, int bc, int l = lane()) {
    using X = WideTile<T, Rows, 64>;
    const int ld = m[0].ld(I);
    const auto* const b = x.p + br * X::ld + bc;
    if constexpr (is_16bit<T>) {
        u32 hi[E][4], lo[E][4];
#pragma unroll
        for (int e = 0; e < E; ++e) {
            load_a<Transposed>(hi[e], m[e].at(I, 0, 16 * J), ld, 0, 0, l);
            load_a<Transposed>(lo[e], m[e].at(I, 0, 16 * J) + m[e].plane, ld, 0, 0, l);
        }
#pragma unroll
        for (int n = 0; n < N / 8; n += 2) {
            u32 bh[4], bl[4];
            load_b2<false>(bh, b, X::ld, 0, 8 * n, l);
            load_b2<false>(bl, b + X::plane, X::ld, 0, 8 * n, l);
#pragma unroll
            for (int e = 0; e < E; ++e)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const u32 ph[2] = {bh[2 * h], bh[2 * h + 1]}, pl[2] = {bl[2 * h], bl[2 * h + 1]};
                    mma16816<bf16>(acc[e][0][n + h], lo[e], pl);
                    mma16816<bf16>(acc[e][0][n + h], lo[e], ph);
                    mma16816<bf16>(acc[e][0][n + h], hi[e], pl);
                    mma16816<bf16>(acc[e][0][n + h], hi[e], ph);
                }
        }
    } else {
#pragma unroll
        for (int e = 0; e < E; ++e)
            warp_mma<float, 16, N, 16, Transposed ? TN : NN>(acc[e], m[e].at(I, 0, 16 * J), ld, b, X::ld, l);
    }
}

// Rows of q or k: of a tile that is zero outside, or of a tensor.
template <class T> struct TileRows {
    const T* p;
    int ld;
    VK_DEVICE void pair(int r, int c, float& x, float& y) const {
        unpack2<T>(*reinterpret_cast<const u32*>(p + r * ld + c), x, y);
    }
    VK_DEVICE float at(int r, int c) const { return to_float(p[r * ld + c]); }
    VK_DEVICE u128 piece(int r, int c) const { return ld128(p + r * ld + c); }
};
template <class T> struct TensorRows {
    const T* p;
    int stride, rows, columns;
    VK_DEVICE float at(int r, int c) const { return r < rows && c < columns ? to_float(p[r * stride + c]) : 0.f; }
    VK_DEVICE void pair(int r, int c, float& x, float& y) const { x = at(r, c), y = at(r, c + 1); }
    VK_DEVICE u128 piece(int r, int c) const { return load_piece(p + r * stride + c, r < rows ? columns - c : 0); }
};

template <class T, bool Tile> struct RowsOf { using type = TensorRows<T>; };
template <class T> struct RowsOf<T, true> { using type = TileRows<T>; };
template <class T> using SourceRows = typename RowsOf<T, is_16bit<T>>::type;

// acc *= table[column] for a warp that stands at `column`.
template <int E, int NT_> VK_DEVICE void decay_columns(float (&acc)[E][1][NT_][4], const float* table, int column, int l = lane()) {
#pragma unroll
    for (int n = 0; n < NT_; ++n) {
        const pair32 fall = *reinterpret_cast<const pair32*>(table + column + 8 * n + 2 * (l % 4));
#pragma unroll
        for (int e = 0; e < E; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[e][0][n][i] *= i % 2 ? fall.y : fall.x;
    }
}

// One channel of the diagonal block I, by one lane; E_ij is a running product of the single decays. s: of this channel, `ld`
// apart, in 16-bit calls local sums of log decays, in float calls the log decays themselves: after a strong one a
// difference of sums has lost the digits of a weak one, and the forward has them.
//     di_i = sum_{j<i} dAqk_ij K_j E_ij     le_i = sum_{j<i} X_ij K_j E_ij     ri_j = sum_{i>j} (dAqk_ij Q_i + beta_i X_ij K_i) E_ij
template <class T, int C>
VK_DEVICE void diagonal_pairs(float (&di)[16], float (&le)[16], float (&ri)[16], const WideTriangle<T, C> (&m)[2], int I,
                              const SourceRows<T>& Kr, const SourceRows<T>& Qr, int d, float scale, const float* beta, const float* s, int ld) {
    float Qc[16], Kb[16], e[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        Qc[i] = scale * Qr.at(16 * I + i, d), Kb[i] = beta[i] * Kr.at(16 * I + i, d);
        e[i] = i > 0 ? exp_decay_flush<T>(is_16bit<T> ? s[i * ld] - s[(i - 1) * ld] : s[i * ld]) : 1.f;
        di[i] = le[i] = ri[i] = 0.f;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        float kE = Kr.at(16 * I + j, d), E = 1.f;
#pragma unroll
        for (int i = j + 1; i < 16; ++i) {
            const float a = *m[0].diagonal(I, j, i), x = *m[1].diagonal(I, j, i);
            kE *= e[i];
            E *= e[i];
            di[i] = fma(a, kE, di[i]);
            le[i] = fma(x, kE, le[i]);
            ri[j] = fma(E, fma(a, Qc[i], x * Kb[i]), ri[j]);
        }
    }
}

}  // namespace vk
