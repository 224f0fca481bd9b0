// Everything of the forward that needs no state, one block per (chunk, value head):
//
//     Gamma = inclusive cumsum of g inside the chunk             gC = its last row
//     Aqk_ij = M_ij  sum_d scale Q_id K_jd exp(Gamma_id - Gamma_jd)
//     L_ij   = M1_ij sum_d K_id K_jd exp(Gamma_id - Gamma_jd)    A = (I + diag(beta) L)^-1
//     U = A diag(beta) V              W = A diag(beta) (exp Gamma * K)
//     Kg = exp(gC - Gamma) * K        Qg = scale exp Gamma * Q
//
// Channels come in slices of 64. For a slice each warp keeps 8 rows in registers, two channels to a lane, and writes from
// there every operand of intra.cuh, Kg, Qg, and into W's place diag(beta) exp Gamma * K; once A is known, each warp multiplies
// columns of that and of diag(beta) V. A, and both of these, are rounded to T as the backward reads them. beta must not go
// into the columns of A: one rounding of A diag(beta) would be that of a whole row of U and W, and the backward, which has
// A^T by itself, would no longer be the derivative of what was computed (dg off by 6.7 noise floors).
//
// Code that is unrolled over rows must stay small: what one call does not need is not in its instance (gate, element
// accesses for odd rows), and what is rare stands in branches of its own. Beyond the instruction cache this kernel took
// twice the time.
#include "chunks.cuh"
#include "gate.cuh"
#include "intra.cuh"
#include "inverse.cuh"
#include "tile_store.cuh"

namespace vk {

template <class T, int C, bool Gated> struct PrepareShape {
    // Operands of the products: decayed rows, without a gate q and k themselves.
    using E = typename Either<Gated, Operand<T>, T>::type;
    static constexpr int blocks = C / 16, warps = C / 8, threads = 32 * warps;
    static constexpr int ld = pitch<E>(64), ldm = C + 8, width = is_16bit<T> ? 32 : 16, ldx = pitch<T>(width);
    // In turn: of levels 1 and 2, of levels 4 and 8, of what lies below; without a gate q and k.
    static constexpr int operands = (Gated ? 3 : 2) * C * ld * int(sizeof(E));
    // In their place later: M and A, then a tile of each warp's columns of V or diag(beta) exp Gamma * K.
    static constexpr int square = C * ldm * 4, own = C * ldx * int(sizeof(T)), x = 2 * square;
    static constexpr int totals = max(operands, x + warps * own), vectors = totals + 2 * warps * 64 * 4;
    static constexpr int bytes = vectors + 3 * C * 4;
};

// acc[16-row block][...] += lower triangle of At times columns of X.
template <class T, int C, int Columns, int First = 0>
VK_DEVICE void lower_product(float (&acc)[C / 16][Columns / 8][4], const T* At, const T* X, int ldx) {
    if constexpr (First < C / 16) {
        constexpr int M = C - 16 * First;
        auto& rest = *reinterpret_cast<float (*)[M / 16][Columns / 8][4]>(acc + First);
        warp_mma<T, M, Columns, 16>(rest, At + 16 * First * pitch<T>(C) + 16 * First, pitch<T>(C), X + 16 * First * ldx, ldx);
        lower_product<T, C, Columns, First + 1>(acc, At, X, ldx);
    }
}

// Eight rows from p: 1 / sqrt(sum x^2 + eps) of row i to out[i]; a whole warp.
template <bool Whole, class T> VK_DEVICE void inverse_norms(float* out, const T* p, int stride, int rows, int K) {
    float sum[8] = {};
#pragma unroll 1
    for (int channel = 2 * lane(); channel < K; channel += 64)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const pair32 x = unpack<T>(load_pair<Whole>(p + i * stride + channel, i < rows ? K - channel : 0));
            sum[i] = fma(x.x, x.x, fma(x.y, x.y, sum[i]));
        }
    const float total = sum_lanes(sum);
    if (lane() % 4 == 0) out[lane() / 4] = 1.f / sqrt_rn(total + norm_eps);
}

// Tokens are rows of q, k [tokens,H,K], v [tokens,HV,V], g [tokens,HV,K], beta [tokens,HV]; g and beta in T or float.
// Kind: GateKind, 0 without a gate. Whole: rows of all tensors are whole numbers of aligned 16-byte pieces.
// Out: Aqk [tokens,HV,C] (0 above the diagonal), U [tokens,HV,V], W [tokens,HV,K]. Out, each may be null: Kg, Qg
// [tokens,HV,K], decay = exp gC [chunks,HV,K], A [tokens,HV,C], Gamma [tokens,HV,K] in log2 units, qn, kn [tokens,H,K]
// after the norm, beta_used [tokens,HV].
template <class T, int C, int Kind, bool Whole>
VK_KERNEL_BOUNDS((PrepareShape<T, C, Kind != 0>::threads),
                 (is_16bit<T> ? blocks_that_fit(PrepareShape<T, C, Kind != 0>::bytes, (Whole ? 128 : 64) / C) : 1))
void prepare(const T* q, const T* k, const T* v, const void* g, i32 g_is_float, const void* beta, i32 beta_is_float,
             const float* A_log, const float* dt_bias, float lower_bound, i32 beta_kind, i32 qk_norm, float scale,
             const Chunk* chunks, i32 H, i32 HV, i32 K, i32 V, T* Aqk, T* U, T* W, T* Kg, T* Qg, float* decay, T* A_out,
             float* Gamma, T* qn, T* kn, float* beta_used) {
    VK_DYN_SHARED(shared);
    constexpr bool Gated = Kind != 0;
    using S = PrepareShape<T, C, Gated>;
    using E = typename S::E;
    constexpr int ld = S::ld, ldm = S::ldm, lda = pitch<T>(C), blocks = C / 16, groups = C / 8, threads = S::threads;
    E* const operands = reinterpret_cast<E*>(shared);
    float* const totals = reinterpret_cast<float*>(shared + S::totals);  // [2][groups][64]
    float* const sbeta = reinterpret_cast<float*>(shared + S::vectors);  // beta, 1/|q|, 1/|k|

    const int head = bidx() % HV, chunk_index = bidx() / HV, share = HV / H;
    const Chunk chunk = chunks[chunk_index];
    if (chunk.rows == 0) return;
    const int rows = chunk.rows;
    // Inside a chunk offsets fit 32 bits, its start needs 64.
    const int strideQ = H * K, strideK = HV * K;
    const i64 rowQ = chunk.token * strideQ + head / share * K, rowK = chunk.token * strideK + head * K;
    const Gate gate{g, A_log, dt_bias, lower_bound, Kind, g_is_float};
    const int group = warp(), block = group / 2, half = group % 2, first_row = 8 * group, alive = rows - first_row;

    if (tid() < C) {
        const int r = tid();
        const i64 rowB = chunk.token * HV + head;
        const float b = r < rows ? write_strength(load_either<T>(beta, rowB + r * HV, beta_is_float), beta_kind) : 0.f;
        sbeta[r] = b;
        if (beta_used && r < rows) beta_used[rowB + r * HV] = b;
    }
    if (qk_norm)
#pragma unroll 1
        for (int i = 0; i < 2; ++i)
            inverse_norms<Whole>(sbeta + (1 + i) * C + first_row, (i ? k : q) + rowQ + first_row * strideQ, strideQ, alive, K);
    if (qk_norm) syncwarp();  // a warp reads the norms of its own rows; beta is read many barriers later

    typename Intra<Gated, T, C>::type products;
    products.clear();
#pragma unroll 1
    for (int slice = 0; slice < K; slice += 64) {
        const int channel = slice + 2 * lane(), left = K - channel, live = left > 0 ? alive : 0;
        const int count = Whole ? 2 : left;  // whole rows have both channels of a lane or none
        const i64 atQ = rowQ + first_row * strideQ + channel, atK = rowK + first_row * strideK + channel;
        RowGroup<T> x;
        float rate = 0.f, bias[2] = {0.f, 0.f};
        if constexpr (Gated) {
            rate = gate_rate(gate, head);
            if (Kind != gate_log && dt_bias)
                for (int j = 0; j < min(left, 2); ++j) bias[j] = dt_bias[head * K + channel + j];
        }
        {
            const T* const pq = q + atQ;
            const T* const pk = k + atQ;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x.q[i] = load_pair<Whole>(pq + i * strideQ, i < live ? count : 0);
                x.k[i] = load_pair<Whole>(pk + i * strideQ, i < live ? count : 0);
            }
        }
        if constexpr (Gated) {
            pair32 raw[8];
            if (g_is_float) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    // Registers are short, and this way NVRTC 13.5 spills nothing of either kind.
                    const int row = i * (Kind == gate_log ? strideK : anew(strideK));
                    raw[i] = load_pair<Whole>(static_cast<const float*>(g) + atK + row, i < live ? count : 0);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    raw[i] = unpack<T>(load_pair<Whole>(static_cast<const T*>(g) + atK + i * strideK, i < live ? count : 0));
            }
            float sum[2] = {0.f, 0.f};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x.fall[i][0] = i < live ? log_decay<T>(gate, raw[i].x, rate, bias[0]) : 0.f;
                x.fall[i][1] = i < live && (Whole || count > 1) ? log_decay<T>(gate, raw[i].y, rate, bias[1]) : 0.f;
                sum[0] += x.fall[i][0];
                sum[1] += x.fall[i][1];
            }
            float* const to = totals + slice / 64 % 2 * groups * 64 + 2 * (anew(tid()) % warp_size) + 64 * group;
            to[0] = sum[0];
            to[1] = sum[1];
        }
        if (qk_norm) {
            const float* const norm = sbeta + C + first_row;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const pair32 y = unpack<T>(x.q[i]), z = unpack<T>(x.k[i]);
                if (i < live) {
                    x.q[i] = round_pair<T>(y.x * norm[i], y.y * norm[i]);
                    x.k[i] = round_pair<T>(z.x * norm[C + i], z.y * norm[C + i]);
                }
            }
            if (qn && kn && head % share == 0)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    store_pair<Whole>(qn + atQ + i * strideQ, x.q[i], i < live ? count : 0);
                    store_pair<Whole>(kn + atQ + i * strideQ, x.k[i], i < live ? count : 0);
                }
        }
        if constexpr (Gated) {
            float dot[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const pair32 u = unpack<T>(x.q[i]), w = unpack<T>(x.k[i]);
                dot[i] = fma(u.x, w.x, u.y * w.y);
            }
            products.diagonal += sum_lanes(dot);
        }
        sync();  // totals are known; operands of the slice before have been read
        if constexpr (Gated) {
            // log decay of row group i at total[64 i]
            const float* const total = totals + slice / 64 % 2 * groups * 64 + 2 * (anew(tid()) % warp_size);
            float before[2] = {0.f, 0.f};  // sum over this chunk's rows before this group's
#pragma unroll
            for (int i = 0; i < groups; ++i)
                if (i < group) before[0] += total[64 * i], before[1] += total[64 * i + 1];
            if (Gamma) {
                constexpr float unit = log2_e / log_unit<T>;
                float sum[2] = {before[0], before[1]};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sum[0] += x.fall[i][0], sum[1] += x.fall[i][1];
                    store_pair<Whole>(Gamma + atK + i * strideK, pair32{sum[0] * unit, sum[1] * unit}, i < live ? count : 0);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) x.fall[i][j] = Fall<T>::of(x.fall[i][j]);

            E* const tile = operands + 48 * block * ld;  // of one level; the next one's follows
            E* const mine = tile + 2 * lane();
            x.template level<1>(mine, ld, half);
            x.template level<2>(mine + 24 * ld, ld, half);
            sync();
            products.add_inside(0, tile, ld);
            products.add_inside(1, tile + 24 * ld, ld);
            sync();
            x.template level<4>(mine, ld, half);
            x.template level<8>(mine + 24 * ld, ld, half);
            sync();
            products.add_inside(2, tile, ld);
            products.add_inside(3, tile + 24 * ld, ld);
            sync();

            E* const sq = operands;
            E* const sk = sq + (C - 16) * ld;
            E* const scolumns = sk + (C - 16) * ld;
            {
                const float e0 = exp_decay<T>(before[0]), e1 = exp_decay<T>(before[1]);
                const float start0 = to_operand<T>(half ? exp_decay<T>(total[64 * (group - half)]) : 1.f);
                const float start1 = to_operand<T>(half ? exp_decay<T>(total[64 * (group - half) + 1]) : 1.f);
                E* const row_q = sq + (first_row - 16) * ld + 2 * lane();
                E* const row_k = sk + (first_row - 16) * ld + 2 * lane();
                Fall<T> f0, f1;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    f0.then(x.fall[i][0]), f1.then(x.fall[i][1]);
                    const pair32 u = unpack<T>(x.q[i]), w = unpack<T>(x.k[i]);
                    const float q0 = u.x * f0.value(), q1 = u.y * f1.value(), k0 = w.x * f0.value(), k1 = w.y * f1.value();
                    if (block > 0) {
                        *reinterpret_cast<pair32*>(row_q + i * ld) = pair32{q0 * start0, q1 * start1};
                        *reinterpret_cast<pair32*>(row_k + i * ld) = pair32{k0 * start0, k1 * start1};
                    }
                    const int n = i < live ? count : 0;
                    store_pair<Whole>(Qg + atK + i * strideK, round_pair<T>(scale * q0 * e0, scale * q1 * e1), n);
                    const float b = sbeta[first_row + i];
                    store_pair<Whole>(W + atK + i * strideK, round_pair<T>(b * (k0 * e0), b * (k1 * e1)), n);
                }
                // exp gC. In float calls it is the factor of W's last row to the bit: with beta near 1 all but 1 - beta of one
                // cancels the other. 16-bit calls round W, and a state that lives long needs each of its factors exact.
                if (decay && group == (rows - 1) / 8) {
                    float* const to = decay + i64(bidx()) * K + channel;
                    if (left > 0) to[0] = is_16bit<T> ? exp2_close(before[0] + total[64 * group]) : f0.value() * e0;
                    if (left > 1) to[1] = is_16bit<T> ? exp2_close(before[1] + total[64 * group + 1]) : f1.value() * e1;
                }
            }
            {
                const int l = anew(tid()) % warp_size, channel = slice + 2 * l, live = channel < K ? alive : 0;
                const i64 atK = rowK + first_row * strideK + channel;
                const float* const total = totals + slice / 64 % 2 * groups * 64 + 2 * l;
                // after: sum over the rows after this group's; gap[d]: over those before the block d later.
                float after[2] = {0.f, 0.f}, gap[max(blocks, 2)][2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (!half) after[j] = total[64 * (group + 1) + j];
#pragma unroll
                    for (int d = 1; d < blocks; ++d) {
                        gap[d][j] = to_operand<T>(exp_decay<T>(after[j]));
                        if (block + d < blocks) after[j] += total[128 * (block + d) + j] + total[128 * (block + d) + 64 + j];
                    }
                }
                const float t0 = exp_decay<T>(after[0]), t1 = exp_decay<T>(after[1]);
                Fall<T> f0, f1;
#pragma unroll
                for (int i = 7; i >= 0; --i) {
                    const pair32 w = unpack<T>(x.k[i]);
                    const float k0 = w.x * f0.value(), k1 = w.y * f1.value();
                    store_pair<Whole>(Kg + atK + i * strideK, round_pair<T>(k0 * t0, k1 * t1), i < live ? count : 0);
#pragma unroll
                    for (int d = 1; d < blocks; ++d)
                        if (block + d < blocks) {
                            const int r = 16 * IntraProducts<T, C>::pair_of(block, d) + 8 * half + i;
                            *reinterpret_cast<pair32*>(scolumns + r * ld + 2 * l) = pair32{k0 * gap[d][0], k1 * gap[d][1]};
                        }
                    f0.then(x.fall[i][0]), f1.then(x.fall[i][1]);
                }
            }
            sync();
            products.add_below(sq, sk, scolumns, ld);
        } else {
            E* const sq = operands;
            E* const sk = sq + C * ld;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                *reinterpret_cast<Pair<T>*>(sq + (first_row + i) * ld + 2 * lane()) = x.q[i];
                *reinterpret_cast<Pair<T>*>(sk + (first_row + i) * ld + 2 * lane()) = x.k[i];
                const pair32 w = unpack<T>(x.k[i]);
                const float b = sbeta[first_row + i];
                store_pair<Whole>(W + atK + i * strideK, round_pair<T>(b * w.x, b * w.y), i < live ? count : 0);
            }
            if (Kg && Qg)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const pair32 u = unpack<T>(x.q[i]);
                    store_pair<Whole>(Kg + atK + i * strideK, x.k[i], i < live ? count : 0);
                    store_pair<Whole>(Qg + atK + i * strideK, round_pair<T>(scale * u.x, scale * u.y), i < live ? count : 0);
                }
            sync();
            products.add(sq, sk, ld);
        }
    }
    sync();

    float* const sM = reinterpret_cast<float*>(shared);
    float* const sA = reinterpret_cast<float*>(shared + S::square);
    T* const sAqk = reinterpret_cast<T*>(sA);
    T* const sAt = reinterpret_cast<T*>(sM);
    T* const sx = reinterpret_cast<T*>(shared + S::x + warp() * S::own);
    const int strideV = HV * V, strideC = HV * C;
    const i64 rowV = chunk.token * strideV + head * V, rowC = chunk.token * strideC + head * C;

    // Each warp multiplies columns of diag(beta) V, then of diag(beta) exp Gamma * K, which lie where W will.
    const int v_units = ceil_div(V, S::width), units = v_units + ceil_div(K, S::width);
    auto load_columns = [&](int unit) {
        const bool of_v = unit < v_units;
        const int column = (of_v ? unit : unit - v_units) * S::width;
        load_pieces<Whole, T, C, S::width>(sx, S::ldx, (of_v ? v + rowV : W + rowK) + column, of_v ? strideV : strideK, rows,
                                  (of_v ? V : K) - column, lane(), 32);
        cp_async_commit();
    };
    if (warp() < units) load_columns(warp());  // while A is found

    // M = diag(beta) L, and Aqk on its way out
#pragma unroll 1
    for (int p = tid(); p < C * lda / vec<T>; p += threads) st128(sAqk + p * vec<T>, u128{{0, 0, 0, 0}});
    sync();
    products.store(
        [&](int of_l, int i, int j, float x) {
            if (of_l) sM[i * ldm + j] = sbeta[i] * x;
            else sAqk[i * lda + j] = from_float<T>(scale * x);
        },
        [&](int of_l, int i, int j, float x, float y) {
            if (of_l) *reinterpret_cast<pair32*>(sM + i * ldm + j) = pair32{sbeta[i] * x, sbeta[i] * y};
            else *reinterpret_cast<Pair<T>*>(sAqk + i * lda + j) = round_pair<T>(scale * x, scale * y);
        });
    sync();
    store_tile<T, C, C, true>(Aqk + rowC, strideC, sAqk, lda, rows, C, tid(), threads);
    sync();
    invert<T, C>(sA, sM, ldm);
    sync();
#pragma unroll 1
    for (int p = tid(); p < C * C / vec<T>; p += threads) {
        const int i = p * vec<T> / C, j = p * vec<T> % C;
        float a[vec<T>];
#pragma unroll
        for (int e = 0; e < vec<T>; ++e) a[e] = j + e <= i ? sA[i * ldm + j + e] : 0.f;
        const u128 x = pack<T>(a);
        st128(sAt + i * lda + j, x);
        if (A_out && i < rows) store_piece(A_out + rowC + i * strideC + j, x, vec<T>);
    }
    sync();
#pragma unroll 1
    for (int unit = warp(); unit < units; unit += groups) {
        if (unit >= groups) load_columns(unit);
        cp_async_wait<0>();
        syncwarp();
        const bool of_v = unit < v_units;
        if (of_v) {
            scale_tile<T, C, S::width>(sx, S::ldx, lane(), 32, [&](int r, int, float (&y)[vec<T>]) {
#pragma unroll
                for (int i = 0; i < vec<T>; ++i) y[i] *= sbeta[r];
            });
            syncwarp();
        }
        float acc[blocks][S::width / 8][4];
        clear(acc);
        lower_product<T, C, S::width>(acc, sAt, sx, S::ldx);
        syncwarp();
        store_acc<T>(sx, S::ldx, acc);
        syncwarp();
        const int column = (of_v ? unit : unit - v_units) * S::width;
        store_tile<T, C, S::width, Whole>((of_v ? U + rowV : W + rowK) + column, of_v ? strideV : strideK, sx, S::ldx, rows,
                                   (of_v ? V : K) - column, lane(), 32);
        syncwarp();
    }
}

}  // namespace vk
