// Everything of the forward that needs no state, one block per (chunk, value head):
//
//     Gamma = inclusive cumsum of g inside the chunk             gC = its last row
//     Aqk_ij = M_ij  sum_d scale Q_id K_jd exp(Gamma_id - Gamma_jd)
//     L_ij   = M1_ij sum_d K_id K_jd exp(Gamma_id - Gamma_jd)    A = (I + diag(beta) L)^-1
//     U = A diag(beta) V              W = A diag(beta) (exp Gamma * K)
//     Kg = exp(gC - Gamma) * K        Qg = scale exp Gamma * Q
//
// Channels come in slices of 64. For a slice each warp keeps one block of 16 rows in registers, two channels to a lane,
// and writes from there every operand of intra.cuh, Kg, Qg, and into W's place exp Gamma * K; once A is known, each warp
// multiplies columns of that and of V. beta goes into the columns of A before A is rounded, so V enters exact.
#include "chunks.cuh"
#include "gate.cuh"
#include "intra.cuh"
#include "inverse.cuh"
#include "tile_store.cuh"

namespace vk {

template <class T, int C> struct PrepareShape {
    static constexpr int blocks = C / 16, pairs = blocks * (blocks - 1) / 2;
    static constexpr int ld = pitch<T>(64), ldm = C + 8, width = 32, ldx = pitch<T>(width);
    // operands: q and k of all blocks but the first and one block per pair with a gate, q and k of all blocks without
    static constexpr int rows = max(2 * (C - 16) + 16 * pairs, 2 * C), scratch = 24 * blocks;
    static constexpr int operands = (rows + scratch) * ld * int(sizeof(T)), square = C * ldm * 4;
    static constexpr int squares = max(operands, 2 * square);  // M and A follow where operands were
    static constexpr int own = C * ldx * int(sizeof(T));       // columns of V or exp Gamma * K, per warp
    // Float calls put them behind A diag(beta), which takes M's place.
    static constexpr int x = is_16bit<T> ? squares : 2 * square;
    static constexpr int totals = max(x + 4 * own, squares), vectors = totals + 2 * blocks * 64 * 4;
    static constexpr int bytes = vectors + 3 * C * 4;
};

// acc[16-row block][...] += lower triangle of Ab times columns of X.
template <class T, int C, int Columns, int First = 0>
VK_DEVICE void lower_product(float (&acc)[C / 16][Columns / 8][4], const T* Ab, const T* X, int ldx) {
    if constexpr (First < C / 16) {
        constexpr int M = C - 16 * First;
        auto& rest = *reinterpret_cast<float (*)[M / 16][Columns / 8][4]>(acc + First);
        warp_mma<T, M, Columns, 16>(rest, Ab + 16 * First * pitch<T>(C) + 16 * First, pitch<T>(C), X + 16 * First * ldx, ldx);
        lower_product<T, C, Columns, First + 1>(acc, Ab, X, ldx);
    }
}

// Tokens are rows of q, k [tokens,H,K], v [tokens,HV,V], g [tokens,HV,K], beta [tokens,HV]; g and beta in T or float.
// Out: Aqk [tokens,HV,C] (0 above the diagonal), U [tokens,HV,V], W [tokens,HV,K]. Out, each may be null: Kg, Qg
// [tokens,HV,K], decay = exp gC [chunks,HV,K], A [tokens,HV,C], Gamma [tokens,HV,K] in log2 units, qn, kn [tokens,H,K]
// after the norm, beta_used [tokens,HV].
template <class T, int C, bool Gated>
VK_KERNEL_BOUNDS(128, is_16bit<T> ? 3 : 1)
void prepare(const T* q, const T* k, const T* v, const void* g, i32 g_is_float, const void* beta, i32 beta_is_float,
             const float* A_log, const float* dt_bias, float lower_bound, i32 gate_kind, i32 beta_kind, i32 qk_norm,
             float scale, const Chunk* chunks, i32 H, i32 HV, i32 K, i32 V, T* Aqk, T* U, T* W, T* Kg, T* Qg,
             float* decay, T* A_out, float* Gamma, T* qn, T* kn, float* beta_used) {
    VK_DYN_SHARED(shared);
    using S = PrepareShape<T, C>;
    constexpr int ld = S::ld, ldm = S::ldm, lda = pitch<T>(C), blocks = C / 16;
    T* const sq = reinterpret_cast<T*>(shared);
    T* const sk = sq + (Gated ? C - 16 : C) * ld;
    T* const scolumns = sk + (C - 16) * ld;
    T* const scratch = sq + (S::rows + 24 * (warp() % blocks)) * ld;
    float* const sM = reinterpret_cast<float*>(shared);
    float* const sA = reinterpret_cast<float*>(shared + S::square);
    T* const sAqk = reinterpret_cast<T*>(sA);
    T* const sAb = reinterpret_cast<T*>(sM);
    T* const sx = reinterpret_cast<T*>(shared + S::x + warp() * S::own);
    float* const totals = reinterpret_cast<float*>(shared + S::totals);  // [2][blocks][64]
    float* const sbeta = reinterpret_cast<float*>(shared + S::vectors);  // beta, 1/|q|, 1/|k|

    const int head = bidx() % HV, chunk_index = bidx() / HV, group = HV / H;
    const Chunk chunk = chunks[chunk_index];
    if (chunk.rows == 0) return;
    const int rows = chunk.rows;
    const i64 strideQ = i64(H) * K, strideK = i64(HV) * K, strideV = i64(HV) * V, strideC = i64(HV) * C;
    const i64 rowQ = chunk.token * strideQ + i64(head / group) * K, rowK = chunk.token * strideK + i64(head) * K;
    const i64 rowV = chunk.token * strideV + i64(head) * V, rowC = chunk.token * strideC + i64(head) * C;
    const i64 rowB = chunk.token * HV + head;
    const bool owner = head % group == 0;  // of what is shared by the group
    const Gate gate{g, A_log, dt_bias, lower_bound, gate_kind, g_is_float};

    auto load_columns = [&](const T* X, i64 row, i64 stride, int column, int columns) {
        load_tile<T, C, S::width>(sx, S::ldx, X + row + column, stride, rows, columns - column, lane(), 32);
        cp_async_commit();
    };
    if (is_16bit<T> && S::width * warp() < V) load_columns(v, rowV, strideV, S::width * warp(), V);  // long before they are needed

    for (int r = tid(); r < C; r += 128) {
        const float b = r < rows ? write_strength(load_either<T>(beta, rowB + i64(r) * HV, beta_is_float), beta_kind) : 0.f;
        sbeta[r] = b;
        if (beta_used && r < rows) beta_used[rowB + i64(r) * HV] = b;
    }
    if (qk_norm)
        for (int r = warp(); r < rows; r += 4) {
            const float nq = inverse_norm(q + rowQ + r * strideQ, K), nk = inverse_norm(k + rowQ + r * strideQ, K);
            if (lane() == 0) sbeta[C + r] = nq, sbeta[2 * C + r] = nk;
        }
    sync();

    typename Intra<Gated, T, C>::type products;
    products.clear();
    // One access for two channels needs every row to start at an even element.
    const bool even = K % 2 == 0 && pair_aligned<T>(q) && pair_aligned<T>(k) && pair_aligned<T>(W) && pair_aligned<T>(Kg) &&
                      pair_aligned<T>(Qg) && pair_aligned<T>(qn) && pair_aligned<T>(kn) && pair_aligned<T>(g);
    const bool even_g = g_is_float ? K % 2 == 0 && pair_aligned<float>(g) : even;
    const int block = warp(), first_row = 16 * block, alive = block < blocks ? min(16, rows - first_row) : 0;

#pragma unroll 1
    for (int slice = 0; slice < K; slice += 64) {
        const int channel = slice + 2 * lane(), count = K - channel;
        const i64 atQ = rowQ + first_row * strideQ + channel, atK = rowK + first_row * strideK + channel;
        float* const total = totals + slice / 64 % 2 * blocks * 64 + 2 * lane();  // of this lane's channels, [blocks] apart 64
        RowBlock<T> x;
        if (block < blocks) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                x.q[i] = load_pair<T>(q + atQ + i * strideQ, i < alive ? count : 0, even);
                x.k[i] = load_pair<T>(k + atQ + i * strideQ, i < alive ? count : 0, even);
            }
            if constexpr (Gated) {
                const float rate = gate_rate(gate, head);
                float bias[2] = {0.f, 0.f};
                if (dt_bias)
                    for (int j = 0; j < min(count, 2); ++j) bias[j] = dt_bias[i64(head) * K + channel + j];
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const int n = i < alive ? count : 0;
                    const pair32 y = g_is_float ? load_pair<float>(static_cast<const float*>(g) + atK + i * strideK, n, even_g)
                                                : unpack<T>(load_pair<T>(static_cast<const T*>(g) + atK + i * strideK, n, even));
                    x.fall[i][0] = n > 0 ? log2_decay(gate, y.x, rate, bias[0]) : 0.f;
                    x.fall[i][1] = n > 1 ? log2_decay(gate, y.y, rate, bias[1]) : 0.f;
                }
                float sum[2] = {0.f, 0.f};
#pragma unroll
                for (int i = 0; i < 16; ++i) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        sum[j] += x.fall[i][j];
                        x.fall[i][j] = Fall<T>::of(x.fall[i][j]);
                    }
                    if (Gamma && i < alive) store_pair<float>(Gamma + atK + i * strideK, pair32{sum[0], sum[1]}, count, false);
                }
                total[64 * block] = sum[0];
                total[64 * block + 1] = sum[1];
            }
            if (qk_norm) {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const int r = first_row + i;
                    if (i >= alive) continue;
                    const pair32 y = unpack<T>(x.q[i]), z = unpack<T>(x.k[i]);
                    x.q[i] = round_pair<T>(y.x * sbeta[C + r], y.y * sbeta[C + r]);
                    x.k[i] = round_pair<T>(z.x * sbeta[2 * C + r], z.y * sbeta[2 * C + r]);
                    if (owner && qn) store_pair<T>(qn + atQ + i * strideQ, x.q[i], count, even);
                    if (owner && kn) store_pair<T>(kn + atQ + i * strideQ, x.k[i], count, even);
                }
            }
        }
        sync();  // totals are known; operands of the slice before have been read
        if (block < blocks) {
            if constexpr (Gated) {
                products.add_inside(x, scratch, ld);
                float before[2] = {0.f, 0.f}, after[2] = {0.f, 0.f}, gap[blocks][2];  // gap[d]: blocks between this and d later
#pragma unroll
                for (int j = 0; j < 2; ++j) {
#pragma unroll
                    for (int b = 0; b < blocks; ++b)
                        if (b < block) before[j] += total[64 * b + j];
#pragma unroll
                    for (int d = 1; d < blocks; ++d) {
                        gap[d][j] = exp2(after[j]);
                        if (block + d < blocks) after[j] += total[64 * (block + d) + j];
                    }
                }
                if (Gamma)
#pragma unroll
                    for (int i = 0; i < 16; ++i)
                        if (i < alive)
                            for (int j = 0; j < min(count, 2); ++j) Gamma[atK + i * strideK + j] += before[j];
                if (decay && block == 0)
                    for (int j = 0; j < min(count, 2); ++j)
                        decay[(i64(chunk_index) * HV + head) * K + channel + j] = exp2(total[j] + after[j]);
                const float e0 = exp2(before[0]), e1 = exp2(before[1]);
                Fall<T> f0, f1;
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    f0.then(x.fall[i][0]), f1.then(x.fall[i][1]);
                    const pair32 u = unpack<T>(x.q[i]), w = unpack<T>(x.k[i]);
                    const float q0 = u.x * f0.value(), q1 = u.y * f1.value(), k0 = w.x * f0.value(), k1 = w.y * f1.value();
                    if (block > 0) {
                        *reinterpret_cast<Pair<T>*>(sq + (first_row - 16 + i) * ld + 2 * lane()) = round_pair<T>(q0, q1);
                        *reinterpret_cast<Pair<T>*>(sk + (first_row - 16 + i) * ld + 2 * lane()) = round_pair<T>(k0, k1);
                    }
                    if (i < alive) {
                        store_pair<T>(Qg + atK + i * strideK, round_pair<T>(scale * q0 * e0, scale * q1 * e1), count, even);
                        store_pair<T>(W + atK + i * strideK, round_pair<T>(k0 * e0, k1 * e1), count, even);
                    }
                }
                const float t0 = exp2(after[0]), t1 = exp2(after[1]);
                f0 = f1 = Fall<T>{};
#pragma unroll
                for (int i = 15; i >= 0; --i) {
                    const pair32 w = unpack<T>(x.k[i]);
                    const float k0 = w.x * f0.value(), k1 = w.y * f1.value();
#pragma unroll
                    for (int d = 1; d < blocks; ++d) {
                        if (block + d >= blocks) continue;
                        const int pair = IntraProducts<T, C>::pair_of(block, d);
                        *reinterpret_cast<Pair<T>*>(scolumns + (16 * pair + i) * ld + 2 * lane()) =
                            round_pair<T>(k0 * gap[d][0], k1 * gap[d][1]);
                    }
                    if (i < alive) store_pair<T>(Kg + atK + i * strideK, round_pair<T>(k0 * t0, k1 * t1), count, even);
                    f0.then(x.fall[i][0]), f1.then(x.fall[i][1]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const int r = first_row + i;
                    *reinterpret_cast<Pair<T>*>(sq + r * ld + 2 * lane()) = x.q[i];
                    *reinterpret_cast<Pair<T>*>(sk + r * ld + 2 * lane()) = x.k[i];
                    if (i >= alive) continue;
                    store_pair<T>(W + atK + i * strideK, x.k[i], count, even);
                    if (Kg) store_pair<T>(Kg + atK + i * strideK, x.k[i], count, even);
                    const pair32 u = unpack<T>(x.q[i]);
                    if (Qg) store_pair<T>(Qg + atK + i * strideK, round_pair<T>(scale * u.x, scale * u.y), count, even);
                }
            }
        }
        sync();
        if constexpr (Gated) products.add_below(sq, sk, scolumns, ld);
        else products.add(sq, sk, ld);
    }
    sync();

    // M = diag(beta) L, and Aqk on its way out
    for (int p = tid(); p < C * lda / vec<T>; p += 128) st128(sAqk + p * vec<T>, u128{{0, 0, 0, 0}});
    sync();
    products.store([&](int i, int j, float x) { sAqk[i * lda + j] = from_float<T>(scale * x); },
                   [&](int i, int j, float x) { sM[i * ldm + j] = sbeta[i] * x; });
    sync();
    store_tile<T, C, C>(Aqk + rowC, strideC, sAqk, lda, rows, C, tid(), 128);
    sync();
    invert<T, C>(sA, sM, ldm);
    sync();
    for (int p = tid(); p < C * C / vec<T>; p += 128) {
        const int i = p * vec<T> / C, j = p * vec<T> % C;
        float a[vec<T>], ab[vec<T>];
#pragma unroll
        for (int e = 0; e < vec<T>; ++e) {
            a[e] = j + e <= i ? sA[i * ldm + j + e] : 0.f;
            ab[e] = a[e] * sbeta[j + e];
        }
        st128(sAb + i * lda + j, pack<T>(ab));
        if (A_out && i < rows) store_piece(A_out + rowC + i * strideC + j, pack<T>(a), vec<T>);
    }
    sync();

    // Each warp has its own columns from here on.
    auto multiply = [&](T* Y, i64 row, i64 stride, int column, int columns) {
        cp_async_wait<0>();
        syncwarp();
        float acc[blocks][S::width / 8][4];
        clear(acc);
        lower_product<T, C, S::width>(acc, sAb, sx, S::ldx);
        syncwarp();
        store_acc<T>(sx, S::ldx, acc);
        syncwarp();
        store_tile<T, C, S::width>(Y + row + column, stride, sx, S::ldx, rows, columns - column, lane(), 32);
        syncwarp();
    };
#pragma unroll 1
    for (int column = S::width * warp(); column < V; column += 4 * S::width) {
        if (!is_16bit<T> || column >= 4 * S::width) load_columns(v, rowV, strideV, column, V);
        multiply(U, rowV, strideV, column, V);
    }
#pragma unroll 1
    for (int column = S::width * warp(); column < K; column += 4 * S::width) {
        load_columns(W, rowK, strideK, column, K);
        multiply(W, rowK, strideK, column, K);
    }
}

}  // namespace vk
