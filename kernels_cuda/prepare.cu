// Everything of the forward that needs no state, one block per (chunk, value head):
//
//     Gamma = inclusive cumsum of g inside the chunk             gC = its last row
//     Aqk_ij = M_ij  sum_d scale Q_id K_jd exp(Gamma_id - Gamma_jd)
//     L_ij   = M1_ij sum_d K_id K_jd exp(Gamma_id - Gamma_jd)    A = (I + diag(beta) L)^-1
//     U = A diag(beta) V              W = A diag(beta) (exp Gamma * K)
//     Kg = exp(gC - Gamma) * K        Qg = scale exp Gamma * Q
//
// beta goes into the columns of A before A is rounded, so that U = round(A diag(beta)) V has V exact.
#include "chunks.cuh"
#include "gate.cuh"
#include "intra.cuh"
#include "inverse.cuh"
#include "tile_store.cuh"

namespace vk {

// Channels are taken in NS slices of KS; with one slice the tiles stay in shared memory until W, with more they are read
// and gated again, so that K = 256 in float fits the 99 KB of sm_120.
template <class T, int C, int KP> struct PrepareShape {
    static constexpr int KS = is_16bit<T> && KP == 128 ? 128 : 64;
    static constexpr int NS = KP / KS;
    static_assert(KP % KS == 0, "KP is 64, 128 or 256");
    static constexpr int ld = KS + 16, ldm = C + 4;
    static constexpr int tile = C * ld * int(sizeof(T)), sums = C * ld * 4, square = C * ldm * 4;
    static constexpr int operands = is_16bit<T> ? 0 : 4 * 3 * 16 * 20 * 4;
    static constexpr int k = tile, c = 2 * tile;
    static constexpr int M = NS == 1 ? c : c + sums;             // one slice: c is dead when M is written
    static constexpr int A = M + square;
    static constexpr int scratch = NS == 1 ? c + sums : M;       // operands are dead when M is written
    static constexpr int rows = max(A + square, scratch + operands);
    static constexpr int bytes = max(rows, c + sums) + 3 * C * 4;
    static constexpr int blocks_per_sm = is_16bit<T> ? 3 : 2;
};

// acc[16-row block][...] += lower triangle of Ab times this warp's columns of X.
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
// Out: Aqk [tokens,HV,C] (0 above the diagonal), U [tokens,HV,V], W, Kg, Qg [tokens,HV,K], decay = exp gC [chunks,HV,K].
// Out, each may be null: A [tokens,HV,C], Gamma [tokens,HV,K] in log2 units, qn, kn [tokens,H,K] after the norm,
// beta_used [tokens,HV]; without a gate Kg, Qg, decay too.
template <class T, int C, int KP, bool Gated>
VK_KERNEL_BOUNDS(128, (PrepareShape<T, C, KP>::blocks_per_sm))
void prepare(const T* q, const T* k, const T* v, const void* g, i32 g_is_float, const void* beta, i32 beta_is_float,
             const float* A_log, const float* dt_bias, float lower_bound, i32 gate_kind, i32 beta_kind, i32 qk_norm,
             float scale, const Chunk* chunks, i32 H, i32 HV, i32 K, i32 V, T* Aqk, T* U, T* W, T* Kg, T* Qg,
             float* decay, T* A_out, float* Gamma, T* qn, T* kn, float* beta_used) {
    VK_DYN_SHARED(shared);
    using S = PrepareShape<T, C, KP>;
    constexpr int KS = S::KS, ld = S::ld, ldm = S::ldm, blocks = C / 16, pieces = KS / vec<T>;
    T* const sq = reinterpret_cast<T*>(shared);
    T* const sk = reinterpret_cast<T*>(shared + S::k);
    float* const sc = reinterpret_cast<float*>(shared + S::c);
    float* const sM = reinterpret_cast<float*>(shared + S::M);
    float* const sA = reinterpret_cast<float*>(shared + S::A);
    float* const sb = reinterpret_cast<float*>(shared + S::bytes - 3 * C * 4);  // beta, 1/|q|, 1/|k|
    T* const sAb = reinterpret_cast<T*>(sM);
    T* const sAqk = reinterpret_cast<T*>(sA);
    float* const scratch = reinterpret_cast<float*>(shared + S::scratch) + warp() * 3 * 16 * 20;

    const int head = bidx() % HV, chunk_index = bidx() / HV, group = HV / H;
    const Chunk chunk = chunks[chunk_index];
    if (chunk.rows == 0) return;
    const int rows = chunk.rows;
    // Row blocks cost more the lower they lie; a warp stays on one quarter of the SM, so blocks take them in turn.
    const int a = (warp() + bidx()) % 4;
    const i64 strideQ = i64(H) * K, strideK = i64(HV) * K, strideV = i64(HV) * V, strideC = i64(HV) * C;
    const i64 rowQ = chunk.token * strideQ + i64(head / group) * K, rowK = chunk.token * strideK + i64(head) * K;
    const i64 rowV = chunk.token * strideV + i64(head) * V, rowC = chunk.token * strideC + i64(head) * C;
    const i64 rowB = chunk.token * HV + head;
    const bool owner = head % group == 0;  // of what is shared by the group
    const Gate gate{g, A_log, dt_bias, lower_bound, gate_kind, g_is_float};

    for (int r = tid(); r < C; r += nthreads()) {
        const float b = r < rows ? write_strength(load_either<T>(beta, rowB + i64(r) * HV, beta_is_float), beta_kind) : 0.f;
        sb[r] = b;
        if (beta_used && r < rows) beta_used[rowB + i64(r) * HV] = b;
    }
    if (qk_norm)
        for (int r = warp(); r < rows; r += 4) {
            const float nq = inverse_norm(q + rowQ + r * strideQ, K), nk = inverse_norm(k + rowQ + r * strideQ, K);
            if (lane() == 0) sb[C + r] = nq, sb[2 * C + r] = nk;
        }

    // Tiles of slice s; all threads, ends with a barrier.
    auto load = [&](int s, bool first) {
        load_tile<T, C, KS>(sq, ld, q + rowQ + s * KS, strideQ, first ? rows : 0, K - s * KS, tid(), 128);
        load_tile<T, C, KS>(sk, ld, k + rowQ + s * KS, strideQ, rows, K - s * KS, tid(), 128);
        cp_async_commit();
        if constexpr (Gated) {
            const float rate = gate_rate(gate, head);
            for (int p = tid(); p < blocks * KS; p += 128) {
                const int d = p % KS, first_row = p / KS * 16, channel = s * KS + d;
                const float bias = dt_bias && channel < K ? dt_bias[i64(head) * K + channel] : 0.f;
                float x[16], sum = 0.f;
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const int r = first_row + i;
                    x[i] = r < rows && channel < K ? load_either<T>(g, rowK + r * strideK + channel, g_is_float) : 0.f;
                }
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const int r = first_row + i;
                    if (r < rows && channel < K) sum += log2_decay(gate, x[i], rate, bias);
                    sc[r * ld + d] = sum;
                }
            }
        }
        cp_async_wait<0>();
        sync();
        if (qk_norm) {
            for (int p = tid(); p < rows * pieces; p += 128) {
                const int r = p / pieces, d = p % pieces * vec<T>, count = K - s * KS - d;
                u128 x = ld128(sq + r * ld + d), y = ld128(sk + r * ld + d);
                float qx[vec<T>], kx[vec<T>];
#pragma unroll
                for (int i = 0; i < vec<T>; ++i) {
                    qx[i] = to_float(get<T>(x, i)) * sb[C + r];
                    kx[i] = to_float(get<T>(y, i)) * sb[2 * C + r];
                }
                x = pack<T>(qx), y = pack<T>(kx);
                st128(sq + r * ld + d, x);
                st128(sk + r * ld + d, y);
                if (first && owner && qn && count > 0) store_piece(qn + rowQ + r * strideQ + s * KS + d, x, count);
                if (first && owner && kn && count > 0) store_piece(kn + rowQ + r * strideQ + s * KS + d, y, count);
            }
            sync();
        }
    };

    // exp Gamma * K takes the place of q; first: Kg, Qg, Gamma and decay go out.
    auto scale_rows = [&](int s, bool first) {
        if (Gated && first)
            for (int d = tid(); d < min(KS, K - s * KS); d += 128) {
                float sum = 0.f;
                for (int b = 0; b < blocks; ++b) sum += sc[(16 * b + 15) * ld + d];
                decay[(i64(chunk_index) * HV + head) * K + s * KS + d] = exp2(sum);
            }
        for (int p = tid(); p < C * pieces; p += 128) {
            const int r = p / pieces, d = p % pieces * vec<T>, block = r / 16;
            const int count = r < rows ? K - s * KS - d : 0;
            const u128 x = ld128(sq + r * ld + d), y = ld128(sk + r * ld + d);
            float qx[vec<T>], kx[vec<T>], kw[vec<T>];
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) {
                qx[i] = to_float(get<T>(x, i)) * scale;
                kw[i] = kx[i] = to_float(get<T>(y, i));
            }
            if constexpr (Gated) {
                float sum[vec<T>];
#pragma unroll
                for (int i = 0; i < vec<T>; i += 4) {
                    float c[4], before[4] = {0.f, 0.f, 0.f, 0.f}, after[4] = {0.f, 0.f, 0.f, 0.f}, total[4];
                    load4(c, sc + r * ld + d + i);
#pragma unroll
                    for (int b = 0; b < blocks; ++b) {
                        load4(total, sc + (16 * b + 15) * ld + d + i);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            if (b < block) before[j] += total[j];
                            else after[j] += b == block ? total[j] - c[j] : total[j];
                        }
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        sum[i + j] = before[j] + c[j];
                        const float fall = exp2(sum[i + j]);
                        qx[i + j] *= fall;
                        kw[i + j] *= fall;
                        kx[i + j] *= exp2(after[j]);
                    }
                }
                if (Gamma && first)
#pragma unroll
                    for (int i = 0; i < vec<T>; i += 4) {
                        float four[4] = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
                        if (count > i) store_piece(Gamma + rowK + r * strideK + s * KS + d + i, pack<float>(four), count - i);
                    }
            }
            const i64 at = rowK + r * strideK + s * KS + d;
            if (first && Qg && count > 0) store_piece(Qg + at, pack<T>(qx), count);
            if (first && Kg && count > 0) store_piece(Kg + at, pack<T>(kx), count);
            st128(sq + r * ld + d, pack<T>(kw));
        }
    };

    typename Intra<Gated, T, C>::type products;
    products.clear();
#pragma unroll 1
    for (int s = 0; s < S::NS; ++s) {
        load(s, true);
        if (a < blocks) products.template add<KS>(a, sq, sk, ld, sc, ld, scratch);
        sync();
        scale_rows(s, true);
        sync();
    }

    // M = diag(beta) L, and Aqk on its way out
    for (int p = tid(); p < C * C; p += 128) sAqk[p / C * pitch<T>(C) + p % C] = from_float<T>(0.f);
    for (int p = tid(); p < C * C; p += 128) sM[p / C * ldm + p % C] = 0.f;
    sync();
    if (a < blocks)
        products.store(
            a, [&](int i, int j, float x) { sAqk[i * pitch<T>(C) + j] = from_float<T>(scale * x); },
            [&](int i, int j, float x) { sM[i * ldm + j] = sb[i] * x; });
    sync();
    store_tile<T, C, C>(Aqk + rowC, strideC, sAqk, pitch<T>(C), rows, C, tid(), 128);
    sync();
    invert<C>(sA, sM, ldm);
    sync();
    for (int p = tid(); p < C * C; p += 128) {
        const int i = p / C, j = p % C;
        const float x = j <= i ? sA[i * ldm + j] : 0.f;
        sAb[i * pitch<T>(C) + j] = from_float<T>(x * sb[j]);
        if (A_out && i < rows) A_out[rowC + i * strideC + j] = from_float<T>(x);
    }
    sync();

    // Each warp has its own columns from here on.
    constexpr int width = KS / 4;
    const int column = width * warp();
    T* const x = sq + column;
#pragma unroll 1
    for (int s = 0; s < S::NS; ++s) {
        if (S::NS > 1) {
            sync();
            load(s, false);
            scale_rows(s, false);
            sync();
        }
        float acc[blocks][width / 8][4];
        clear(acc);
        lower_product<T, C, width>(acc, sAb, x, ld);
        syncwarp();
        store_acc<T>(x, ld, acc);
        syncwarp();
        const int channel = s * KS + column;
        store_tile<T, C, width>(W + rowK + channel, strideK, x, ld, rows, K - channel, lane(), 32);
        syncwarp();
    }
#pragma unroll 1
    for (int channel = column; channel < V; channel += KS) {
        load_tile<T, C, width>(x, ld, v + rowV + channel, strideV, rows, V - channel, lane(), 32);
        cp_async_commit();
        cp_async_wait<0>();
        syncwarp();
        float acc[blocks][width / 8][4];
        clear(acc);
        lower_product<T, C, width>(acc, sAb, x, ld);
        syncwarp();
        store_acc<T>(x, ld, acc);
        syncwarp();
        store_tile<T, C, width>(U + rowV + channel, strideV, x, ld, rows, V - channel, lane(), 32);
        syncwarp();
    }
}

}  // namespace vk
