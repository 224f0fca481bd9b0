// Local part of the backward, before the gradients of q, k and g; one block per (chunk, value head):
//
//     dAqk = (dO Vnew^T) * M                                      M lower triangle with the diagonal
//     dV   = diag(beta) A^T dU                                    dbeta_v = rowsum(A^T dU * V)
//     dW   = -dU S^T                                              S: state at the start of the chunk
//     dA   = dU (diag(beta) V)^T + dW (diag(beta) exp Gamma * K)^T
//     X    = -(A^T dA A^T) * M1                                   M1 strict lower triangle
//
// Rounded to T: dW, diag(beta) V, diag(beta) exp Gamma * K, dA, A^T dA. dAqk and X stay in float32, because dg is a
// difference of their products.
// Only the strict lower triangles of dA and A^T dA reach X: (A^T dA A^T)_ij with i > j sums dA_pq over p >= i > j >= q. What
// is above them must not stand in the operands: rounded to float16 it may be infinite, and infinity times 0 is NaN.
//
// Slices of V, then for each slice of K those of V again; 16-bit calls load one step ahead.
#include "backward_common.cuh"

namespace vk {

template <class T, int C> struct LocalShared {
    static constexpr int ld = pitch<T>(64), tile = 64 * ld, stages = is_16bit<T> ? 2 : 1;
    static constexpr int ldc = 68;  // of the local sums
    // Tiles of a stage: dO, Vnew, dU, V; later dU, S. Tiles 2 and 3 then hold dW and diag(beta) exp Gamma * K, and the local
    // sums lie where no stage is: in tiles 6 and 7, or in tile 0 between two steps.
    static constexpr int sums = stages == 2 ? 6 : 0;
    static constexpr int bytes = int(sizeof(T)) * (4 * stages * tile + C * pitch<T>(C)) + 4 * 3 * C;
};

// A, dU, Vnew, dO, v: [tokens,HV,.]; k [tokens,H,K], after the norm; S [chunks,HV,K,V]; beta float [tokens,HV], activated.
// gate: as prepare.cu has it. Out: dAqk, X float [tokens,HV,C], zero where masked; dW [tokens,HV,K]; dv [tokens,HV,V];
// dbeta_v float [tokens,HV]; dA [tokens,HV,C] or null.
template <class T, int C, bool Gated, bool Whole>
VK_KERNEL_BOUNDS(4 * C, (blocks_per_sm<T, C, LocalShared<T, C>>()))
void backward_local(const T* A, const T* dU, const T* Vnew, const T* dO, const T* v, const T* k, const T* S,
                    const float* beta, const Chunk* chunks, Gate gate, float* dAqk, float* X, T* dW, T* dv,
                    float* dbeta_v, T* dA, i32 H, i32 HV, i32 K, i32 V) {
    VK_DYN_SHARED(shared);
    using L = LocalShared<T, C>;
    constexpr int ld = L::ld, lda = pitch<T>(C), W_ = Place<C>::width, Q_ = Place<C>::square;
    constexpr int threads = Place<C>::threads;
    T* const x0 = reinterpret_cast<T*>(shared);
    T* const x2 = x0 + 2 * L::tile;
    T* const x3 = x0 + 3 * L::tile;
    float* const sc = reinterpret_cast<float*>(x0 + L::sums * L::tile);
    T* const sA = x0 + 4 * L::stages * L::tile;
    float* const sums = reinterpret_cast<float*>(sA + C * lda);  // [2][C]
    float* const sb = sums + 2 * C;                              // beta [C]

    const int head = bidx() % HV, chunk = bidx() / HV;
    const Chunk c = chunks[chunk];
    if (c.rows == 0) return;  // past the last chunk
    const int strideK = HV * K, strideV = HV * V, strideC = HV * C, strideQ = H * K;
    const i64 tokenV = c.token * strideV + i64(head) * V, tokenK = c.token * strideK + i64(head) * K;
    const i64 tokenC = c.token * strideC + i64(head) * C, tokenQ = c.token * strideQ + i64(head / (HV / H)) * K;
    const i64 tokenB = c.token * HV + head;
    const T* const s_chunk = S + (i64(chunk) * HV + head) * K * V;
    const int slices = ceil_div(V, 64), steps = slices * (1 + ceil_div(K, 64));

    auto load = [&](int thread, int i) {
        T* const to = x0 + i % L::stages * 4 * L::tile;
        const int v0 = i % slices * 64, k0 = (i / slices - 1) * 64, columns = V - v0;
        const i64 from = tokenV + v0;
        if (i < slices) {
            load_pieces<Whole, T, C, 64>(to, ld, dO + from, strideV, c.rows, columns, thread, threads);
            load_pieces<Whole, T, C, 64>(to + L::tile, ld, Vnew + from, strideV, c.rows, columns, thread, threads);
            load_pieces<Whole, T, C, 64>(to + 2 * L::tile, ld, dU + from, strideV, c.rows, columns, thread, threads);
            load_pieces<Whole, T, C, 64>(to + 3 * L::tile, ld, v + from, strideV, c.rows, columns, thread, threads);
        } else if (i < steps) {
            load_pieces<Whole, T, C, 64>(to, ld, dU + from, strideV, c.rows, columns, thread, threads);
            load_pieces<Whole, T, 64, 64>(to + L::tile, ld, s_chunk + i64(k0) * V + v0, V, K - k0, columns, thread, threads);
        }
        cp_async_commit();
    };
    // Tiles of step i. At the first step of a slice of K its tile of k starts to load; wait_k and a barrier end that.
    auto begin = [&](int thread, int i) -> T* {
        if constexpr (L::stages == 1) {
            sync();
            load(thread, i);
        }
        cp_async_wait<0>();
        sync();
        if (i >= slices && i % slices == 0) {
            const int k0 = (i / slices - 1) * 64;
            load_pieces<Whole, T, C, 64>(x3, ld, k + tokenQ + k0, strideQ, c.rows, K - k0, thread, threads);
        }
        cp_async_commit();
        if constexpr (L::stages == 2) load(thread, i + 1);
        return x0 + i % L::stages * 4 * L::tile;
    };
    auto wait_k = [&] { cp_async_wait<L::stages - 1>(); };
    // Row r of a tile times beta_r, and exp Gamma_r if `decayed`, rounded to T: the operands that U and W had, so that dA has
    // the error of U. What is left of it in dg, in which they meet, is the error of a difference and not of its terms.
    auto scale_rows = [&](int thread, T* tile, bool decayed = false) {
        scale_tile<T, C, 64>(tile, ld, thread, threads, [&](int r, int d, float (&y)[vec<T>]) {
            if (Gated && decayed) {
                float sum[vec<T>];
#pragma unroll
                for (int i = 0; i < vec<T>; ++i) sum[i] = sc[r * L::ldc + d + i];
#pragma unroll 1
                for (int last = 15; last < r / 16 * 16; last += 16)
#pragma unroll
                    for (int i = 0; i < vec<T>; ++i) sum[i] += sc[last * L::ldc + d + i];
#pragma unroll
                for (int i = 0; i < vec<T>; ++i) y[i] *= exp_decay_flush<T>(sum[i]);
            }
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) y[i] *= sb[r];
        });
    };

    if (tid() < C) sb[tid()] = tid() < c.rows ? beta[tokenB + i64(tid()) * HV] : 0.f;
    load_pieces<Whole, T, C, C>(sA, lda, A + tokenC, strideC, c.rows, C, tid(), threads);
    if constexpr (L::stages == 2) load(tid(), 0);

    float acc_a[1][Q_ / 8][4], acc[1][W_ / 8][4];
    clear(acc_a);
    {
        float acc_qk[1][Q_ / 8][4], db[2] = {0.f, 0.f};
        clear(acc_qk);
#pragma unroll 1
        for (int step = 0; step < slices; ++step) {
            const Place<C> at(anew(tid()));
            const int l = at.lane, sq = at.square_column;
            T* const x = begin(at.thread, step);
            const T* const u = x + 2 * L::tile;
            T* const sv = x + 3 * L::tile;
            warp_mma<T, 16, Q_, 64, NT>(acc_qk, x + at.row * ld, ld, x + L::tile + sq * ld, ld, l);
            clear(acc);
#pragma unroll 1
            for (int r = at.row; r < C; r += 16)  // A is lower triangular
                warp_mma<T, 16, W_, 16, TN>(acc, sA + r * lda + at.row, lda, u + r * ld + at.column, ld, l);
            const float b[2] = {sb[at.row + l / 4], sb[at.row + l / 4 + 8]};
            each_pair<W_ / 8>(at.row, at.column, [&](int r, int col, int n, int i) {
                float v_[2];
                load2(sv + r * ld + col, v_[0], v_[1]);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& y = acc[0][n][i + j];
                    db[i / 2] = fma(y, v_[j], db[i / 2]);
                    y *= b[i / 2];
                }
            }, l);
            sync();
            scale_rows(at.thread, sv);
            sync();
            warp_mma<T, 16, Q_, 64, NT>(acc_a, u + at.row * ld, ld, sv + sq * ld, ld, l);
            store_fragment<T>(dv + tokenV + at.row * strideV + 64 * step + at.column, strideV, acc, c.rows - at.row,
                              V - 64 * step - at.column, l);
        }
        const Place<C> at(anew(tid()));
        const int sq = at.square_column;
        for_each_acc(acc_qk, [&](int r, int col, float& x) { x = sq + col <= at.row + r ? x : 0.f; });
        store_fragment<float>(dAqk + tokenC + at.row * strideC + sq, strideC, acc_qk, c.rows - at.row, C - sq);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            db[i] += shfl_xor(db[i], 1);
            db[i] += shfl_xor(db[i], 2);
            if (at.lane % 4 == 0) sums[at.thread / warp_size / Place<C>::row_blocks * C + at.row + at.lane / 4 + 8 * i] = db[i];
        }
    }

#pragma unroll 1
    for (int step = slices, k0 = 0; k0 < K; k0 += 64) {
        float g[16];
        clear(acc);
        if constexpr (Gated) load_gate<T>(g, gate, tokenK, strideK, c.rows, k0, K);
#pragma unroll 1
        for (const int last = step + slices; step < last; ++step) {
            const Place<C> at(anew(tid()));
            const T* const x = begin(at.thread, step);
            warp_mma<T, 16, W_, 64, NT>(acc, x + at.row * ld, ld, x + L::tile + at.column * ld, ld, at.lane);
        }
        const Place<C> at(anew(tid()));
        const int l = at.lane;
        for_each_acc(acc, [](int, int, float& y) { y = -y; }, l);
        store_acc<T>(x2 + at.row * ld + at.column, ld, acc);
        wait_k();
        sync();
        if constexpr (Gated) {
            local_sums<T>(sc, L::ldc, g, gate, head, c.rows, k0, K, nullptr, at.thread);
            sync();
        }
        scale_rows(at.thread, x3, Gated);
        sync();
        warp_mma<T, 16, Q_, 64, NT>(acc_a, x2 + at.row * ld, ld, x3 + at.square_column * ld, ld, l);
        store_tile<T, C, 64, Whole>(dW + tokenK + k0, strideK, x2, ld, c.rows, K - k0, at.thread, threads);
    }

    const Place<C> at(anew(tid()));
    const int sq = at.square_column;
    T* const x1 = x0 + L::tile;
    for_each_acc(acc_a, [&](int r, int col, float& x) { x = sq + col < at.row + r ? x : 0.f; });
    store_acc<T>(x0 + at.row * ld + sq, ld, acc_a);
    sync();
    if (dA) store_tile<T, C, C>(dA + tokenC, strideC, x0, ld, c.rows, C, tid(), threads);
    clear(acc_a);
    warp_mma<T, 16, Q_, C, TN>(acc_a, sA + at.row, lda, x0 + sq, ld);
    for_each_acc(acc_a, [&](int r, int col, float& x) { x = sq + col < at.row + r ? x : 0.f; });
    store_acc<T>(x1 + at.row * ld + sq, ld, acc_a);
    sync();
    clear(acc_a);
    warp_mma<T, 16, Q_, C, NT>(acc_a, x1 + at.row * ld, ld, sA + sq * lda, lda);
    for_each_acc(acc_a, [&](int r, int col, float& x) { x = sq + col < at.row + r ? -x : 0.f; });
    store_fragment<float>(X + tokenC + at.row * strideC + sq, strideC, acc_a, c.rows - at.row, C - sq);

    sync();
    if (tid() < c.rows) dbeta_v[tokenB + i64(tid()) * HV] = sums[tid()] + sums[C + tid()];
}

}  // namespace vk
