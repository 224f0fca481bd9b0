// Local part of the backward, before the gradients of q, k and g; one block per (chunk, value head):
//
//     dAqk = (dO Vnew^T) * M                                      M lower triangle with the diagonal
//     dV   = diag(beta) A^T dU                                    dbeta_v = rowsum(A^T dU * V)
//     dW   = -dU S^T                                              S: state at the start of the chunk
//     dA   = dU (diag(beta) V)^T + dW (diag(beta) exp Gamma * K)^T
//     X    = -(A^T dA A^T) * M1                                   M1 strict lower triangle
//
// Rounded to T: dW, diag(beta) V, diag(beta) exp Gamma * K, dA, A^T dA. dAqk and X stay in float32, because dg is
// a difference of their products. Only the strict lower triangle of dA reaches X: (A^T dA A^T)_ij with i > j sums dA_pq
// over p >= i > j >= q.
#include "backward_common.cuh"

namespace vk {

template <class T, int C> struct LocalShared {
    static constexpr int ld = pitch<T>(64);
    static constexpr int tile = 64 * ld;
    static constexpr int ldc = 68;  // of the local sums, which take the place of the first two tiles
    static constexpr int bytes = int(sizeof(T)) * (4 * tile + C * pitch<T>(C)) + 4 * 64 * 4;
};

// A, dU, Vnew, dO, v: [tokens,HV,.]; k [tokens,H,K], after the norm; S [chunks,HV,K,V]; beta float [tokens,HV], activated.
// gate: as prepare.cu has it. Out: dAqk, X float [tokens,HV,C], zero where masked; dW [tokens,HV,K]; dv [tokens,HV,V];
// dbeta_v float [tokens,HV]; dA [tokens,HV,C] or null.
template <class T, int C, bool Gated>
VK_KERNEL_BOUNDS(128, 2)
void backward_local(const T* A, const T* dU, const T* Vnew, const T* dO, const T* v, const T* k, const T* S,
                    const float* beta, const Chunk* chunks, Gate gate, float* dAqk, float* X, T* dW, T* dv,
                    float* dbeta_v, T* dA, i32 H, i32 HV, i32 K, i32 V) {
    VK_DYN_SHARED(shared);
    using L = LocalShared<T, C>;
    constexpr int ld = L::ld, lda = pitch<T>(C), NT_ = C / 8, W_ = Place<C>::width, Q_ = Place<C>::square;
    T* const x0 = reinterpret_cast<T*>(shared);
    T* const x1 = x0 + L::tile;
    T* const x2 = x1 + L::tile;
    T* const x3 = x2 + L::tile;
    T* const sA = x3 + L::tile;
    float* const sums = reinterpret_cast<float*>(sA + C * lda);  // [column groups][C]

    const int head = bidx() % HV, chunk = bidx() / HV;
    const Chunk c = chunks[chunk];
    if (c.rows == 0) return;  // past the last chunk
    const Place<C> at;
    const int sq = at.square_column();
    const bool square = warp() < Place<C>::square_warps;
    const i64 strideK = i64(HV) * K, strideV = i64(HV) * V, strideC = i64(HV) * C, strideQ = i64(H) * K;
    const i64 tokenV = c.token * strideV + i64(head) * V, tokenK = c.token * strideK + i64(head) * K;
    const i64 tokenC = c.token * strideC + i64(head) * C, tokenQ = c.token * strideQ + i64(head / (HV / H)) * K;
    const i64 tokenB = c.token * HV + head;
    const T* const s_chunk = S + (i64(chunk) * HV + head) * K * V;

    float b[2];  // beta of rows g and g + 8
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = at.row + lane() / 4 + 8 * i;
        b[i] = r < c.rows ? beta[tokenB + i64(r) * HV] : 0.f;
    }
    load_tile<T, C, C>(sA, lda, A + tokenC, strideC, c.rows, C, tid(), 128);

    float acc_qk[1][Q_ / 8][4], acc_a[1][Q_ / 8][4];
    clear(acc_qk);
    clear(acc_a);
    float db[2] = {0.f, 0.f};
    for (int v0 = 0; v0 < V; v0 += 64) {
        sync();
        load_tile<T, C, 64>(x0, ld, dO + tokenV + v0, strideV, c.rows, V - v0, tid(), 128);
        load_tile<T, C, 64>(x1, ld, Vnew + tokenV + v0, strideV, c.rows, V - v0, tid(), 128);
        load_tile<T, C, 64>(x2, ld, dU + tokenV + v0, strideV, c.rows, V - v0, tid(), 128);
        load_tile<T, C, 64>(x3, ld, v + tokenV + v0, strideV, c.rows, V - v0, tid(), 128);
        cp_async_commit();
        cp_async_wait<0>();
        sync();
        if (square) warp_mma<T, 16, Q_, 64, NT>(acc_qk, x0 + at.row * ld, ld, x1 + sq * ld, ld);
        float acc[1][NT_][4];
        clear(acc);
        for (int r = at.row; r < C; r += 16)  // A is lower triangular
            warp_mma<T, 16, W_, 16, TN>(acc, sA + r * lda + at.row, lda, x2 + r * ld + at.column, ld);
#pragma unroll
        for (int n = 0; n < NT_; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = acc[0][n][i];
                const int r = at.row + frag_row(lane(), i), col = at.column + 8 * n + frag_col(lane(), i);
                db[i / 2] = fma(x, to_float(x3[r * ld + col]), db[i / 2]);
                x *= b[i / 2];
            }
        store_fragment<T>(dv + tokenV + i64(at.row) * strideV + v0 + at.column, strideV, acc, c.rows - at.row,
                          V - v0 - at.column);
        sync();
        for (int p = tid(); p < C * 64 / vec<T>; p += 128) {
            const int r = p / (64 / vec<T>);
            T* const piece = x3 + r * ld + p % (64 / vec<T>) * vec<T>;
            const float br = r < c.rows ? beta[tokenB + i64(r) * HV] : 0.f;
            u128 x = ld128(piece);
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) set<T>(x, i, from_float<T>(br * to_float(get<T>(x, i))));
            st128(piece, x);
        }
        sync();
        if (square) warp_mma<T, 16, Q_, 64, NT>(acc_a, x2 + at.row * ld, ld, x3 + sq * ld, ld);
    }

    for (int k0 = 0; k0 < K; k0 += 64) {
        float acc[1][NT_][4];
        clear(acc);
        for (int v0 = 0; v0 < V; v0 += 64) {
            sync();
            load_tile<T, C, 64>(x0, ld, dU + tokenV + v0, strideV, c.rows, V - v0, tid(), 128);
            load_tile<T, 64, 64>(x1, ld, s_chunk + i64(k0) * V + v0, V, K - k0, V - v0, tid(), 128);
            cp_async_commit();
            cp_async_wait<0>();
            sync();
            warp_mma<T, 16, W_, 64, NT>(acc, x0 + at.row * ld, ld, x1 + at.column * ld, ld);
        }
        for_each_acc(acc, [](int, int, float& x) { x = -x; });
        store_acc<T>(x2 + at.row * ld + at.column, ld, acc);
        float* const sc = reinterpret_cast<float*>(x0);
        if constexpr (Gated) {
            sync();
            local_sums<T, C>(sc, L::ldc, gate, tokenK, strideK, head, c.rows, k0, K);
            sync();
        }
        for (int p = tid(); p < C * 64 / vec<T>; p += 128) {
            const int r = p / (64 / vec<T>), d = p % (64 / vec<T>) * vec<T>;
            const int count = r < c.rows ? K - k0 - d : 0;
            u128 x = load_piece(k + tokenQ + r * strideQ + k0 + d, count);
            const float br = count > 0 ? beta[tokenB + i64(r) * HV] : 0.f;
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) {
                float y = br * to_float(get<T>(x, i));
                if constexpr (Gated) {
                    float sum = sc[r * L::ldc + d + i];
                    for (int last = 15; last < r / 16 * 16; last += 16) sum += sc[last * L::ldc + d + i];
                    y *= exp2(sum);
                }
                set<T>(x, i, from_float<T>(y));
            }
            st128(x3 + r * ld + d, x);
        }
        sync();
        if (square) warp_mma<T, 16, Q_, 64, NT>(acc_a, x2 + at.row * ld, ld, x3 + sq * ld, ld);
        store_tile<T, C, 64>(dW + tokenK + k0, strideK, x2, ld, c.rows, K - k0, tid(), 128);
    }

    sync();
    if (square) {
        for_each_acc(acc_qk, [&](int r, int col, float& x) { x = sq + col <= at.row + r ? x : 0.f; });
        store_fragment<float>(dAqk + tokenC + i64(at.row) * strideC + sq, strideC, acc_qk, c.rows - at.row, C - sq);
        for_each_acc(acc_a, [&](int r, int col, float& x) { x = sq + col < at.row + r ? x : 0.f; });
        store_acc<T>(x0 + at.row * ld + sq, ld, acc_a);
    }
    sync();
    if (dA) store_tile<T, C, C>(dA + tokenC, strideC, x0, ld, c.rows, C, tid(), 128);
    if (square) {
        clear(acc_a);
        warp_mma<T, 16, Q_, C, TN>(acc_a, sA + at.row, lda, x0 + sq, ld);
        store_acc<T>(x1 + at.row * ld + sq, ld, acc_a);
    }
    sync();
    if (square) {
        clear(acc_a);
        warp_mma<T, 16, Q_, C, NT>(acc_a, x1 + at.row * ld, ld, sA + sq * lda, lda);
        for_each_acc(acc_a, [&](int r, int col, float& x) { x = sq + col < at.row + r ? -x : 0.f; });
        store_fragment<float>(X + tokenC + i64(at.row) * strideC + sq, strideC, acc_a, c.rows - at.row, C - sq);
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
        db[i] += shfl_xor(db[i], 1);
        db[i] += shfl_xor(db[i], 2);
        if (lane() % 4 == 0) sums[warp() / Place<C>::row_blocks * C + at.row + lane() / 4 + 8 * i] = db[i];
    }
    sync();
    if (tid() < c.rows) {
        float x = 0.f;
#pragma unroll
        for (int g = 0; g < Place<C>::column_groups; ++g) x += sums[g * C + tid()];
        dbeta_v[tokenB + i64(tid()) * HV] = x;
    }
}

}  // namespace vk
