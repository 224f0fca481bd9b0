// Gradients of q, k, g and beta of one chunk; one block per (chunk, value head), K in slices of 64 channels:
//
//     dQ = exp Gamma * dQg + dQi + diag(dAqk) K                   dQg = dO S^T      P = A^T dW      dKg = Vnew dS^T
//     dK = exp(gC - Gamma) * dKg + beta exp Gamma * P + beta left + right + diag(dAqk) Q
//       dQi_i   = sum_{j<i} dAqk_ij K_j exp(Gamma_i - Gamma_j)    left_i = sum_{j<i} X_ij K_j exp(Gamma_i - Gamma_j)
//       right_j = sum_{i>j} (dAqk_ij Q_i + beta_i X_ij K_i) exp(Gamma_i - Gamma_j)
//     dbeta = dbeta_v + rowsum(P * exp Gamma * K) + rowsum(left * K)
//     dg_t = sum_{i>=t} (dQg * Qg + P * beta exp Gamma * K + dQi * Q + (beta left - right) * K)_i
//          + sum_{r<t} (dKg * Kg)_r + rowsum(S * dS) exp gC
//
// The terms of the diagonal (i = j) cancel in dg, so they are kept out of dQi and right. dKg * Kg enters dGamma with
// a minus in every row and its sum in the last; its suffix sum is the sum over the rows before t, which is summed
// directly: nothing large is subtracted.
//
// exp(Gamma_i - Gamma_j) in blocks of 16 rows, every exponent <= 0: off the diagonal through the first row of a block,
// with running sums that decay by exp(Gamma_first(I+1) - Gamma_first(I)) from one block to the next; inside a diagonal
// block pair by pair with running products of exp(Gamma_i - Gamma_{i-1}). Anchors lie between j and i, so nothing
// depends on a token after i or on the length of the tail.
#include "backward_common.cuh"

namespace vk {

template <class T, int C> struct IntraShared {
    static constexpr int ld = pitch<T>(64), tile = 64 * ld;
    static constexpr int square = WideTile<T, C, C>::bytes, operand = WideTile<T, C, 64>::bytes;
    static constexpr int ld_scratch = 40;  // rows start 8 banks apart: pairs of a fragment meet no conflict
    static constexpr int scratch = 16 * ld_scratch, scratches = 4 * 3 * scratch * 4;
    static constexpr int staging = 2 * tile * int(sizeof(T));
    static constexpr int region = max(max(2 * operand, scratches), staging);
    static constexpr int blocks = C / 16;
    static constexpr int bytes = 2 * square + region + 4 * (2 * blocks * 256 + 3 * blocks * 64 + 64 + 64);
};

// A, dW, Vnew, dO as in backward_local; S, dS [chunks,HV,K,V]; q, k [tokens,H,K]; dAqk, X float [tokens,HV,C].
// Out, per value head and rounded to T, or float where the wide pointer is given: dq, dk, dg [tokens,HV,K];
// dbeta float [tokens,HV].
template <class T, int C, bool Gated>
VK_KERNEL_BOUNDS(128, 2)
void backward_intra(const T* q, const T* k, const float* Gamma, const float* beta, const T* A, const T* dW,
                    const T* dO, const T* Vnew, const T* S, const T* dS, const float* dAqk, const float* X,
                    const float* dbeta_v, const Chunk* chunks, T* dq, float* dq_wide, T* dk, float* dk_wide, T* dg,
                    float* dg_wide, float* dbeta, float scale, int H, int HV, int K, int V) {
    VK_DYN_SHARED(shared);
    using L = IntraShared<T, C>;
    using Square = WideTile<T, C, C>;
    using Operand = WideTile<T, C, 64>;
    constexpr int ld = L::ld, NT_ = C / 8, W_ = Place<C>::width, NB = L::blocks;
    const Square sQK{reinterpret_cast<typename Square::E*>(shared)};
    const Square sX{reinterpret_cast<typename Square::E*>(shared + L::square)};
    unsigned char* const region = shared + 2 * L::square;
    const Operand op0{reinterpret_cast<typename Operand::E*>(region)};
    const Operand op1{reinterpret_cast<typename Operand::E*>(region + L::operand)};
    T* const x0 = reinterpret_cast<T*>(region);
    T* const x1 = x0 + L::tile;
    float* const dqk = reinterpret_cast<float*>(region + L::region);  // diagonal blocks [block][j][i]
    float* const dx = dqk + NB * 256;
    float* const step = dx + NB * 256;    // exp(Gamma_first(I+1) - Gamma_first(I)) [block][64]
    float* const total_g = step + NB * 64;
    float* const total_k = total_g + NB * 64;
    float* const last = total_k + NB * 64;  // rowsum(S * dS) exp gC [64]
    float* const sums = last + 64;

    const int head = bidx() % HV, chunk = bidx() / HV;
    const Chunk c = chunks[chunk];
    if (c.rows == 0) return;  // past the last chunk
    const Place<C> at;
    const int l = lane(), blk = at.row / 16;
    const i64 strideK = i64(HV) * K, strideV = i64(HV) * V, strideC = i64(HV) * C, strideQ = i64(H) * K;
    const i64 tokenV = c.token * strideV + i64(head) * V, tokenK = c.token * strideK + i64(head) * K;
    const i64 tokenC = c.token * strideC + i64(head) * C, tokenQ = c.token * strideQ + i64(head / (HV / H)) * K;
    const i64 tokenB = c.token * HV + head, state = (i64(chunk) * HV + head) * K * V;

    // Values of this chunk at (row, channel), 0 outside.
    auto Kat = [&](int r, int d) { return r < c.rows && d < K ? to_float(k[tokenQ + r * strideQ + d]) : 0.f; };
    auto Qat = [&](int r, int d) { return r < c.rows && d < K ? scale * to_float(q[tokenQ + r * strideQ + d]) : 0.f; };
    auto Gat = [&](int r, int d) { return r < c.rows && d < K ? Gamma[tokenK + r * strideK + d] : 0.f; };
    auto Bat = [&](int r) { return r < c.rows ? beta[tokenB + i64(r) * HV] : 0.f; };

    for (int p = tid(); p < C * C / 2; p += 128) {
        const int r = 2 * p / C, j = 2 * p % C;
        float a0 = 0.f, a1 = 0.f, b0 = 0.f, b1 = 0.f;
        if (r < c.rows) {
            a0 = dAqk[tokenC + r * strideC + j], a1 = dAqk[tokenC + r * strideC + j + 1];
            b0 = X[tokenC + r * strideC + j], b1 = X[tokenC + r * strideC + j + 1];
        }
        sQK.set2(r, j, a0, a1);
        sX.set2(r, j, b0, b1);
        if (r / 16 == j / 16) {
            float* const to = dqk + r / 16 * 256 + j % 16 * 16 + r % 16;
            to[0] = a0, to[16] = a1;
            to[NB * 256] = b0, to[NB * 256 + 16] = b1;
        }
    }
    const float b[2] = {Bat(at.row + l / 4), Bat(at.row + l / 4 + 8)};
    float db[2] = {0.f, 0.f};

    for (int k0 = 0; k0 < K; k0 += 64) {
        const int d0 = k0 + at.column;  // this warp's first channel
        float aQ[1][NT_][4], aK[1][NT_][4], aG[1][NT_][4], acc[1][NT_][4];
        // f(row in the chunk, column in the slice, n, i) for each element of a fragment
        auto each = [&](auto f) {
#pragma unroll
            for (int n = 0; n < NT_; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) f(at.row + frag_row(l, i), at.column + 8 * n + frag_col(l, i), n, i);
        };
        clear(aQ);  // dQi
        clear(aK);  // left
        clear(aG);  // right
        sync();
        if constexpr (Gated) {
            for (int p = tid(); p < (NB - 1) * 64; p += 128) {
                const int r = 16 * (p / 64), d = k0 + p % 64;
                step[p] = r + 16 < c.rows ? exp2(Gat(r + 16, d) - Gat(r, d)) : 1.f;
            }
            // Diagonal block, one lane per channel, then through scratch into fragments.
            float* const scratch = reinterpret_cast<float*>(region) + 3 * L::scratch * warp();
#pragma unroll
            for (int u = 0; u < W_; u += 32) {
                constexpr int lanes = W_ < 32 ? W_ : 32;
                if (l < lanes) {
                    const int d = d0 + u + l;
                    float Kc[16], Qc[16], Kb[16], e[16], di[16], le[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        const int r = at.row + i;
                        Kc[i] = Kat(r, d), Qc[i] = Qat(r, d), Kb[i] = Bat(r) * Kc[i];
                        e[i] = i > 0 && r < c.rows ? exp2(Gat(r, d) - Gat(r - 1, d)) : 0.f;
                        di[i] = le[i] = 0.f;
                    }
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        const float* const pq = dqk + blk * 256 + j * 16;
                        const float* const px = dx + blk * 256 + j * 16;
                        float E = 1.f, ri = 0.f;
#pragma unroll
                        for (int i = j + 1; i < 16; ++i) {
                            E *= e[i];
                            const float kE = Kc[j] * E;
                            di[i] = fma(pq[i], kE, di[i]);
                            le[i] = fma(px[i], kE, le[i]);
                            ri = fma(E, fma(pq[i], Qc[i], px[i] * Kb[i]), ri);
                        }
                        scratch[2 * L::scratch + j * L::ld_scratch + l] = ri;
                        scratch[j * L::ld_scratch + l] = di[j];
                        scratch[L::scratch + j * L::ld_scratch + l] = le[j];
                    }
                }
                syncwarp();
#pragma unroll
                for (int n = u / 8; n < u / 8 + lanes / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int p = frag_row(l, i) * L::ld_scratch + 8 * n - u + frag_col(l, i);
                        aQ[0][n][i] = scratch[p];
                        aK[0][n][i] = scratch[L::scratch + p];
                        aG[0][n][i] = scratch[2 * L::scratch + p];
                    }
                syncwarp();
            }
            sync();
        }

        // Rows of a block from columns before it.
        for (int p = tid(); p < C * 32; p += 128) {
            const int r = p / 32, d = k0 + 2 * (p % 32), anchor = (r / 16 + 1) * 16;
            float x0_ = 0.f, x1_ = 0.f;
            if (!Gated) x0_ = Kat(r, d), x1_ = Kat(r, d + 1);
            else if (anchor < c.rows) {
                x0_ = Kat(r, d) * exp2(Gat(anchor, d) - Gat(r, d));
                x1_ = Kat(r, d + 1) * exp2(Gat(anchor, d + 1) - Gat(r, d + 1));
            }
            op0.set2(r, d - k0, x0_, x1_);
        }
        sync();
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const Square& m = which == 0 ? sQK : sX;
            clear(acc);
            for (int J = 0; J < blk + !Gated; ++J) {
                if (Gated && J > 0) each([&](int, int col, int n, int i) { acc[0][n][i] *= step[J * 64 + col]; });
                wide_mma<T, 16, W_, 16, NN>(acc, m, at.row, 16 * J, op0, 16 * J, at.column);
            }
            each([&](int r, int col, int n, int i) {
                float x = acc[0][n][i];
                if (Gated) x *= exp2(Gat(r, k0 + col) - Gat(at.row, k0 + col));
                if (which == 0) aQ[0][n][i] += x;
                else aK[0][n][i] += x;
            });
        }
        sync();

        // Columns of a block from rows after it.
        for (int p = tid(); p < C * 32; p += 128) {
            const int r = p / 32, d = k0 + 2 * (p % 32), anchor = r / 16 * 16;
            const float e0 = Gated ? exp2(Gat(r, d) - Gat(anchor, d)) : 1.f;
            const float e1 = Gated ? exp2(Gat(r, d + 1) - Gat(anchor, d + 1)) : 1.f;
            const float br = Bat(r);
            op0.set2(r, d - k0, Qat(r, d) * e0, Qat(r, d + 1) * e1);
            op1.set2(r, d - k0, br * Kat(r, d) * e0, br * Kat(r, d + 1) * e1);
        }
        sync();
        clear(acc);
        for (int I = NB - 1; I >= blk + Gated; --I) {
            if (Gated && I < NB - 1) each([&](int, int col, int n, int i) { acc[0][n][i] *= step[I * 64 + col]; });
            wide_mma<T, 16, W_, 16, TN>(acc, sQK, 16 * I, at.row, op0, 16 * I, at.column);
            wide_mma<T, 16, W_, 16, TN>(acc, sX, 16 * I, at.row, op1, 16 * I, at.column);
        }
        const bool after = at.row + 16 < c.rows;
        each([&](int r, int col, int n, int i) {
            const int d = k0 + col;
            float x = acc[0][n][i];
            if (Gated) x = after && r < c.rows ? x * exp2(Gat(at.row + 16, d) - Gat(r, d)) : 0.f;
            const float right = aG[0][n][i] + x, Kc = Kat(r, d), Qc = Qat(r, d);
            const float left = aK[0][n][i], dQi = aQ[0][n][i], br = b[i / 2];
            db[i / 2] = fma(left, Kc, db[i / 2]);
            if constexpr (Gated) {
                const float diagonal = dqk[blk * 256 + (r % 16) * 17];
                aG[0][n][i] = fma(dQi, Qc, (br * left - right) * Kc);
                aQ[0][n][i] = fma(diagonal, Kc, dQi);
                aK[0][n][i] = fma(diagonal, Qc, fma(br, left, right));
            } else {
                aK[0][n][i] = fma(br, left, right);
            }
        });

        // P = A^T dW
        sync();
        load_tile<T, C, C>(x0, ld, A + tokenC, strideC, c.rows, C, tid(), 128);
        load_tile<T, C, 64>(x1, ld, dW + tokenK + k0, strideK, c.rows, K - k0, tid(), 128);
        cp_async_commit();
        cp_async_wait<0>();
        sync();
        clear(acc);
        for (int r = at.row; r < C; r += 16)
            warp_mma<T, 16, W_, 16, TN>(acc, x0 + r * ld + at.row, ld, x1 + r * ld + at.column, ld);
        each([&](int r, int col, int n, int i) {
            const float Kc = Kat(r, k0 + col), e = Gated ? exp2(Gat(r, k0 + col)) : 1.f, x = acc[0][n][i] * e;
            db[i / 2] = fma(x, Kc, db[i / 2]);
            aK[0][n][i] = fma(b[i / 2], x, aK[0][n][i]);
            if constexpr (Gated) aG[0][n][i] = fma(b[i / 2] * x, Kc, aG[0][n][i]);
        });

        // dQg = dO S^T
        clear(acc);
        for (int v0 = 0; v0 < V; v0 += 64) {
            sync();
            load_tile<T, C, 64>(x0, ld, dO + tokenV + v0, strideV, c.rows, V - v0, tid(), 128);
            load_tile<T, 64, 64>(x1, ld, S + state + i64(k0) * V + v0, V, K - k0, V - v0, tid(), 128);
            cp_async_commit();
            cp_async_wait<0>();
            sync();
            warp_mma<T, 16, W_, 64, NT>(acc, x0 + at.row * ld, ld, x1 + at.column * ld, ld);
        }
        each([&](int r, int col, int n, int i) {
            const float x = acc[0][n][i] * (Gated ? exp2(Gat(r, k0 + col)) : 1.f);
            aQ[0][n][i] += x;
            if constexpr (Gated) aG[0][n][i] = fma(x, Qat(r, k0 + col), aG[0][n][i]);
        });
        if (dq_wide) {
            each([&](int, int, int n, int i) { aQ[0][n][i] *= scale; });
            store_fragment<float>(dq_wide + tokenK + i64(at.row) * strideK + d0, strideK, aQ, c.rows - at.row, K - d0);
        } else {
            each([&](int, int, int n, int i) { aQ[0][n][i] *= scale; });
            store_fragment<T>(dq + tokenK + i64(at.row) * strideK + d0, strideK, aQ, c.rows - at.row, K - d0);
        }

        // dKg = Vnew dS^T, and rowsum(S * dS): two threads per channel
        clear(acc);
        float carried = 0.f;
        for (int v0 = 0; v0 < V; v0 += 64) {
            sync();
            load_tile<T, C, 64>(x0, ld, Vnew + tokenV + v0, strideV, c.rows, V - v0, tid(), 128);
            load_tile<T, 64, 64>(x1, ld, dS + state + i64(k0) * V + v0, V, K - k0, V - v0, tid(), 128);
            cp_async_commit();
            cp_async_wait<0>();
            sync();
            warp_mma<T, 16, W_, 64, NT>(acc, x0 + at.row * ld, ld, x1 + at.column * ld, ld);
            if constexpr (Gated) {
                const int kk = tid() / 2, first = tid() % 2 * 32, count = k0 + kk < K ? V - v0 - first : 0;
                const T* const from = S + state + i64(k0 + kk) * V + v0 + first;
#pragma unroll 4
                for (int e = 0; e < 32; ++e)
                    if (e < count) carried = fma(to_float(from[e]), to_float(x1[kk * ld + first + e]), carried);
            }
        }
        each([&](int r, int col, int n, int i) {
            const int d = k0 + col;
            const float x = acc[0][n][i] * (Gated ? exp2(Gat(c.rows - 1, d) - Gat(r, d)) : 1.f);
            aK[0][n][i] += x;
            if constexpr (Gated) acc[0][n][i] = r < c.rows ? x * Kat(r, d) : 0.f;
        });
        if (dk_wide)
            store_fragment<float>(dk_wide + tokenK + i64(at.row) * strideK + d0, strideK, aK, c.rows - at.row, K - d0);
        else store_fragment<T>(dk + tokenK + i64(at.row) * strideK + d0, strideK, aK, c.rows - at.row, K - d0);

        if constexpr (Gated) {
            carried += shfl_xor(carried, 1);
            if (tid() % 2 == 0) last[tid() / 2] = carried * exp2(Gat(c.rows - 1, k0 + tid() / 2));
#pragma unroll
            for (int n = 0; n < NT_; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int col = at.column + 8 * n + 2 * (l % 4) + i;
                    const float g = suffix_rows(aG[0][n][i], aG[0][n][i + 2]);
                    const float a = prefix_rows(acc[0][n][i], acc[0][n][i + 2]);
                    if (l < 4) total_g[blk * 64 + col] = g, total_k[blk * 64 + col] = a;
                }
            sync();
            each([&](int r, int col, int n, int i) {
                const int d = k0 + col;
                float g = aG[0][n][i], a = acc[0][n][i];
                for (int I = NB - 1; I > blk; --I) g += total_g[I * 64 + col];
                for (int I = 0; I < blk; ++I) a += total_k[I * 64 + col];
                // A hard reset lets nothing through: exactly 0, where the sums leave rounding.
                const bool open = exp2(Gat(r, d) - (r > 0 ? Gat(r - 1, d) : 0.f)) > 0.f;
                aG[0][n][i] = open ? g + a + last[col] : 0.f;
            });
            if (dg_wide)
                store_fragment<float>(dg_wide + tokenK + i64(at.row) * strideK + d0, strideK, aG, c.rows - at.row,
                                      K - d0);
            else store_fragment<T>(dg + tokenK + i64(at.row) * strideK + d0, strideK, aG, c.rows - at.row, K - d0);
        }
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
        db[i] += shfl_xor(db[i], 1);
        db[i] += shfl_xor(db[i], 2);
        if (l % 4 == 0) sums[warp() / Place<C>::row_blocks * C + at.row + l / 4 + 8 * i] = db[i];
    }
    sync();
    if (tid() < c.rows) {
        float x = dbeta_v[tokenB + i64(tid()) * HV];
#pragma unroll
        for (int g = 0; g < Place<C>::column_groups; ++g) x += sums[g * C + tid()];
        dbeta[tokenB + i64(tid()) * HV] = x;
    }
}

}  // namespace vk
