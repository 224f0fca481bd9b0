// The scan over the chunks of a sequence, one block per (sequence, value head, slice of BV value channels):
//
//     Vnew = U - W S          O = Qg S + Aqk Vnew          S <- diag(exp gC) S + Kg^T Vnew
//
// S runs in float32 in the accumulators of the last product. The other two read a copy rounded to T, which is also what is
// kept per chunk. Tiles come through a ring of R buffers, R - 1 stages ahead: for each chunk NS stages "read" with a slice
// of W and Qg, then NS stages "write" with a slice of Kg (the first one with Aqk too). A stage begins with the one barrier
// that makes its tiles visible, frees the buffer of the stage before, and hands Vnew and the copy of S to their readers.
#include "chunks.cuh"
#include "tile_store.cuh"

namespace vk {

template <class T, int C, int KP, int BV, int R> struct StateShape {
    static constexpr int KS = is_16bit<T> && KP == 128 ? 128 : 64;
    static constexpr int NS = KP / KS;
    static_assert(KP % KS == 0 && C <= KS, "a slice of channels holds a chunk");
    static constexpr int ld = pitch<T>(KS), lda = pitch<T>(C), ldv = pitch<T>(BV);
    static constexpr int tile = C * ld, buffer = 2 * tile, slice = C * ldv, copy = KP * ldv;
    static constexpr int bytes = int(sizeof(T)) * (R * buffer + 4 * slice + copy) + R * KS * 4;
};

// W [tokens,HV,K], U [tokens,HV,V], Aqk [tokens,HV,C], decay [chunks,HV,K]; Kg, Qg [tokens,Hk,K], where value head i reads
// head i / (HV / Hk) and O takes q_scale Qg S: without a gate and a norm they are k and q themselves. first_chunk [N+1].
// h0, ht [N,HV,K,V], or [N,HV,V,K] with v_first. Out, each may be null: o, Vnew [tokens,HV,V], S [chunks,HV,K,V], ht.
// Without o, Qg and Aqk are not read.
template <class T, int C, int KP, int BV, int R, int Warps, bool Gated>
VK_KERNEL_BOUNDS(32 * Warps, 1)
void chunk_state(const T* W, const T* U, const T* Kg, const T* Qg, const T* Aqk, const float* decay, const float* h0,
                 const Chunk* chunks, const i32* first_chunk, i32 Hk, i32 HV, i32 K, i32 V, float q_scale, i32 v_first,
                 T* o, T* Vnew, T* S_out, float* ht) {
    VK_DYN_SHARED(shared);
    using L = StateShape<T, C, KP, BV, R>;
    constexpr int KS = L::KS, NS = L::NS, ld = L::ld, ldv = L::ldv, lda = L::lda, stages = 2 * NS;
    constexpr int threads = 32 * Warps;
    constexpr int width = BV * C / 16 / Warps;              // columns of one warp in a C x BV product, 16 rows
    constexpr int MT = KS / 64, NT_ = BV / 2 / Warps;       // its fragments of a KS x BV slice of S: KS/4 rows
    static_assert(width % 8 == 0 && NT_ > 0, "warp tiles are whole fragments");
    T* const ring = reinterpret_cast<T*>(shared);
    T* const sU = ring + R * L::buffer;           // two buffers: this chunk's and the next one's
    T* const sV = sU + 2 * L::slice;
    T* const sO = sV + L::slice;
    T* const sS = sO + L::slice;
    float* const sdecay = reinterpret_cast<float*>(sS + L::copy);

    const int slices = ceil_div(V, BV), v0 = bidx() % slices * BV, columns = min(BV, V - v0);
    const int head = bidx() / slices % HV, sequence = bidx() / slices / HV;
    const int first = first_chunk[sequence], count = first_chunk[sequence + 1] - first;
    const i64 strideK = i64(HV) * K, strideV = i64(HV) * V, strideC = i64(HV) * C, strideQ = i64(Hk) * K;
    const i64 offsetK = i64(head) * K, offsetV = i64(head) * V + v0, offsetC = i64(head) * C;
    const i64 offsetQ = i64(head / (HV / Hk)) * K;
    const int r0 = 16 * (warp() % (C / 16)), c0 = width * (warp() / (C / 16));  // this warp's part of a C x BV product
    const int s0 = KS / 4 * (warp() % 4), e0 = 8 * NT_ * (warp() / 4);         // and of a KS x BV slice of S

    auto load = [&](int n) {  // stage n of the scan; past the end an empty group, so that counts stay equal
        const int step = n / stages, stage = n % stages;
        if (step < count) {
            const Chunk c = chunks[first + step];
            T* const to = ring + n % R * L::buffer;
            const int s = stage % NS, channels = K - s * KS;
            if (stage < NS) {
                load_tile<T, C, KS>(to, ld, W + c.token * strideK + offsetK + s * KS, strideK, c.rows, channels, tid(), threads);
                if (o)
                    load_tile<T, C, KS>(to + L::tile, ld, Qg + c.token * strideQ + offsetQ + s * KS, strideQ, c.rows,
                                        channels, tid(), threads);
                if (s == NS - 1)
                    load_tile<T, C, BV>(sU + step % 2 * L::slice, ldv, U + c.token * strideV + offsetV, strideV, c.rows,
                                        columns, tid(), threads);
            } else {
                load_tile<T, C, KS>(to, ld, Kg + c.token * strideQ + offsetQ + s * KS, strideQ, c.rows, channels, tid(), threads);
                if (o && s == 0)
                    load_tile<T, C, C>(to + L::tile, lda, Aqk + c.token * strideC + offsetC, strideC, c.rows, C, tid(), threads);
                if constexpr (Gated)
                    load_tile<float, 1, KS>(sdecay + n % R * KS, KS,
                                            decay + (i64(first + step) * HV + head) * K + s * KS, 0, 1, channels, tid(), threads);
            }
        }
        cp_async_commit();
    };

    float S[NS][MT][NT_][4];
    auto element = [&](int s, int row, int column) {  // of h0 and ht
        const i64 d = s * KS + s0 + row, e = v0 + e0 + column;
        return (i64(sequence) * HV + head) * K * V + (v_first ? e * K + d : d * V + e);
    };
    auto inside = [&](int s, int row, int column) { return s * KS + s0 + row < K && e0 + column < columns; };
    auto copy_state = [&](int s) { store_acc<T>(sS + (s * KS + s0) * ldv + e0, ldv, S[s]); };
#pragma unroll
    for (int s = 0; s < NS; ++s) {
        for_each_acc(S[s], [&](int row, int column, float& x) {
            x = h0 && inside(s, row, column) ? h0[element(s, row, column)] : 0.f;
        });
        copy_state(s);
    }

#pragma unroll
    for (int n = 0; n < R - 1; ++n) load(n);
    int n = 0;
    auto begin_stage = [&] {
        if constexpr (R == 1) {
            sync();
            load(n);
            cp_async_wait<0>();
            sync();
        } else {
            cp_async_wait<R - 2>();
            sync();
            load(n + R - 1);
        }
    };

#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        const Chunk c = chunks[first + step];
        float read_w[1][width / 8][4], read_q[1][width / 8][4];
        clear(read_w);
        clear(read_q);
#pragma unroll
        for (int s = 0; s < NS; ++s, ++n) {
            begin_stage();
            const T* const tile = ring + n % R * L::buffer + r0 * ld;
            const T* const state = sS + s * KS * ldv + c0;
            warp_mma<T, 16, width, KS>(read_w, tile, ld, state, ldv);
            if (o) warp_mma<T, 16, width, KS>(read_q, tile + L::tile, ld, state, ldv);
        }
        {
            const T* const u = sU + step % 2 * L::slice + r0 * ldv + c0;
            for_each_acc(read_w, [&](int row, int column, float& x) { x = to_float(u[row * ldv + column]) - x; });
            store_acc<T>(sV + r0 * ldv + c0, ldv, read_w);
        }
        if (S_out) {
            T* const to = S_out + (i64(first + step) * HV + head) * K * V + v0;
            store_tile<T, KP, BV>(to, V, sS, ldv, K, columns, tid(), threads);
        }
#pragma unroll
        for (int s = 0; s < NS; ++s, ++n) {
            begin_stage();
            const T* const tile = ring + n % R * L::buffer;
            if (s == 0) {
                if (Vnew)
                    store_tile<T, C, BV>(Vnew + c.token * strideV + offsetV, strideV, sV, ldv, c.rows, columns, tid(), threads);
                if (o) {
                    // + 0: a product with a negative scale must not leave a -0 whose sign later rows could change
                    for_each_acc(read_q, [&](int, int, float& x) { x = x * q_scale + 0.f; });
                    for (int k = 0; k <= r0; k += 16)
                        warp_mma<T, 16, width, 16>(read_q, tile + L::tile + r0 * lda + k, lda, sV + k * ldv + c0, ldv);
                    T* const out = sO + r0 * ldv + c0;
                    store_acc<T>(out, ldv, read_q);
                    syncwarp();
                    store_tile<T, 16, width>(o + (c.token + r0) * strideV + offsetV + c0, strideV, out, ldv, c.rows - r0,
                                             columns - c0, lane(), 32);
                }
            }
            if constexpr (Gated) {
                const float* const fall = sdecay + n % R * KS + s0;
                for_each_acc(S[s], [&](int row, int, float& x) { x *= fall[row]; });
            }
            if constexpr (is_16bit<T>) {
                warp_mma<T, KS / 4, 8 * NT_, C, TN>(S[s], tile + s0, ld, sV + e0, ldv);
            } else {  // added once, not term by term: a large state would round every small term
                float gain[MT][NT_][4];
                clear(gain);
                warp_mma<T, KS / 4, 8 * NT_, C, TN>(gain, tile + s0, ld, sV + e0, ldv);
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int j = 0; j < NT_; ++j)
#pragma unroll
                        for (int i = 0; i < 4; ++i) S[s][m][j][i] += gain[m][j][i];
            }
            copy_state(s);
        }
    }
    if (ht)
#pragma unroll
        for (int s = 0; s < NS; ++s)
            for_each_acc(S[s], [&](int row, int column, float& x) {
                if (inside(s, row, column)) ht[element(s, row, column)] = x;
            });
}

}  // namespace vk
