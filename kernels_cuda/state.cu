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
    static constexpr int bytes = int(sizeof(T)) * (R * buffer + 4 * slice + copy);
};

// w += W S and q += Q S, 16 rows: each fragment of S is loaded once. Both: otherwise only w.
template <bool Both, class T, int N, int K>
VK_DEVICE void read_state(float (&w)[1][N / 8][4], float (&q)[1][N / 8][4], const T* W, const T* Q, int ld, const T* S,
                          int lds) {
    if constexpr (is_16bit<T>) {
#pragma unroll
        for (int k = 0; k < K; k += 16) {
            u32 a[4], b[4];
            load_a<false>(a, W, ld, 0, k);
            if constexpr (Both) load_a<false>(b, Q, ld, 0, k);
#pragma unroll
            for (int n = 0; n < N / 8; ++n) {
                u32 s[2];
                load_b<false>(s, S, lds, k, 8 * n);
                mma16816<T>(w[0][n], a, s);
                if constexpr (Both) mma16816<T>(q[0][n], b, s);
            }
        }
    } else {
        warp_mma<T, 16, N, K>(w, W, ld, S, lds);
        if constexpr (Both) warp_mma<T, 16, N, K>(q, Q, ld, S, lds);
    }
}

template <int MT, int NT_> VK_DEVICE void add(float (&x)[MT][NT_][4], const float (&y)[MT][NT_][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT_; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[m][n][i] += y[m][n][i];
}

// W [tokens,HV,K], U [tokens,HV,V], Aqk [tokens,HV,C], decay [chunks,HV,K]; Kg, Qg [tokens,Hk,K], where value head i reads
// head i / (HV / Hk) and O takes q_scale Qg S: without a gate and a norm they are k and q themselves. first_chunk [N+1].
// h0, ht [N,HV,K,V], or [N,HV,V,K] with v_first. Out, each may be null: Vnew [tokens,HV,V], S [chunks,HV,K,V], ht;
// o [tokens,HV,V].
// Output: whether there is an o; without, Qg and Aqk are not read. Whole: rows of all tensors are whole numbers of aligned
// 16-byte pieces.
template <class T, int C, int KP, int BV, int R, int Warps, bool Gated, bool Output, bool Whole>
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

    const int slices = ceil_div(V, BV), v0 = bidx() % slices * BV, columns = min(BV, V - v0);
    const int head = bidx() / slices % HV, sequence = bidx() / slices / HV;
    const int first = first_chunk[sequence], count = first_chunk[sequence + 1] - first;
    const i64 strideK = i64(HV) * K, strideV = i64(HV) * V, strideC = i64(HV) * C, strideQ = i64(Hk) * K;
    const int r0 = 16 * (warp() % (C / 16)), c0 = width * (warp() / (C / 16));  // this warp's part of a C x BV product
    const int s0 = KS / 4 * (warp() % 4), e0 = 8 * NT_ * (warp() / 4);         // and of a KS x BV slice of S

    // A sequence's chunks are neighbours, and all but the last are full.
    i64 token = 0, length = 0;
    if (count > 0) {
        token = chunks[first].token;
        length = i64(count - 1) * C + chunks[first + count - 1].rows;
    }
    const i64 startV = token * strideV + i64(head) * V + v0, startQ = token * strideQ + i64(head / (HV / Hk)) * K;
    const T* nextW = W + token * strideK + i64(head) * K;
    const T* nextQ = Qg + startQ;
    const T* nextK = Kg + startQ;
    const T* nextA = Aqk + token * strideC + i64(head) * C;
    const T* nextU = U + startV;
    // Stage `stage` of chunk `step` into `to`; past the end an empty group, so that counts stay equal.
    auto load = [&](int step, int stage, T* to) {
        if (step < count) {
            const int rows = i32(min(i64(C), length - i64(step) * C)), s = stage % NS;
            if (stage < NS) {
                load_pieces<Whole, T, C, KS>(to, ld, nextW + s * KS, strideK, rows, K - s * KS, tid(), threads);
                if (Output)
                    load_pieces<Whole, T, C, KS>(to + L::tile, ld, nextQ + s * KS, strideQ, rows, K - s * KS, tid(), threads);
                if (s == NS - 1) {
                    load_pieces<Whole, T, C, BV>(sU + step % 2 * L::slice, ldv, nextU, strideV, rows, columns, tid(), threads);
                    nextW += C * strideK, nextQ += C * strideQ, nextU += C * strideV;
                }
            } else {
                load_pieces<Whole, T, C, KS>(to, ld, nextK + s * KS, strideQ, rows, K - s * KS, tid(), threads);
                if (Output && s == 0)
                    load_pieces<Whole, T, C, C>(to + L::tile, lda, nextA, strideC, rows, C, tid(), threads);
                if (s == NS - 1) nextK += C * strideQ, nextA += C * strideC;
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

    int slot = 0;  // of the ring, for the stage that is worked on
#pragma unroll
    for (int n = 0; n < R - 1; ++n) load(n / stages, n % stages, ring + n * L::buffer);
    auto begin_stage = [&](int step, int stage) -> const T* {
        T* const buffer = ring + slot * L::buffer;
        if constexpr (R == 1) {
            sync();
            load(step, stage, buffer);
            cp_async_wait<0>();
            sync();
        } else {
            cp_async_wait<R - 2>();
            sync();
            const int ahead = stage + R - 1;
            load(step + ahead / stages, ahead % stages, ring + (slot == 0 ? R - 1 : slot - 1) * L::buffer);
            slot = slot == R - 1 ? 0 : slot + 1;
        }
        return buffer;
    };
    const float* decay_row = decay + (i64(first) * HV + head) * K;

#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        const int rows = i32(min(i64(C), length - i64(step) * C));
        const i64 atV = startV + i64(step) * C * strideV;
        float fall[NS][MT][2];  // decay of this lane's rows of S; asked for long before it is needed
        if constexpr (Gated) {
#pragma unroll
            for (int s = 0; s < NS; ++s)
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int d = s * KS + s0 + 16 * m + frag_row(lane(), 2 * i);
                        fall[s][m][i] = d < K ? decay_row[d] : 0.f;
                    }
            decay_row += strideK;
        }
        float read_w[1][width / 8][4], read_q[1][width / 8][4];
        clear(read_w);
        clear(read_q);
#pragma unroll
        for (int s = 0; s < NS; ++s) {
            const T* const tile = begin_stage(step, s) + r0 * ld;
            read_state<Output, T, width, KS>(read_w, read_q, tile, tile + L::tile, ld, sS + s * KS * ldv + c0, ldv);
        }
        {
            const T* const u = sU + step % 2 * L::slice + r0 * ldv + c0;
            for_each_acc(read_w, [&](int row, int column, float& x) { x = to_float(u[row * ldv + column]) - x; });
            store_acc<T>(sV + r0 * ldv + c0, ldv, read_w);
        }
        if (S_out) {
            T* const to = S_out + (i64(first + step) * HV + head) * K * V + v0;
            store_tile<T, KP, BV, Whole>(to, V, sS, ldv, K, columns, tid(), threads);
        }
#pragma unroll
        for (int s = 0; s < NS; ++s) {
            const T* const tile = begin_stage(step, NS + s);
            if (s == 0) {
                if (Vnew) store_tile<T, C, BV, Whole>(Vnew + atV, strideV, sV, ldv, rows, columns, tid(), threads);
                if constexpr (Output) {
                    // Float calls add the two parts once: many small terms on top of a large sum would all round alike.
                    constexpr bool apart = !is_16bit<T>;
                    float near[1][width / 8][4];
                    clear(near);
                    // + 0: a product with a negative scale must not leave a -0 whose sign later rows could change
                    for_each_acc(read_q, [&](int, int, float& x) { x = x * q_scale + 0.f; });
                    for (int k = 0; k <= r0; k += 16)
                        warp_mma<T, 16, width, 16>(apart ? near : read_q, tile + L::tile + r0 * lda + k, lda,
                                                   sV + k * ldv + c0, ldv);
                    if constexpr (apart) add(read_q, near);
                    T* const out = sO + r0 * ldv + c0;
                    store_acc<T>(out, ldv, read_q);
                    syncwarp();
                    store_tile<T, 16, width, Whole>(o + atV + r0 * strideV + c0, strideV, out, ldv, rows - r0, columns - c0,
                                                    lane(), 32);
                }
            }
            // Added once: a tensor core cuts the sum off after each product, and a large state would lose to many small terms.
            float gain[MT][NT_][4];
            clear(gain);
            warp_mma<T, KS / 4, 8 * NT_, C, TN>(gain, tile + s0, ld, sV + e0, ldv);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int j = 0; j < NT_; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float& x = S[s][m][j][i];
                        x = Gated ? fma(x, fall[s][m][i / 2], gain[m][j][i]) : x + gain[m][j][i];
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
