// Reverse scan over the chunks of a sequence, one block per (sequence, value head, slice of BV value channels):
//
//     dU      = Aqk^T dO + Kg dS                                dS: gradient of the state after the chunk
//     dS_prev = diag(exp gC) dS + Qg^T dO - W^T dU              dS starts at dht, ends as dh0
//
// dS runs in float32 in the accumulators of the second line; products read its copy rounded to T, which is also what is
// kept per chunk. Tiles come through a ring of R buffers, R - 1 stages ahead: for each chunk NS stages with a slice of Kg
// (the first one with Aqk and dO too), then NS stages with a slice of Qg and W. A stage begins with the one barrier that
// makes its tiles visible, frees the buffer of the stage before, and hands dU and the copy of dS to their readers. Four warps
// of their own move tiles, so that the chain from dS to dS_prev is products and barriers alone.
#include "backward_common.cuh"

namespace vk {

template <class T, int C, int KP, int BV, int R> struct ReverseShape {
    static constexpr int KS = is_16bit<T> && KP == 128 ? 128 : 64;
    static constexpr int NS = KP / KS;
    static_assert(KP % KS == 0 && C <= KS && BV * C >= 512, "warp tiles are whole fragments");
    static constexpr int ld = pitch<T>(KS), lda = pitch<T>(C), ldv = pitch<T>(BV);
    static constexpr int warps = C * BV / 128 < 8 ? C * BV / 128 : 8;  // that multiply
    static constexpr int movers = 128, threads = 32 * warps + movers;
    static constexpr int width = C * BV / (16 * warps);  // columns of one warp, which has 16 rows, in a C x BV product
    static constexpr int row_groups = warps < KS / 16 ? warps : KS / 16;  // a slice of dS: rows / row_groups times
    static constexpr int rows = KS / row_groups;                          // columns / (warps / row_groups) for each warp
    static constexpr int columns = BV / (warps / row_groups);
    static constexpr int tile = C * ld, buffer = 2 * tile, slice = C * ldv, copy = KP * ldv;
    static constexpr int bytes = int(sizeof(T)) * (R * buffer + 3 * slice + copy) + R * KS * 4;
};

// acc += factor x.
template <int MT, int NT_> VK_DEVICE void add(float (&acc)[MT][NT_][4], const float (&x)[MT][NT_][4], float factor) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT_; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = fma(factor, x[m][n][i], acc[m][n][i]);
}

// W [tokens,HV,K], Aqk [tokens,HV,C] (zero above the diagonal), dO [tokens,HV,V], decay = exp gC [chunks,HV,K]; Kg, Qg
// [tokens,Hk,K], where value head i reads head i / (HV / Hk): without a gate they are k and q themselves, and q_scale
// multiplies q. dht, dh0 float [N,HV,K,V], or [N,HV,V,K] with v_first; each may be null. Out: dU [tokens,HV,V],
// dS [chunks,HV,K,V].
template <class T, int C, int KP, int BV, int R, bool Gated>
VK_KERNEL_BOUNDS((ReverseShape<T, C, KP, BV, R>::threads), 1)
void backward_state(const T* Kg, const T* W, const T* Qg, const T* Aqk, const T* dO, const float* decay,
                    const float* dht, const Chunk* chunks, const i32* first_chunk, T* dU, T* dS_out, float* dh0, i32 Hk,
                    i32 HV, i32 K, i32 V, float q_scale, i32 v_first) {
    VK_DYN_SHARED(shared);
    using L = ReverseShape<T, C, KP, BV, R>;
    constexpr int KS = L::KS, NS = L::NS, ld = L::ld, ldv = L::ldv, lda = L::lda, stages = 2 * NS;
    constexpr int width = L::width, MT = L::rows / 16, NT_ = L::columns / 8;
    T* const ring = reinterpret_cast<T*>(shared);
    T* const sO = ring + R * L::buffer;           // dO, two buffers: this chunk's and the next one's
    T* const sU = sO + 2 * L::slice;
    T* const sS = sU + L::slice;
    float* const sdecay = reinterpret_cast<float*>(sS + L::copy);

    const int slices = ceil_div(V, BV), v0 = bidx() % slices * BV, columns = min(BV, V - v0);
    const int head = bidx() / slices % HV, sequence = bidx() / slices / HV;
    const int first = first_chunk[sequence], count = first_chunk[sequence + 1] - first;
    const Chunk none{0, 0, -1}, head_chunk = count ? chunks[first] : none, last_chunk = count ? chunks[first + count - 1] : none;
    const int strideK = HV * K, strideV = HV * V, strideC = HV * C, strideQ = Hk * K;
    const i64 offsetK = i64(head) * K, offsetV = i64(head) * V + v0, offsetC = i64(head) * C;
    const i64 offsetQ = i64(head / (HV / Hk)) * K;
    const int mover = tid() - 32 * L::warps;  // number of a thread that moves tiles, else negative
    const int r0 = 16 * (warp() % (C / 16)), c0 = width * (warp() / (C / 16));  // this warp's part of a C x BV product
    const int s0 = L::rows * (warp() % L::row_groups), e0 = L::columns * (warp() / L::row_groups);  // and of a slice of dS

    // Chunks of a sequence are neighbours, and only its last one, which comes first here, can be shorter than C.
    auto rows_at = [&](int step) { return step == 0 ? last_chunk.rows : C; };
    auto token_at = [&](int step) { return head_chunk.token + i64(count - 1 - step) * C; };
    // One stage of the scan into buffer `slot`; past the end an empty group, so that counts stay equal.
    auto load = [&](int step, int stage, int slot) {
        if (step < count) {
            const int rows = rows_at(step);
            const i64 token = token_at(step);
            T* const to = ring + slot * L::buffer;
            const int s = stage % NS, channels = K - s * KS;
            const i64 fromQ = token * strideQ + offsetQ + s * KS;
            if (stage < NS) {
                load_tile<T, C, KS>(to, ld, Kg + fromQ, strideQ, rows, channels, mover, L::movers);
                if (s == 0) {
                    load_tile<T, C, C>(to + L::tile, lda, Aqk + token * strideC + offsetC, strideC, rows, C, mover, L::movers);
                    load_tile<T, C, BV>(sO + step % 2 * L::slice, ldv, dO + token * strideV + offsetV, strideV, rows,
                                        columns, mover, L::movers);
                }
            } else {
                load_tile<T, C, KS>(to, ld, Qg + fromQ, strideQ, rows, channels, mover, L::movers);
                load_tile<T, C, KS>(to + L::tile, ld, W + token * strideK + offsetK + s * KS, strideK, rows, channels, mover,
                                    L::movers);
                if constexpr (Gated)
                    load_tile<float, 1, KS>(sdecay + slot * KS, KS,
                                            decay + (i64(first + count - 1 - step) * HV + head) * K + s * KS, 0, 1, channels,
                                            mover, L::movers);
            }
        }
        cp_async_commit();
    };

    float dS[NS][MT][NT_][4];
    // Elements of dS that exist from dht, or to dh0. All is made anew from the numbers of thread and block, because between
    // the two nothing needs it.
    auto move_state = [&](const float* from, float* to) {
        const int thread = anew(tid()), block = anew(bidx()), warp = thread / warp_size, e_slice = block % slices * BV;
        const i64 state = i64(block / slices) * K * V;
        const int s0 = L::rows * (warp % L::row_groups), e0 = e_slice + L::columns * (warp / L::row_groups);
#pragma unroll
        for (int s = 0; s < NS; ++s)
            for_each_acc(dS[s], [&](int row, int column, float& x) {
                const i64 d = s * KS + s0 + row, e = e0 + column;
                if (d < K && e < min(V, e_slice + BV)) {
                    const i64 at = state + (v_first ? e * K + d : d * V + e);
                    if (from) x = from[at];
                    else to[at] = x;
                }
            }, thread % warp_size);
    };
    auto copy_state = [&](int s) { store_acc<T>(sS + (s * KS + s0) * ldv + e0, ldv, dS[s]); };
#pragma unroll
    for (int s = 0; s < NS; ++s) clear(dS[s]);
    if (mover < 0) {
        if (dht) move_state(dht, nullptr);
#pragma unroll
        for (int s = 0; s < NS; ++s) copy_state(s);
    }

    if (mover >= 0)
#pragma unroll
        for (int n = 0; n < R - 1; ++n) load(n / stages, n % stages, n);
    int slot = 0;  // buffer of the stage at hand
    auto begin_stage = [&](int step, int stage) -> const T* {
        const int mine = slot;
        if constexpr (R == 1) {
            sync();
            if (mover >= 0) load(step, stage, 0);
            cp_async_wait<0>();
            sync();
        } else {
            if (mover >= 0) cp_async_wait<R - 2>();
            sync();
            if (mover >= 0)
                load(step + (stage + R - 1) / stages, (stage + R - 1) % stages, slot == 0 ? R - 1 : slot - 1);
            slot = slot == R - 1 ? 0 : slot + 1;
        }
        return ring + mine * L::buffer;
    };

#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        const int rows = rows_at(step);
        const T* const o = sO + step % 2 * L::slice;
        // Float calls add the two parts of dU once: many small terms on top of a large sum would all round alike.
        constexpr bool apart = !is_16bit<T>;
        float acc[1][width / 8][4], near[1][width / 8][4];
        clear(acc);
        clear(near);
#pragma unroll
        for (int s = 0; s < NS; ++s) {
            const T* const tile = begin_stage(step, s);
            if (mover >= 0) {
                T* const to = dS_out + (i64(first + count - 1 - step) * HV + head) * K * V + v0;
                if (s == 0) store_tile<T, KP, BV>(to, V, sS, ldv, K, columns, anew(mover), L::movers);
                continue;
            }
            if (s == 0) {
#pragma unroll
                for (int i = 0; i < C; i += 16)
                    if (i >= r0)
                        warp_mma<T, 16, width, 16, TN>(apart ? near : acc, tile + L::tile + i * lda + r0, lda,
                                                       o + i * ldv + c0, ldv);
            }
            warp_mma<T, 16, width, KS>(acc, tile + r0 * ld, ld, sS + s * KS * ldv + c0, ldv);
        }
        if constexpr (apart) add(acc, near, 1.f);
        if (mover < 0) store_acc<T>(sU + r0 * ldv + c0, ldv, acc);
#pragma unroll
        for (int s = 0; s < NS; ++s) {
            const T* const tile = begin_stage(step, NS + s);
            if (mover >= 0) {
                T* const to = dU + token_at(step) * strideV + offsetV;
                if (s == 0) store_tile<T, C, BV>(to, strideV, sU, ldv, rows, columns, anew(mover), L::movers);
                continue;
            }
            // dS grows by Qg^T dO - W^T dU, each added once: see state.cu.
            float change[MT][NT_][4];
            clear(change);
            warp_mma<T, L::rows, L::columns, C, TN>(change, tile + s0, ld, o + e0, ldv);
            if constexpr (Gated) {
                const float* const fall = sdecay + (tile - ring) / L::buffer * KS + s0;
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int n = 0; n < NT_; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float& x = dS[s][m][n][i];
                            x = fma(x, fall[16 * m + frag_row(lane(), i)], change[m][n][i]);
                        }
            } else {
                add(dS[s], change, q_scale);
            }
            clear(change);
            warp_mma<T, L::rows, L::columns, C, TN>(change, tile + L::tile + s0, ld, sU + e0, ldv);
            add(dS[s], change, -1.f);
            copy_state(s);
        }
    }
    if (mover >= 0) return;
    if (dh0) move_state(nullptr, dh0);
}

}  // namespace vk
