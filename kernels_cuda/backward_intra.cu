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
    static constexpr int triangle = WideTriangle<T, C>::bytes, operand = WideTile<T, C, 64>::bytes;
    static constexpr int ld_scratch = 40;  // a multiple of 8 banks
    static constexpr int scratch = 16 * ld_scratch;
    static constexpr int stages = is_16bit<T> ? 2 : 1, pair = 2 * tile * int(sizeof(T));
    static constexpr int region = max(max(2 * operand, C / 8 * scratch * 4), stages * pair);
    static constexpr int inputs = is_16bit<T> ? 2 * C * ld * int(sizeof(T)) : 0;  // tiles of q and k, where there is room
    static constexpr int blocks = C / 16;
    static constexpr int floats = C * ldc + 3 * blocks * 64 + 64 + 3 * C;
    static constexpr int bytes = 2 * triangle + region + inputs + 4 * floats;
};

// Rows of q or k: of a tile that is zero outside, or of a tensor.
template <class T> struct TileRows {
    const T* p;
    int ld;
    VK_DEVICE void pair(int r, int c, float& x, float& y) const {
        unpack2<T>(*reinterpret_cast<const u32*>(p + r * ld + c), x, y);
    }
    VK_DEVICE float at(int r, int c) const { return to_float(p[r * ld + c]); }
    VK_DEVICE u128 piece(int r, int c) const { return ld128(p + r * ld + c); }
};
template <class T> struct TensorRows {
    const T* p;
    int stride, rows, columns;
    VK_DEVICE float at(int r, int c) const { return r < rows && c < columns ? to_float(p[r * stride + c]) : 0.f; }
    VK_DEVICE void pair(int r, int c, float& x, float& y) const { x = at(r, c), y = at(r, c + 1); }
    VK_DEVICE u128 piece(int r, int c) const { return load_piece(p + r * stride + c, r < rows ? columns - c : 0); }
};

// acc *= table[column] for a warp that stands at `column`.
template <int E, int NT_> VK_DEVICE void decay_columns(float (&acc)[E][1][NT_][4], const float* table, int column) {
#pragma unroll
    for (int n = 0; n < NT_; ++n) {
        const pair32 fall = *reinterpret_cast<const pair32*>(table + column + 8 * n + 2 * (lane() % 4));
#pragma unroll
        for (int e = 0; e < E; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[e][0][n][i] *= i % 2 ? fall.y : fall.x;
    }
}

// A, dW, Vnew, dO, v, gate, beta as in backward_local; S, dS [chunks,HV,K,V]; q, k [tokens,H,K], after the norm; dAqk, X
// float [tokens,HV,C]. Out, per value head: dq, dk, dg [tokens,HV,K], rounded to T, or in float where the wide pointer is
// given; dbeta float [tokens,HV].
template <class T, int C, bool Gated>
VK_KERNEL_BOUNDS(4 * C, (blocks_per_sm<T, C>))
void backward_intra(const T* q, const T* k, const float* beta, const T* A, const T* dW, const T* dO, const T* Vnew,
                    const T* S, const T* dS, const float* dAqk, const float* X, const float* dbeta_v,
                    const Chunk* chunks, Gate gate, T* dq, float* dq_wide, T* dk, float* dk_wide, T* dg, float* dg_wide,
                    float* dbeta, float scale, i32 H, i32 HV, i32 K, i32 V) {
    VK_DYN_SHARED(shared);
    using L = GradientShape<T, C>;
    using Triangle = WideTriangle<T, C>;
    using Operand = WideTile<T, C, 64>;
    constexpr int ld = L::ld, W_ = Place<C>::width, NT_ = W_ / 8, NB = L::blocks, ldc = L::ldc, pieces = 64 / vec<T>;
    constexpr int threads = Place<C>::threads;
    const Triangle m[2] = {{reinterpret_cast<typename Triangle::E*>(shared)},  // dAqk, X
                           {reinterpret_cast<typename Triangle::E*>(shared + L::triangle)}};
    unsigned char* const region = shared + 2 * L::triangle;
    const Operand op0{reinterpret_cast<typename Operand::E*>(region)};
    const Operand op1{reinterpret_cast<typename Operand::E*>(region + L::operand)};
    T* const sk = reinterpret_cast<T*>(region + L::region);
    T* const sq = sk + C * ld;
    float* const sc = reinterpret_cast<float*>(region + L::region + L::inputs);  // local sums [C][64]
    float* const pass = sc + C * ldc;          // exp(total_b) [block][64]
    float* const before = pass + NB * 64;      // product of exp(total) over the blocks before b
    float* const after = before + NB * 64;     // and after b
    float* const carried = after + NB * 64;    // rowsum(S * dS) exp gC [64]
    float* const sums = carried + 64;          // [2][C]
    float* const sb = sums + 2 * C;            // beta [C]
    float* const total_g = reinterpret_cast<float*>(region);  // sums over rows of a block [block][64], at the end
    float* const total_k = total_g + NB * 64;

    const int head = bidx() % HV, chunk = bidx() / HV;
    const Chunk c = chunks[chunk];
    if (c.rows == 0) return;  // past the last chunk
    const Place<C> at;
    const int l = lane(), I0 = at.row / 16, col0 = at.column + 2 * (l % 4);
    const int strideK = HV * K, strideV = HV * V, strideC = HV * C, strideQ = H * K;
    const i64 tokenV = c.token * strideV + i64(head) * V, tokenK = c.token * strideK + i64(head) * K;
    const i64 tokenC = c.token * strideC + i64(head) * C, tokenQ = c.token * strideQ + i64(head / (HV / H)) * K;
    const i64 tokenB = c.token * HV + head, state = (i64(chunk) * HV + head) * K * V;

    if (tid() < C) sb[tid()] = tid() < c.rows ? beta[tokenB + i64(tid()) * HV] : 0.f;
#pragma unroll 1
    for (int p = tid(); p < NB * NB * 64; p += threads) {
        const int I = p / 64 / NB, J = p / 64 % NB, r = p % 64 / 4, j = p % 4 * 4;
        if (J > I) continue;
        u128 x[2] = {{{0, 0, 0, 0}}, {{0, 0, 0, 0}}};
        if (16 * I + r < c.rows) {
            const i64 from = tokenC + (16 * I + r) * strideC + 16 * J + j;
            x[0] = ld128(dAqk + from);
            x[1] = ld128(X + from);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (Gated && I == J) {
#pragma unroll
                for (int i = 0; i < 4; ++i) *m[e].diagonal(I, j + i, r) = as_float(x[e].w[i]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i += 2) m[e].set2(I, r, 16 * J + j + i, as_float(x[e].w[i]), as_float(x[e].w[i + 1]));
            }
        }
    }
    float db[2] = {0.f, 0.f};

#pragma unroll 1
    for (int k0 = 0; k0 < K; k0 += 64) {
        const int channels = K - k0;
        sync();  // the slice before is read
        auto rows_of = [&](const T* x, T* tile) {
            if constexpr (is_16bit<T>) {
                load_tile<T, C, 64>(tile, ld, x + tokenQ + k0, strideQ, c.rows, channels, tid(), threads);
                return TileRows<T>{tile, ld};
            } else {
                return TensorRows<T>{x + tokenQ + k0, strideQ, c.rows, channels};
            }
        };
        const auto Kr = rows_of(k, sk), Qr = rows_of(q, sq);  // Q without scale
        cp_async_commit();
        if constexpr (Gated) {
            float g[16];
            load_gate<T>(g, gate, tokenK, strideK, c.rows, k0, K);
            local_sums<T>(sc, ldc, g, gate, head, c.rows, k0, K);
        }
        cp_async_wait<0>();
        sync();

        float aQ[1][NT_][4], aK[1][NT_][4], aG[1][NT_][4];
        clear(aQ);  // dQi
        clear(aK);  // left
        clear(aG);  // right
        if constexpr (Gated) {
            if (tid() < 64) {
                const float* const total = sc + 15 * ldc + tid();
                float below = 0.f, above = 0.f;
                for (int b = 0; b < NB; ++b) {
                    pass[b * 64 + tid()] = exp2_flush(total[16 * b * ldc]);
                    before[b * 64 + tid()] = exp2_flush(below);
                    after[(NB - 1 - b) * 64 + tid()] = exp2_flush(above);
                    below += total[16 * b * ldc];
                    above += total[16 * (NB - 1 - b) * ldc];
                }
            }
            // Diagonal block, one lane per channel, then through scratch into fragments.
            float* const scratch = reinterpret_cast<float*>(region) + L::scratch * warp();
            const int d = at.column + l;
            float Qc[16], Kb[16], e[16], di[16], le[16], ri[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float* const s = sc + (at.row + i) * ldc + d;
                Qc[i] = scale * Qr.at(at.row + i, d), Kb[i] = sb[at.row + i] * Kr.at(at.row + i, d);
                e[i] = i > 0 ? exp2_flush(s[0] - s[-ldc]) : 1.f;
                di[i] = le[i] = ri[i] = 0.f;
            }
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                float kE = Kr.at(at.row + j, d), E = 1.f;
#pragma unroll
                for (int i = j + 1; i < 16; ++i) {
                    const float a = *m[0].diagonal(I0, j, i), x = *m[1].diagonal(I0, j, i);
                    kE *= e[i];
                    E *= e[i];
                    di[i] = fma(a, kE, di[i]);
                    le[i] = fma(x, kE, le[i]);
                    ri[j] = fma(E, fma(a, Qc[i], x * Kb[i]), ri[j]);
                }
            }
            auto to_fragments = [&](const float (&x)[16], float (&acc)[1][NT_][4]) {
#pragma unroll
                for (int i = 0; i < 16; ++i) scratch[i * L::ld_scratch + l] = x[i];
                syncwarp();
                for_each_acc(acc, [&](int r, int col, float& y) { y = scratch[r * L::ld_scratch + col]; });
                syncwarp();
            };
            to_fragments(di, aQ);
            to_fragments(le, aK);
            to_fragments(ri, aG);
            sync();
        }

        // Rows of a block from the columns of blocks before it; without a gate also of its own. Operand: K decayed to the
        // end of its block.
#pragma unroll 1
        for (int p = tid(); p < C * pieces; p += threads) {
            const int r = p / pieces, d = p % pieces * vec<T>;
            const u128 x = Kr.piece(r, d);
            float y[vec<T>];
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) {
                y[i] = to_float(get<T>(x, i));
                if constexpr (Gated) y[i] *= exp2_flush(sc[(r / 16 * 16 + 15) * ldc + d + i] - sc[r * ldc + d + i]);
            }
            op0.set_piece(r, d, y);
        }
        sync();
        float both[2][1][NT_][4];
        clear(both[0]);
        clear(both[1]);
#pragma unroll 1
        for (int J = 0; J < I0 + !Gated; ++J) {
            if (Gated && J > 0) decay_columns(both, pass + J * 64, at.column);
            wide_mma<false, W_>(both, m, I0, J, op0, 16 * J, at.column);
        }
        each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
#pragma unroll
            for (int j = i; j < i + 2; ++j) {
                const float up = Gated ? exp2_flush(sc[r * ldc + col + j - i]) : 1.f;
                aQ[0][n][j] = fma(both[0][0][n][j], up, aQ[0][n][j]);
                aK[0][n][j] = fma(both[1][0][n][j], up, aK[0][n][j]);
            }
        });

        // Columns of a block from the rows of blocks after it. Operands: Q and beta K decayed from the start of their block.
        sync();
#pragma unroll 1
        for (int p = tid(); p < C * pieces; p += threads) {
            const int r = p / pieces, d = p % pieces * vec<T>;
            const u128 x = Qr.piece(r, d), z = Kr.piece(r, d);
            float y[vec<T>], e[vec<T>];
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) {
                e[i] = Gated ? exp2_flush(sc[r * ldc + d + i]) : 1.f;
                y[i] = scale * to_float(get<T>(x, i)) * e[i];
            }
            op0.set_piece(r, d, y);
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) y[i] = sb[r] * to_float(get<T>(z, i)) * e[i];
            op1.set_piece(r, d, y);
        }
        sync();
        float below[1][1][NT_][4];
        clear(below[0]);
#pragma unroll 1
        for (int I = NB - 1; I >= I0 + Gated; --I) {
            if (Gated) decay_columns(below, pass + I * 64, at.column);
            wide_mma<true, W_>(below, {m[0]}, I, I0, op0, 16 * I, at.column);
            wide_mma<true, W_>(below, {m[1]}, I, I0, op1, 16 * I, at.column);
        }
        const float b[2] = {sb[at.row + l / 4], sb[at.row + l / 4 + 8]};
        each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
            float Kc[2], Qc[2];
            Kr.pair(r, col, Kc[0], Kc[1]);
            Qr.pair(r, col, Qc[0], Qc[1]);
            const float diagonal = Gated ? *m[0].diagonal(I0, r % 16, r % 16) : 0.f;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float &dQ = aQ[0][n][i + j], &dK = aK[0][n][i + j], &right = aG[0][n][i + j];
                float x = below[0][0][n][i + j];
                if constexpr (Gated) x *= exp2_flush(sc[(at.row + 15) * ldc + col + j] - sc[r * ldc + col + j]);
                right += x;
                const float left = b[i / 2] * dK, Qs = scale * Qc[j];
                db[i / 2] = fma(dK, Kc[j], db[i / 2]);
                dK = fma(diagonal, Qs, left + right);
                if constexpr (Gated) right = fma(dQ, Qs, (left - right) * Kc[j]);
                dQ = fma(diagonal, Kc[j], dQ);
            }
        });

        // P = A^T dW, then dQg = dO S^T, then dKg = Vnew dS^T, over pairs of tiles
        const int slices = ceil_div(V, 64);
        auto load = [&](int i) {
            T* const to = reinterpret_cast<T*>(region + i % L::stages * L::pair);
            if (i == 0) {
                load_tile<T, C, C>(to, ld, A + tokenC, strideC, c.rows, C, tid(), threads);
                load_tile<T, C, 64>(to + L::tile, ld, dW + tokenK + k0, strideK, c.rows, channels, tid(), threads);
            } else if (i <= 2 * slices) {
                const int v0 = (i - 1) % slices * 64;
                load_tile<T, C, 64>(to, ld, (i <= slices ? dO : Vnew) + tokenV + v0, strideV, c.rows, V - v0, tid(), threads);
                load_tile<T, 64, 64>(to + L::tile, ld, (i <= slices ? S : dS) + state + i64(k0) * V + v0, V, channels, V - v0,
                                     tid(), threads);
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
        float acc[1][NT_][4];
        clear(acc);
#pragma unroll 1
        for (int r = at.row; r < C; r += 16)
            warp_mma<T, 16, W_, 16, TN>(acc, x + r * ld + at.row, ld, x + L::tile + r * ld + at.column, ld);
        each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
            float Kc[2];
            Kr.pair(r, col, Kc[0], Kc[1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float y = acc[0][n][i + j];
                if constexpr (Gated) y *= before[I0 * 64 + col + j] * exp2_flush(sc[r * ldc + col + j]);
                db[i / 2] = fma(y, Kc[j], db[i / 2]);
                y *= b[i / 2];
                aK[0][n][i + j] += y;
                if constexpr (Gated) aG[0][n][i + j] = fma(y, Kc[j], aG[0][n][i + j]);
            }
        });

        clear(acc);
#pragma unroll 1
        for (int s = 0; s < slices; ++s) {
            x = pair();
            warp_mma<T, 16, W_, 64, NT>(acc, x + at.row * ld, ld, x + L::tile + at.column * ld, ld);
        }
        each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
            float Qc[2];
            if constexpr (Gated) Qr.pair(r, col, Qc[0], Qc[1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float y = acc[0][n][i + j], &dQ = aQ[0][n][i + j];
                if constexpr (Gated) {
                    y *= before[I0 * 64 + col + j] * exp2_flush(sc[r * ldc + col + j]);
                    aG[0][n][i + j] = fma(y, scale * Qc[j], aG[0][n][i + j]);
                }
                dQ = scale * (dQ + y);
            }
        });
        const i64 out = tokenK + at.row * strideK + k0 + at.column;
        const int rows = c.rows - at.row, columns = channels - at.column;
        if (dq_wide) store_fragment<float>(dq_wide + out, strideK, aQ, rows, columns);
        else store_fragment<T>(dq + out, strideK, aQ, rows, columns);

        clear(acc);
        constexpr int share = threads / 64;  // threads of one row of S and dS
        float dot = 0.f;
#pragma unroll 1
        for (int s = 0; s < slices; ++s) {
            x = pair();
            warp_mma<T, 16, W_, 64, NT>(acc, x + at.row * ld, ld, x + L::tile + at.column * ld, ld);
            if constexpr (Gated) {
                constexpr int part = 64 / share;
                const int d = tid() / share, v0 = tid() % share * part, count = d < channels ? V - s * 64 - v0 : 0;
                const T* const from = S + state + i64(k0 + d) * V + s * 64 + v0;
#pragma unroll
                for (int i = 0; i < part; i += vec<T>) {
                    const u128 y = load_piece(from + i, count - i), z = ld128(x + L::tile + d * ld + v0 + i);
#pragma unroll
                    for (int j = 0; j < vec<T>; ++j) dot = fma(to_float(get<T>(y, j)), to_float(get<T>(z, j)), dot);
                }
            }
        }
        each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
            float Kc[2];
            if constexpr (Gated) Kr.pair(r, col, Kc[0], Kc[1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& y = acc[0][n][i + j];
                if constexpr (Gated)
                    y *= after[I0 * 64 + col + j] * exp2_flush(sc[(at.row + 15) * ldc + col + j] - sc[r * ldc + col + j]);
                aK[0][n][i + j] += y;
                if constexpr (Gated) y *= Kc[j];
            }
        });
        if (dk_wide) store_fragment<float>(dk_wide + out, strideK, aK, rows, columns);
        else store_fragment<T>(dk + out, strideK, aK, rows, columns);

        if constexpr (Gated) {
#pragma unroll
            for (int i = 1; i < share; i *= 2) dot += shfl_xor(dot, i);
            if (tid() % share == 0) {
                const int d = tid() / share;
                carried[d] = dot * before[(NB - 1) * 64 + d] * pass[(NB - 1) * 64 + d];
            }
            sync();  // the last tiles are read; their place takes the totals
#pragma unroll
            for (int n = 0; n < NT_; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float g = suffix_rows(aG[0][n][j], aG[0][n][j + 2]);
                    const float a = prefix_rows(acc[0][n][j], acc[0][n][j + 2]);
                    if (l < 4) total_g[I0 * 64 + col0 + 8 * n + j] = g, total_k[I0 * 64 + col0 + 8 * n + j] = a;
                }
            sync();
            if (tid() < 64) {  // what each block gets from the others
                float g[NB], a[NB], sum_g = carried[tid()], sum_k = 0.f;
#pragma unroll
                for (int i = 0; i < NB; ++i) g[i] = total_g[i * 64 + tid()], a[i] = total_k[i * 64 + tid()];
#pragma unroll
                for (int i = 0; i < NB; ++i) {
                    total_g[(NB - 1 - i) * 64 + tid()] = sum_g, total_k[i * 64 + tid()] = sum_k;
                    sum_g += g[NB - 1 - i], sum_k += a[i];
                }
            }
            sync();
            each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    // A hard reset lets nothing through: exactly 0, where the sums leave rounding.
                    const float decay = sc[r * ldc + col + j] - (r % 16 ? sc[(r - 1) * ldc + col + j] : 0.f);
                    const float sum = (aG[0][n][i + j] + total_g[I0 * 64 + col + j]) +
                                      (acc[0][n][i + j] + total_k[I0 * 64 + col + j]);
                    aG[0][n][i + j] = decay > strongest_decay ? sum : 0.f;
                }
            });
            if (dg_wide) store_fragment<float>(dg_wide + out, strideK, aG, rows, columns);
            else store_fragment<T>(dg + out, strideK, aG, rows, columns);
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
        dbeta[tokenB + i64(tid()) * HV] = dbeta_v[tokenB + i64(tid()) * HV] + (sums[tid()] + sums[C + tid()]);
    }
}

}  // namespace vk
