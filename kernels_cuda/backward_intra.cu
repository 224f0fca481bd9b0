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
// The terms of the diagonal (i = j) cancel in dg, so they are kept out of dQi and right. dKg * Kg enters dGamma with a
// minus in every row and its sum in the last; the suffix sum of that is the sum over the rows before t, which is formed
// directly: nothing large is subtracted.
//
// exp(Gamma_i - Gamma_j) in blocks of 16 rows with local sums c of decays, total_b those of a whole block b; every exponent
// is <= 0. Off the diagonal
//
//     exp(Gamma_i - Gamma_j) = exp(c_i) * prod of exp(total_b) over the blocks between * exp(total - c_j)
//
// so that a running sum decays by exp(total_b) as it passes block b; inside a diagonal block pair by pair with running
// products of single decays. Nothing depends on a token after i or on the length of the tail.
#include "backward_common.cuh"

namespace vk {

template <class T, int C> struct GradientShape {
    static constexpr int ld = pitch<T>(64), tile = 64 * ld, ldc = 68;
    static constexpr int square = WideTile<T, C, C>::bytes, operand = WideTile<T, C, 64>::bytes;
    static constexpr int ld_scratch = 40;  // rows start 8 banks apart: the pairs of a fragment meet no conflict
    static constexpr int scratch = 16 * ld_scratch;
    static constexpr int stages = is_16bit<T> ? 2 : 1, pair = 2 * tile * int(sizeof(T));
    static constexpr int region = max(max(operand, 4 * 3 * scratch * 4), stages * pair);
    static constexpr int blocks = C / 16;
    static constexpr int floats = C * ldc + 5 * blocks * 64 + 128;
    static constexpr int bytes = 2 * square + region + 4 * floats;
};

// Two neighbouring values of row r, channels d and d + 1 (d even), 0 outside.
template <class T> struct Rows {
    const T* p;
    i64 stride;
    int rows, K;
    bool even;  // pairs are aligned
    VK_DEVICE Rows(const T* p, i64 stride, int rows, int K)
        : p(p), stride(stride), rows(rows), K(K),
          even(stride % 2 == 0 && K % 2 == 0 && (reinterpret_cast<u64>(p) & (2 * sizeof(T) - 1)) == 0) {}
    VK_DEVICE void pair(int r, int d, float& x, float& y) const {
        x = y = 0.f;
        if (r >= rows || d >= K) return;
        const T* const q = p + r * stride + d;
        if (even) {
            if constexpr (is_16bit<T>) unpack2<T>(*reinterpret_cast<const u32*>(q), x, y);
            else {
                const pair32 both = *reinterpret_cast<const pair32*>(q);
                x = both.x, y = both.y;
            }
        } else {
            x = to_float(q[0]);
            if (d + 1 < K) y = to_float(q[1]);
        }
    }
    VK_DEVICE float at(int r, int d) const { return r < rows && d < K ? to_float(p[r * stride + d]) : 0.f; }
};

// The diagonal block b of a wide tile is not used by products: its place holds 16 x 16 floats, transposed.
template <class T, int C> VK_DEVICE float* diagonal_block(const WideTile<T, C, C>& m, int b, int j, int i) {
    auto* const row = m.p + (16 * b + j) * m.ld + 16 * b;
    if constexpr (is_16bit<T>) return reinterpret_cast<float*>(row + i / 8 * m.plane) + i % 8;
    else return row + i;
}

// A, dW, Vnew, dO, v, gate, beta as in backward_local; S, dS [chunks,HV,K,V]; q, k [tokens,H,K], after the norm; dAqk, X
// float [tokens,HV,C]. Out, per value head: dq, dk, dg [tokens,HV,K], rounded to T, or in float where the wide pointer is
// given; dbeta float [tokens,HV].
template <class T, int C, bool Gated>
VK_KERNEL_BOUNDS(128, 2)
void backward_intra(const T* q, const T* k, const float* beta, const T* A, const T* dW, const T* dO, const T* Vnew,
                    const T* S, const T* dS, const float* dAqk, const float* X, const float* dbeta_v,
                    const Chunk* chunks, Gate gate, T* dq, float* dq_wide, T* dk, float* dk_wide, T* dg, float* dg_wide,
                    float* dbeta, float scale, i32 H, i32 HV, i32 K, i32 V) {
    VK_DYN_SHARED(shared);
    using L = GradientShape<T, C>;
    using Square = WideTile<T, C, C>;
    using Operand = WideTile<T, C, 64>;
    constexpr int ld = L::ld, NT_ = C / 8, W_ = Place<C>::width, NB = L::blocks, ldc = L::ldc;
    const Square sQK{reinterpret_cast<typename Square::E*>(shared)};
    const Square sX{reinterpret_cast<typename Square::E*>(shared + L::square)};
    unsigned char* const region = shared + 2 * L::square;
    const Operand operand{reinterpret_cast<typename Operand::E*>(region)};
    float* const sc = reinterpret_cast<float*>(region + L::region);  // local sums [C][64]
    float* const pass = sc + C * ldc;        // exp(total_b) [block][64]
    float* const before = pass + NB * 64;    // product of exp(total) over the blocks before b
    float* const after = before + NB * 64;   // and after b
    float* const total_g = after + NB * 64;  // sums over a block's rows
    float* const total_k = total_g + NB * 64;
    float* const carried = total_k + NB * 64;  // rowsum(S * dS) exp gC [64]
    float* const sums = carried + 64;

    const int head = bidx() % HV, chunk = bidx() / HV;
    const Chunk c = chunks[chunk];
    if (c.rows == 0) return;  // past the last chunk
    const Place<C> at;
    const int l = lane(), blk = at.row / 16;
    const i64 strideK = i64(HV) * K, strideV = i64(HV) * V, strideC = i64(HV) * C, strideQ = i64(H) * K;
    const i64 tokenV = c.token * strideV + i64(head) * V, tokenK = c.token * strideK + i64(head) * K;
    const i64 tokenC = c.token * strideC + i64(head) * C, tokenQ = c.token * strideQ + i64(head / (HV / H)) * K;
    const i64 tokenB = c.token * HV + head, state = (i64(chunk) * HV + head) * K * V;
    const Rows<T> Kr(k + tokenQ, strideQ, c.rows, K), Qr(q + tokenQ, strideQ, c.rows, K);  // Q without scale
    auto Bat = [&](int r) { return r < c.rows ? beta[tokenB + i64(r) * HV] : 0.f; };

    for (int p = tid(); p < C * C / 2; p += 128) {
        const int r = 2 * p / C, j = 2 * p % C;
        float a0 = 0.f, a1 = 0.f, b0 = 0.f, b1 = 0.f;
        if (r < c.rows) {
            const pair32 a = *reinterpret_cast<const pair32*>(dAqk + tokenC + r * strideC + j);
            const pair32 b = *reinterpret_cast<const pair32*>(X + tokenC + r * strideC + j);
            a0 = a.x, a1 = a.y, b0 = b.x, b1 = b.y;
        }
        if (Gated && r / 16 == j / 16) {
            *diagonal_block<T, C>(sQK, r / 16, j % 16, r % 16) = a0;
            *diagonal_block<T, C>(sQK, r / 16, j % 16 + 1, r % 16) = a1;
            *diagonal_block<T, C>(sX, r / 16, j % 16, r % 16) = b0;
            *diagonal_block<T, C>(sX, r / 16, j % 16 + 1, r % 16) = b1;
        } else {
            sQK.set2(r, j, a0, a1);
            sX.set2(r, j, b0, b1);
        }
    }
    const float b[2] = {Bat(at.row + l / 4), Bat(at.row + l / 4 + 8)};
    float db[2] = {0.f, 0.f};

    for (int k0 = 0; k0 < K; k0 += 64) {
        const int d0 = k0 + at.column;  // this warp's first channel
        float aQ[1][NT_][4], aK[1][NT_][4], aG[1][NT_][4], acc[1][NT_][4];
        // f(row in the chunk, column in the slice, h, x of acc...) for each pair of neighbours of a fragment; h: upper rows
        auto each = [&](auto f) {
#pragma unroll
            for (int n = 0; n < NT_; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) f(at.row + l / 4 + 8 * h, at.column + 8 * n + 2 * (l % 4), n, h);
        };
        auto decay_rows = [&](const float* table) {  // acc *= table[column]
            each([&](int, int col, int n, int h) {
                acc[0][n][2 * h] *= table[col];
                acc[0][n][2 * h + 1] *= table[col + 1];
            });
        };
        clear(aQ);  // dQi
        clear(aK);  // left
        clear(aG);  // right
        sync();
        if constexpr (Gated) {
            local_sums<T, C>(sc, ldc, gate, tokenK, strideK, head, c.rows, k0, K);
            sync();
            if (tid() < 64) {
                float below = 0.f, above = 0.f;
                for (int i = 0; i < NB; ++i) {
                    before[i * 64 + tid()] = exp2(below);
                    pass[i * 64 + tid()] = exp2(sc[(16 * i + 15) * ldc + tid()]);
                    below += sc[(16 * i + 15) * ldc + tid()];
                }
                for (int i = NB - 1; i >= 0; --i) {
                    after[i * 64 + tid()] = exp2(above);
                    above += sc[(16 * i + 15) * ldc + tid()];
                }
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
                        const float* const s = sc + r * ldc + at.column + u + l;
                        Kc[i] = Kr.at(r, d), Qc[i] = scale * Qr.at(r, d), Kb[i] = Bat(r) * Kc[i];
                        e[i] = i > 0 ? exp2(s[0] - s[-ldc]) : 1.f;
                        di[i] = le[i] = 0.f;
                    }
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        float E = 1.f, ri = 0.f;
#pragma unroll
                        for (int i = j + 1; i < 16; ++i) {
                            const float a = *diagonal_block<T, C>(sQK, blk, j, i), x = *diagonal_block<T, C>(sX, blk, j, i);
                            E *= e[i];
                            const float kE = Kc[j] * E;
                            di[i] = fma(a, kE, di[i]);
                            le[i] = fma(x, kE, le[i]);
                            ri = fma(E, fma(a, Qc[i], x * Kb[i]), ri);
                        }
                        scratch[j * L::ld_scratch + l] = di[j];
                        scratch[L::scratch + j * L::ld_scratch + l] = le[j];
                        scratch[2 * L::scratch + j * L::ld_scratch + l] = ri;
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

        // operand[r][d] = x(r, d) times its decay to the end of its block, or from the start of it
        auto build = [&](const Rows<T>& x, bool to_end, bool times_beta, float factor) {
            for (int p = tid(); p < C * 32; p += 128) {
                const int r = p / 32, d = 2 * (p % 32);
                float y0, y1;
                x.pair(r, k0 + d, y0, y1);
                float f0 = times_beta ? factor * Bat(r) : factor, f1 = f0;
                if constexpr (Gated) {
                    const float* const s = sc + r * ldc + d;
                    const float* const end = sc + (r / 16 * 16 + 15) * ldc + d;
                    f0 *= exp2(to_end ? end[0] - s[0] : s[0]);
                    f1 *= exp2(to_end ? end[1] - s[1] : s[1]);
                }
                operand.set2(r, d, y0 * f0, y1 * f1);
            }
        };

        // Rows of a block from the columns of blocks before it; without a gate also of its own.
        build(Kr, true, false, 1.f);
        sync();
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            clear(acc);
            for (int J = 0; J < blk + !Gated; ++J) {
                if (Gated && J > 0) decay_rows(pass + J * 64);
                wide_mma<T, 16, W_, 16, NN>(acc, which == 0 ? sQK : sX, at.row, 16 * J, operand, 16 * J, at.column);
            }
            each([&](int r, int col, int n, int h) {
                float (&sum)[4] = which == 0 ? aQ[0][n] : aK[0][n];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    sum[2 * h + i] += Gated ? acc[0][n][2 * h + i] * exp2(sc[r * ldc + col + i]) : acc[0][n][2 * h + i];
            });
        }

        // Columns of a block from the rows of blocks after it.
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            sync();
            if (which == 0) build(Qr, false, false, scale);
            else build(Kr, false, true, 1.f);
            sync();
            clear(acc);
            for (int I = NB - 1; I >= blk + Gated; --I) {
                if (Gated) decay_rows(pass + I * 64);
                wide_mma<T, 16, W_, 16, TN>(acc, which == 0 ? sQK : sX, 16 * I, at.row, operand, 16 * I, at.column);
            }
            each([&](int r, int col, int n, int h) {
                const int end = (at.row + 15) * ldc + col;
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    aG[0][n][2 * h + i] +=
                        Gated ? acc[0][n][2 * h + i] * exp2(sc[end + i] - sc[r * ldc + col + i]) : acc[0][n][2 * h + i];
            });
        }
        each([&](int r, int col, int n, int h) {
            float Kc[2], Qc[2];
            Kr.pair(r, k0 + col, Kc[0], Kc[1]);
            Qr.pair(r, k0 + col, Qc[0], Qc[1]);
            const float diagonal = Gated ? *diagonal_block<T, C>(sQK, blk, r % 16, r % 16) : 0.f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float &dQ = aQ[0][n][2 * h + i], &dK = aK[0][n][2 * h + i], &right = aG[0][n][2 * h + i];
                const float left = b[h] * dK, Qs = scale * Qc[i];
                db[h] = fma(dK, Kc[i], db[h]);
                dK = fma(diagonal, Qs, left + right);
                if constexpr (Gated) right = fma(dQ, Qs, (left - right) * Kc[i]);
                dQ = fma(diagonal, Kc[i], dQ);
            }
        });

        // P = A^T dW, then dQg = dO S^T, then dKg = Vnew dS^T, over pairs of tiles
        const int slices = ceil_div(V, 64);
        auto load = [&](int i) {
            T* const to = reinterpret_cast<T*>(region + i % L::stages * L::pair);
            if (i == 0) {
                load_tile<T, C, C>(to, ld, A + tokenC, strideC, c.rows, C, tid(), 128);
                load_tile<T, C, 64>(to + L::tile, ld, dW + tokenK + k0, strideK, c.rows, K - k0, tid(), 128);
            } else if (i <= 2 * slices) {
                const int v0 = (i - 1) % slices * 64;
                load_tile<T, C, 64>(to, ld, (i <= slices ? dO : Vnew) + tokenV + v0, strideV, c.rows, V - v0, tid(), 128);
                load_tile<T, 64, 64>(to + L::tile, ld, (i <= slices ? S : dS) + state + i64(k0) * V + v0, V, K - k0, V - v0,
                                     tid(), 128);
            }
            cp_async_commit();
        };
        int next = 0;
        auto pair = [&]() -> const T* {
            if constexpr (L::stages == 1) {
                sync();
                load(next);
            }
            cp_async_wait<0>();
            sync();
            if constexpr (L::stages == 2) load(next + 1);
            return reinterpret_cast<const T*>(region + next++ % L::stages * L::pair);
        };
        if constexpr (L::stages == 2) {
            sync();
            load(0);
        }

        const T* x = pair();
        clear(acc);
        for (int r = at.row; r < C; r += 16)
            warp_mma<T, 16, W_, 16, TN>(acc, x + r * ld + at.row, ld, x + L::tile + r * ld + at.column, ld);
        each([&](int r, int col, int n, int h) {
            float Kc[2];
            Kr.pair(r, k0 + col, Kc[0], Kc[1]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float y = acc[0][n][2 * h + i];
                if constexpr (Gated) y *= before[blk * 64 + col + i] * exp2(sc[r * ldc + col + i]);
                db[h] = fma(y, Kc[i], db[h]);
                y *= b[h];
                aK[0][n][2 * h + i] += y;
                if constexpr (Gated) aG[0][n][2 * h + i] = fma(y, Kc[i], aG[0][n][2 * h + i]);
            }
        });

        clear(acc);
        for (int s = 0; s < slices; ++s) {
            x = pair();
            warp_mma<T, 16, W_, 64, NT>(acc, x + at.row * ld, ld, x + L::tile + at.column * ld, ld);
        }
        each([&](int r, int col, int n, int h) {
            float Qc[2];
            if constexpr (Gated) Qr.pair(r, k0 + col, Qc[0], Qc[1]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float y = acc[0][n][2 * h + i], &dQ = aQ[0][n][2 * h + i];
                if constexpr (Gated) {
                    y *= before[blk * 64 + col + i] * exp2(sc[r * ldc + col + i]);
                    aG[0][n][2 * h + i] = fma(y, scale * Qc[i], aG[0][n][2 * h + i]);
                }
                dQ = scale * (dQ + y);
            }
        });
        const i64 out = tokenK + i64(at.row) * strideK + d0;
        if (dq_wide) store_fragment<float>(dq_wide + out, strideK, aQ, c.rows - at.row, K - d0);
        else store_fragment<T>(dq + out, strideK, aQ, c.rows - at.row, K - d0);

        clear(acc);
        float dot = 0.f;  // of half a row of S and dS
        for (int s = 0; s < slices; ++s) {
            x = pair();
            warp_mma<T, 16, W_, 64, NT>(acc, x + at.row * ld, ld, x + L::tile + at.column * ld, ld);
            if constexpr (Gated) {
                const int d = tid() / 2, v0 = tid() % 2 * 32, count = k0 + d < K ? V - s * 64 - v0 : 0;
                const T* const from = S + state + i64(k0 + d) * V + s * 64 + v0;
#pragma unroll
                for (int i = 0; i < 32; i += vec<T>) {
                    const u128 y = load_piece(from + i, count - i), z = ld128(x + L::tile + d * ld + v0 + i);
#pragma unroll
                    for (int j = 0; j < vec<T>; ++j) dot = fma(to_float(get<T>(y, j)), to_float(get<T>(z, j)), dot);
                }
            }
        }
        each([&](int r, int col, int n, int h) {
            float Kc[2];
            if constexpr (Gated) Kr.pair(r, k0 + col, Kc[0], Kc[1]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& y = acc[0][n][2 * h + i];
                if constexpr (Gated)
                    y *= after[blk * 64 + col + i] * exp2(sc[(at.row + 15) * ldc + col + i] - sc[r * ldc + col + i]);
                aK[0][n][2 * h + i] += y;
                if constexpr (Gated) y *= Kc[i];
            }
        });
        if (dk_wide) store_fragment<float>(dk_wide + out, strideK, aK, c.rows - at.row, K - d0);
        else store_fragment<T>(dk + out, strideK, aK, c.rows - at.row, K - d0);

        if constexpr (Gated) {
            dot += shfl_xor(dot, 1);
            if (tid() % 2 == 0) carried[tid() / 2] = dot * before[(NB - 1) * 64 + tid() / 2] * pass[(NB - 1) * 64 + tid() / 2];
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
            each([&](int r, int col, int n, int h) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float g = aG[0][n][2 * h + i], a = acc[0][n][2 * h + i];
                    for (int I = NB - 1; I > blk; --I) g += total_g[I * 64 + col + i];
                    for (int I = 0; I < blk; ++I) a += total_k[I * 64 + col + i];
                    // A hard reset lets nothing through: exactly 0, where the sums leave rounding.
                    const float decay = sc[r * ldc + col + i] - (r % 16 ? sc[(r - 1) * ldc + col + i] : 0.f);
                    aG[0][n][2 * h + i] = exp2(decay) > 0.f ? g + a + carried[col + i] : 0.f;
                }
            });
            if (dg_wide) store_fragment<float>(dg_wide + out, strideK, aG, c.rows - at.row, K - d0);
            else store_fragment<T>(dg + out, strideK, aG, c.rows - at.row, K - d0);
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
