// Reverse scan over the chunks of a sequence, one block per (sequence, value head, slice of BV value channels):
//
//     dU      = Aqk^T dO + Kg dS                                dS: gradient of the state after the chunk
//     dS_prev = diag(exp gC) dS + Qg^T dO - W^T dU              dS starts at dht, ends as dh0
//
// dS runs in float32 in the accumulators of the second product; products read its copy rounded to T, which is also
// what is kept per chunk. Tiles arrive through a ring of R buffers in the order they are used:
// Aqk, Kg slices, then Qg and W slices in turn. Each wait for a tile is also the barrier that hands dU and the copy of dS
// from the warps that wrote them to those that read them, and frees the buffer of the tile before.
#include "backward_common.cuh"

namespace vk {

template <class T, int C, int KS, int NS, int BV, int R> struct StateShared {
    static constexpr int tile_columns = KS > C ? KS : C;
    static constexpr int tile = C * pitch<T>(tile_columns);
    static constexpr int slice = C * pitch<T>(BV);
    static constexpr int copy = KS * NS * pitch<T>(BV);
    static constexpr int bytes = int(sizeof(T)) * (R * tile + 3 * slice + copy);
};

// Kg, W, Qg [tokens,HV,K], Aqk [tokens,HV,C] (zero above the diagonal), dO [tokens,HV,V], Gamma float [tokens,HV,K] in
// log2 units; dht, dh0 float [N,HV,K,V] or [N,HV,V,K]; dU [tokens,HV,V], dS [chunks,HV,K,V].
template <class T, int C, bool Gated, int KS, int NS, int BV, int R>
VK_KERNEL_BOUNDS(128, 1)
void backward_state(const T* Kg, const T* W, const T* Qg, const T* Aqk, const T* dO, const float* Gamma,
                    const float* dht, const Chunk* chunks, const i32* first_chunk, T* dU, T* dS, float* dh0, int HV,
                    int K, int V, int v_first) {
    VK_DYN_SHARED(shared);
    using L = StateShared<T, C, KS, NS, BV, R>;
    constexpr int tiles = 1 + 3 * NS;
    constexpr int ldk = pitch<T>(L::tile_columns), ldv = pitch<T>(BV);
    constexpr int rows_of_warp = KS / 4;               // of dS, per slice
    constexpr int width = BV * C / 64;                 // columns of dU per warp
    static_assert(rows_of_warp % 16 == 0 && width % 8 == 0, "warp tiles are whole fragments");
    T* const ring = reinterpret_cast<T*>(shared);
    T* const sdO = ring + R * L::tile;                 // two buffers: this chunk's and the next one's
    T* const sdU = sdO + 2 * L::slice;                 // -dU
    T* const sdS = sdU + L::slice;

    const int slices = ceil_div(V, BV);
    const int v0 = bidx() % slices * BV;
    const int head = bidx() / slices % HV;
    const int sequence = bidx() / slices / HV;
    const int columns = min(BV, V - v0);
    const int first = first_chunk[sequence], count = first_chunk[sequence + 1] - first;
    const int w = warp(), l = lane();
    const int r0 = 16 * (w % (C / 16)), c0 = width * (w / (C / 16));
    const i64 strideK = i64(HV) * K, strideV = i64(HV) * V, strideC = i64(HV) * C;

    // Tile number n of the whole scan; past the end it commits an empty group, so that counts stay equal.
    auto load = [&](int n) {
        const int step = n / tiles, t = n % tiles;
        if (step < count) {
            const Chunk c = chunks[first + count - 1 - step];
            T* const to = ring + n % R * L::tile;
            if (t == 0) {
                load_tile<T, C, C>(to, ldk, Aqk + c.token * strideC + head * C, strideC, c.rows, C, tid(), 128);
                load_tile<T, C, BV>(sdO + step % 2 * L::slice, ldv, dO + c.token * strideV + i64(head) * V + v0, strideV,
                                    c.rows, columns, tid(), 128);
            } else {
                const int s = t <= NS ? t - 1 : (t - 1 - NS) / 2;
                const T* const from = t <= NS ? Kg : (t - 1 - NS) % 2 == 0 ? Qg : W;
                load_tile<T, C, KS>(to, ldk, from + c.token * strideK + i64(head) * K + s * KS, strideK, c.rows,
                                    K - s * KS, tid(), 128);
            }
        }
        cp_async_commit();
    };
    int next = 0;  // tile number to consume
    auto wait = [&]() -> const T* {
        cp_async_wait<R - 2>();
        sync();
        load(next + R - 1);
        return ring + next++ % R * L::tile;
    };

    const i64 state = (i64(sequence) * HV + head) * K * V;
    const i64 sk = v_first ? 1 : V, sv = v_first ? K : 1;
    float S[NS][KS / 64][BV / 8][4];
    auto each_state = [&](auto f) {  // f(k, v within the slice, element)
#pragma unroll
        for (int s = 0; s < NS; ++s)
            for_each_acc(S[s], [&](int r, int c, float& x) { f(s * KS + w * rows_of_warp + r, c, x); });
    };
    each_state([&](int k, int c, float& x) {
        x = dht && k < K && c < columns ? dht[state + k * sk + (v0 + c) * sv] : 0.f;
    });
#pragma unroll
    for (int s = 0; s < NS; ++s) store_acc(sdS + (s * KS + w * rows_of_warp) * ldv, ldv, S[s]);
#pragma unroll
    for (int n = 0; n < R - 1; ++n) load(n);

    for (int step = 0; step < count; ++step) {
        const int chunk = first + count - 1 - step;
        const Chunk c = chunks[chunk];
        const T* const sO = sdO + step % 2 * L::slice;

        float acc[1][width / 8][4];
        clear(acc);
        const T* a = wait();
        for (int i = r0; i < C; i += 16) warp_mma<T, 16, width, 16, TN>(acc, a + i * ldk + r0, ldk, sO + i * ldv + c0, ldv);
        store_tile<T, KS * NS, BV>(dS + (i64(chunk) * HV + head) * K * V + v0, V, sdS, ldv, K, columns, tid(), 128);
        float decay[NS][KS / 64][2];  // exp gC of rows g and g + 8
        if constexpr (Gated) {
            const float* const last = Gamma + (c.token + c.rows - 1) * strideK + i64(head) * K;
#pragma unroll
            for (int s = 0; s < NS; ++s)
#pragma unroll
                for (int m = 0; m < KS / 64; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int k = s * KS + w * rows_of_warp + 16 * m + l / 4 + 8 * i;
                        decay[s][m][i] = k < K ? exp2(last[k]) : 0.f;
                    }
        }
#pragma unroll
        for (int s = 0; s < NS; ++s) {
            a = wait();
            warp_mma<T, 16, width, KS, NN>(acc, a + r0 * ldk, ldk, sdS + s * KS * ldv + c0, ldv);
        }
        store_fragment<T>(dU + (c.token + r0) * strideV + i64(head) * V + v0 + c0, strideV, acc, c.rows - r0,
                          columns - c0);
        for_each_acc(acc, [](int, int, float& x) { x = -x; });
        store_acc(sdU + r0 * ldv + c0, ldv, acc);
#pragma unroll
        for (int s = 0; s < NS; ++s) {
            a = wait();
            if constexpr (Gated) {
#pragma unroll
                for (int m = 0; m < KS / 64; ++m)
#pragma unroll
                    for (int n = 0; n < BV / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) S[s][m][n][i] *= decay[s][m][i / 2];
            }
            warp_mma<T, rows_of_warp, BV, C, TN>(S[s], a + w * rows_of_warp, ldk, sO, ldv);
            a = wait();
            warp_mma<T, rows_of_warp, BV, C, TN>(S[s], a + w * rows_of_warp, ldk, sdU, ldv);
            store_acc(sdS + (s * KS + w * rows_of_warp) * ldv, ldv, S[s]);
        }
    }
    cp_async_wait<0>();
    if (dh0)
        each_state([&](int k, int c, float& x) {
            if (k < K && c < columns) dh0[state + k * sk + (v0 + c) * sv] = x;
        });
}

}  // namespace vk
