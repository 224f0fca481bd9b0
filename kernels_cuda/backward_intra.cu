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
#include "backward_wide.cuh"

namespace vk {

// What a cut decay is below by more than any rounding.
template <class T> inline constexpr float no_decay_left = 150.f / 152.f * strongest_log<T>;

// Offsets of this chunk's first row: kept in shared memory, because registers are short.
struct Start {
    i64 q, k, v, square, state, beta;
    i32 head;
};

template <class T, int C> struct GradientShape {
    static constexpr int ld = pitch<T>(64), tile = 64 * ld, ldc = 68;
    static constexpr int triangle = WideTriangle<T, C>::bytes, operand = WideTile<T, C, 64>::bytes;
    static constexpr int ld_scratch = 40;  // a multiple of 8 banks
    static constexpr int scratch = 16 * ld_scratch;
    static constexpr int stages = is_16bit<T> ? 2 : 1, pair = 2 * tile * int(sizeof(T));
    static constexpr int region = max(max(2 * operand, C / 8 * scratch * 4), stages * pair);
    static constexpr int inputs = is_16bit<T> ? 2 * C * ld * int(sizeof(T)) : 0;  // tiles of q and k, where there is room
    static constexpr int blocks = C / 16;
    static constexpr int logs = is_16bit<T> ? 0 : C * ldc;  // log decays of single rows, then from each row to its block's end
    static constexpr int floats = C * ldc + logs + 3 * blocks * 64 + 64 + C + 16;
    static constexpr int bytes = 2 * triangle + region + inputs + 4 * floats;
};

// A, dW, Vnew, dO, v, gate, beta as in backward_local; S, dS [chunks,HV,K,V]; q, k [tokens,H,K], after the norm; dAqk, X
// float [tokens,HV,C]. Out, per value head: dq, dk, dg [tokens,HV,K], rounded to T, or in float where the wide pointer is
// given; dbeta float [tokens,HV].
template <class T, int C, bool Gated, bool Whole>
VK_KERNEL_BOUNDS(4 * C, (blocks_per_sm<T, C, GradientShape<T, C>>()))
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
    float* const logs = sc + C * ldc;          // float calls: see GradientShape
    float* const pass = logs + L::logs;        // exp(total_b) [block][64]
    float* const before = pass + NB * 64;      // product of exp(total) over the blocks before b
    float* const after = before + NB * 64;     // and after b
    float* const carried = after + NB * 64;    // rowsum(S * dS) exp gC [64]
    float* const sb = carried + 64;            // beta [C]
    Start* const start = reinterpret_cast<Start*>(sb + C);
    float* const sums = reinterpret_cast<float*>(region);     // [2][C], at the end
    float* const total_g = reinterpret_cast<float*>(region);  // sums over rows of a block [block][64], at the end
    float* const total_k = total_g + NB * 64;

    const int head = bidx() % HV, chunk = bidx() / HV;
    const Chunk c = chunks[chunk];
    if (c.rows == 0) return;  // past the last chunk
    const int strideK = HV * K, strideV = HV * V, strideC = HV * C, strideQ = H * K;
    if (tid() == 0)
        *start = {c.token * strideQ + i64(head / (HV / H)) * K, c.token * strideK + i64(head) * K,
                  c.token * strideV + i64(head) * V, c.token * strideC + i64(head) * C, (i64(chunk) * HV + head) * K * V,
                  c.token * HV + head, head};
    if (tid() < C) sb[tid()] = tid() < c.rows ? beta[(c.token + tid()) * HV + head] : 0.f;
    sync();

    // Tiles of q, k and what the gate has, of the slice from k0. g waits in the region, beyond the totals of the slice before.
    unsigned char* const sg = region + 4096;
    auto load_inputs = [&](int thread, int k0) {
        if constexpr (is_16bit<T>) {
            load_pieces<Whole, T, C, 64>(sk, ld, k + start->q + k0, strideQ, c.rows, K - k0, thread, threads);
            load_pieces<Whole, T, C, 64>(sq, ld, q + start->q + k0, strideQ, c.rows, K - k0, thread, threads);
        }
        if constexpr (Gated) {
            const i64 from = start->k + k0;
            if (gate.g_is_float)
                load_pieces<Whole, float, C, 64>(reinterpret_cast<float*>(sg), ldc, static_cast<const float*>(gate.g) + from,
                                                 strideK, c.rows, K - k0, thread, threads);
            else
                load_pieces<Whole, T, C, 64>(reinterpret_cast<T*>(sg), ld, static_cast<const T*>(gate.g) + from, strideK,
                                             c.rows, K - k0, thread, threads);
        }
        cp_async_commit();
    };
    load_inputs(tid(), 0);

    load_triangles<T, C, Gated>(m, dAqk + start->square, X + start->square, strideC, c.rows);
    float db[2] = {0.f, 0.f};
    // Log of the decay from row r to the last row of its block, which begins at row `first`.
    auto to_end = [&](int first, int r, int d) {
        return is_16bit<T> ? sc[(first + 15) * ldc + d] - sc[r * ldc + d] : logs[r * ldc + d];
    };

#pragma unroll 1
    for (int k0 = 0; k0 < K; k0 += 64) {
        const int channels = K - k0;
        auto rows_of = [&](const T* x, T* tile) -> SourceRows<T> {
            if constexpr (is_16bit<T>) return {tile, ld};
            else return {x + start->q + k0, strideQ, c.rows, channels};
        };
        const SourceRows<T> Kr = rows_of(k, sk), Qr = rows_of(q, sq);  // Q without scale
        cp_async_wait<0>();
        sync();  // inputs are there, the slice before is read
        if constexpr (Gated) {
            const int thread = anew(tid());
            float g[16];
            const int at_g = thread / 64 * 16, d = thread % 64;
            if (gate.g_is_float) load_column(g, reinterpret_cast<const float*>(sg) + at_g * ldc + d, ldc, 16);
            else load_column(g, reinterpret_cast<const T*>(sg) + at_g * ld + d, ld, 16);
            local_sums<T>(sc, ldc, g, gate, start->head, c.rows, k0, K, is_16bit<T> ? nullptr : logs, thread);
            sync();
        }

        float aQ[1][NT_][4], aK[1][NT_][4], aG[1][NT_][4];  // dQi; beta left + right; dGamma
        if constexpr (!Gated) clear(aQ), clear(aK);
        if constexpr (Gated) {
            if (tid() < 64) {
                const float* const total = sc + 15 * ldc + tid();
                float below = 0.f, above = 0.f;
                for (int b = 0; b < NB; ++b) {
                    pass[b * 64 + tid()] = exp_decay_flush<T>(total[16 * b * ldc]);
                    before[b * 64 + tid()] = exp_decay_flush<T>(below);
                    after[(NB - 1 - b) * 64 + tid()] = exp_decay_flush<T>(above);
                    below += total[16 * b * ldc];
                    above += total[16 * (NB - 1 - b) * ldc];
                }
            }
            // Diagonal block, one lane per channel, then through scratch into fragments.
            const Place<C> at(anew(tid()));
            const int l = at.lane, I0 = at.row / 16;
            float* const scratch = reinterpret_cast<float*>(region) + L::scratch * (at.thread / warp_size);
            float di[16], le[16], ri[16];
            diagonal_pairs<T, C>(di, le, ri, m, I0, Kr, Qr, at.column + l, scale, sb + at.row,
                                 (is_16bit<T> ? sc : logs) + at.row * ldc + at.column + l, ldc);
            auto to_fragments = [&](const float (&x)[16], float (&acc)[1][NT_][4]) {
#pragma unroll
                for (int i = 0; i < 16; ++i) scratch[i * L::ld_scratch + l] = x[i];
                syncwarp();
                for_each_acc(acc, [&](int r, int col, float& y) { y = scratch[r * L::ld_scratch + col]; }, l);
                syncwarp();
            };
            to_fragments(di, aQ);
            to_fragments(le, aK);
            to_fragments(ri, aG);
            each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
                float Kc[2], Qc[2];
                Kr.pair(r, col, Kc[0], Kc[1]);
                Qr.pair(r, col, Qc[0], Qc[1]);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float &dK = aK[0][n][i + j], &right = aG[0][n][i + j];
                    const float left = sb[r] * dK;
                    db[i / 2] = fma(dK, Kc[j], db[i / 2]);
                    dK = left + right;
                    right = fma(aQ[0][n][i + j], scale * Qc[j], (left - right) * Kc[j]);
                }
            }, l);
            sync();
            if constexpr (!is_16bit<T>) {
                float* const column = logs + tid() / 64 * 16 * ldc + tid() % 64;
                float sum = 0.f;
#pragma unroll 1
                for (int i = 15; i >= 0; --i) {
                    const float log = column[i * ldc];
                    column[i * ldc] = sum;
                    sum += log;
                }
                sync();
            }
        }

        // Rows of a block from the columns of blocks before it; without a gate also of its own. Operand: K decayed to the
        // end of its block.
#pragma unroll 1
        for (int p = anew(tid()); p < C * pieces; p += threads) {
            const int r = p / pieces, d = p % pieces * vec<T>;
            const u128 x = Kr.piece(r, d);
            float y[vec<T>];
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) {
                y[i] = to_float(get<T>(x, i));
                if constexpr (Gated) y[i] *= exp_decay_flush<T>(to_end(r / 16 * 16, r, d + i));
            }
            op0.set_piece(r, d, y);
        }
        sync();
#pragma unroll 1
        for (int e = 0; e < 2; ++e) {  // one copy of the code, for dAqk and X: fewer registers
            const Place<C> at(anew(tid()));
            const int l = at.lane, I0 = at.row / 16;
            const Triangle one[1] = {e == 0 ? m[0] : m[1]};
            float sum[1][1][NT_][4];
            clear(sum[0]);
#pragma unroll 1
            for (int J = 0; J < I0 + !Gated; ++J) {
                if (Gated && J > 0) decay_columns(sum, pass + J * 64, at.column, l);
                wide_mma<false, W_>(sum, one, I0, J, op0, 16 * J, at.column, l);
            }
            each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
                float x[2], y[2], fall[2];  // x: of K; y: what is multiplied last
                Kr.pair(r, col, x[0], x[1]);
                if (e == 0) Qr.pair(r, col, y[0], y[1]);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float s = sum[0][0][n][i + j];
                    fall[j] = Gated ? exp_decay_flush<T>(sc[r * ldc + col + j]) : 1.f;
                    y[j] = (e == 0 ? scale * y[j] : sb[r] * x[j]) * fall[j];
                    if (e == 0) {
                        aQ[0][n][i + j] = fma(s, fall[j], aQ[0][n][i + j]);
                    } else {
                        const float left = s * fall[j];
                        db[i / 2] = fma(left, x[j], db[i / 2]);
                        aK[0][n][i + j] = fma(sb[r], left, aK[0][n][i + j]);
                    }
                }
                if constexpr (Gated) {
                    as_split<T>(y[0], y[1]);
#pragma unroll
                    for (int j = 0; j < 2; ++j) aG[0][n][i + j] = fma(sum[0][0][n][i + j], y[j], aG[0][n][i + j]);
                }
            }, l);
        }

        // Columns of a block from the rows of blocks after it. Operands: Q and beta K decayed from the start of their block.
        sync();
#pragma unroll 1
        for (int p = anew(tid()); p < C * pieces; p += threads) {
            const int r = p / pieces, d = p % pieces * vec<T>;
            const u128 x = Qr.piece(r, d), z = Kr.piece(r, d);
            float y[vec<T>], e[vec<T>];
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) {
                e[i] = Gated ? exp_decay_flush<T>(sc[r * ldc + d + i]) : 1.f;
                y[i] = scale * to_float(get<T>(x, i)) * e[i];
            }
            op0.set_piece(r, d, y);
#pragma unroll
            for (int i = 0; i < vec<T>; ++i) y[i] = sb[r] * to_float(get<T>(z, i)) * e[i];
            op1.set_piece(r, d, y);
        }
        sync();
        {
            const Place<C> at(anew(tid()));
            const int l = at.lane, I0 = at.row / 16;
            float below[1][1][NT_][4];
            clear(below[0]);
#pragma unroll 1
            for (int I = NB - 1; I >= I0 + Gated; --I) {
                if (Gated) decay_columns(below, pass + I * 64, at.column, l);
                wide_mma<true, W_>(below, {m[0]}, I, I0, op0, 16 * I, at.column, l);
                wide_mma<true, W_>(below, {m[1]}, I, I0, op1, 16 * I, at.column, l);
            }
            each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
                if constexpr (!Gated) {
                    aK[0][n][i] += below[0][0][n][i];
                    aK[0][n][i + 1] += below[0][0][n][i + 1];
                } else {
                    float Kc[2], Qc[2], y[2];
                    Kr.pair(r, col, Kc[0], Kc[1]);
                    Qr.pair(r, col, Qc[0], Qc[1]);
                    const float diagonal = *m[0].diagonal(I0, r % 16, r % 16);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float fall = exp_decay_flush<T>(to_end(at.row, r, col + j));
                        const float right = below[0][0][n][i + j] * fall;
                        y[j] = Kc[j] * fall;
                        aK[0][n][i + j] = fma(diagonal, scale * Qc[j], aK[0][n][i + j] + right);
                        aQ[0][n][i + j] = fma(diagonal, Kc[j], aQ[0][n][i + j]);
                    }
                    as_split<T>(y[0], y[1]);
#pragma unroll
                    for (int j = 0; j < 2; ++j) aG[0][n][i + j] = fma(-below[0][0][n][i + j], y[j], aG[0][n][i + j]);
                }
            }, l);
        }

        // P = A^T dW, then dQg = dO S^T, then dKg = Vnew dS^T, over pairs of tiles
        const int slices = ceil_div(V, 64);
        auto load = [&](int thread, int i) {
            T* const to = reinterpret_cast<T*>(region + i % L::stages * L::pair);
            if (i == 0) {
                load_pieces<Whole, T, C, C>(to, ld, A + start->square, strideC, c.rows, C, thread, threads);
                load_pieces<Whole, T, C, 64>(to + L::tile, ld, dW + start->k + k0, strideK, c.rows, channels, thread, threads);
            } else if (i <= 2 * slices) {
                const int v0 = (i <= slices ? i - 1 : i - 1 - slices) * 64;
                load_pieces<Whole, T, C, 64>(to, ld, (i <= slices ? dO : Vnew) + start->v + v0, strideV, c.rows, V - v0, thread,
                                             threads);
                load_pieces<Whole, T, 64, 64>(to + L::tile, ld, (i <= slices ? S : dS) + start->state + i64(k0) * V + v0, V,
                                              channels, V - v0, thread, threads);
            }
            cp_async_commit();
        };
        int next = 0;
        auto pair = [&](int thread) -> const T* {
            if constexpr (L::stages == 1) {
                sync();
                load(thread, next);
            }
            cp_async_wait<0>();
            sync();
            if constexpr (L::stages == 2) load(thread, next + 1);
            return reinterpret_cast<const T*>(region + next++ % L::stages * L::pair);
        };
        if constexpr (L::stages == 2) {
            sync();
            load(anew(tid()), 0);
        }

        float acc[1][NT_][4];
        clear(acc);
        {
            const Place<C> at(anew(tid()));
            const int l = at.lane, I0 = at.row / 16;
            const T* const x = pair(at.thread);
#pragma unroll 1
            for (int r = at.row; r < C; r += 16)
                warp_mma<T, 16, W_, 16, TN>(acc, x + r * ld + at.row, ld, x + L::tile + r * ld + at.column, ld, l);
            each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
                float Kc[2];
                Kr.pair(r, col, Kc[0], Kc[1]);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float y = acc[0][n][i + j];
                    if constexpr (Gated) y *= before[I0 * 64 + col + j] * exp_decay_flush<T>(sc[r * ldc + col + j]);
                    db[i / 2] = fma(y, Kc[j], db[i / 2]);
                    y *= sb[r];
                    aK[0][n][i + j] += y;
                    if constexpr (Gated) aG[0][n][i + j] = fma(y, Kc[j], aG[0][n][i + j]);
                }
            }, l);
        }

        clear(acc);
        {
            const Place<C> at(anew(tid()));
            const int l = at.lane, I0 = at.row / 16;
#pragma unroll 1
            for (int s = 0; s < slices; ++s) {
                const T* const x = pair(at.thread);
                warp_mma<T, 16, W_, 64, NT>(acc, x + at.row * ld, ld, x + L::tile + at.column * ld, ld, l);
            }
            each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
                float Qc[2];
                if constexpr (Gated) Qr.pair(r, col, Qc[0], Qc[1]);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float y = acc[0][n][i + j], &dQ = aQ[0][n][i + j];
                    if constexpr (Gated) {
                        y *= before[I0 * 64 + col + j] * exp_decay_flush<T>(sc[r * ldc + col + j]);
                        aG[0][n][i + j] = fma(y, scale * Qc[j], aG[0][n][i + j]);
                    }
                    dQ = scale * (dQ + y);
                }
            }, l);
            const i64 out = start->k + at.row * strideK + k0 + at.column;
            const int rows = c.rows - at.row, columns = channels - at.column;
            if (dq_wide) store_fragment<float>(dq_wide + out, strideK, aQ, rows, columns, l);
            else store_fragment<T>(dq + out, strideK, aQ, rows, columns, l);
        }

        clear(acc);
        const Place<C> at(anew(tid()));
        const int l = at.lane, I0 = at.row / 16;
        const i64 out = start->k + at.row * strideK + k0 + at.column;
        const int rows = c.rows - at.row, columns = channels - at.column;
        constexpr int share = threads / 64;  // threads of one row of S and dS
        float dot = 0.f;
#pragma unroll 1
        for (int s = 0; s < slices; ++s) {
            constexpr int part = 64 / share;
            const int d = at.thread / share, v0 = at.thread % share * part, count = d < channels ? V - s * 64 - v0 : 0;
            u128 from_S[part / vec<T>];
            if constexpr (Gated)
#pragma unroll
                for (int i = 0; i < part; i += vec<T>)
                    from_S[i / vec<T>] = load_piece<Whole>(S + start->state + i64(k0 + d) * V + s * 64 + v0 + i, count - i);
            const T* const x = pair(at.thread);
            warp_mma<T, 16, W_, 64, NT>(acc, x + at.row * ld, ld, x + L::tile + at.column * ld, ld, l);
            if constexpr (Gated)
#pragma unroll
                for (int i = 0; i < part; i += vec<T>) {
                    const u128 z = ld128(x + L::tile + d * ld + v0 + i);
#pragma unroll
                    for (int j = 0; j < vec<T>; ++j)
                        dot = fma(to_float(get<T>(from_S[i / vec<T>], j)), to_float(get<T>(z, j)), dot);
                }
        }
        each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
            float Kc[2];
            if constexpr (Gated) Kr.pair(r, col, Kc[0], Kc[1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& y = acc[0][n][i + j];
                if constexpr (Gated)
                    y *= after[I0 * 64 + col + j] * exp_decay_flush<T>(to_end(at.row, r, col + j));
                aK[0][n][i + j] += y;
                if constexpr (Gated) y *= Kc[j];
            }
        }, l);
        if (dk_wide) store_fragment<float>(dk_wide + out, strideK, aK, rows, columns, l);
        else store_fragment<T>(dk + out, strideK, aK, rows, columns, l);

        if constexpr (Gated) {
#pragma unroll
            for (int i = 1; i < share; i *= 2) dot += shfl_xor(dot, i);
            if (at.thread % share == 0) {
                const int d = at.thread / share;
                const int at_last = (c.rows - 1) / 16 * 64 + d;  // exp gC as the last row has it, see prepare.cu
                carried[d] = dot * (before[at_last] * pass[at_last]);
            }
        }
        sync();  // the last tiles are read; their place takes the totals and g of the next slice
        if (k0 + 64 < K) load_inputs(at.thread, k0 + 64);
        if constexpr (Gated) {
            sum_over_rows<NB>(aG, acc, carried, total_g, total_k, I0, at.column);
            each_pair<NT_>(at.row, at.column, [&](int r, int col, int n, int i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    // A hard reset lets nothing through: exactly 0, where the sums leave rounding.
                    const float decay = sc[r * ldc + col + j] - (r % 16 ? sc[(r - 1) * ldc + col + j] : 0.f);
                    if (!(decay > no_decay_left<T>)) aG[0][n][i + j] = 0.f;
                }
            }, l);
            if (dg_wide) store_fragment<float>(dg_wide + out, strideK, aG, rows, columns, l);
            else store_fragment<T>(dg + out, strideK, aG, rows, columns, l);
        }
    }

    sync();  // the totals are read; their place takes the sums
    const Place<C> at(anew(tid()));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        db[i] += shfl_xor(db[i], 1);
        db[i] += shfl_xor(db[i], 2);
        if (at.lane % 4 == 0) sums[at.thread / warp_size / Place<C>::row_blocks * C + at.row + at.lane / 4 + 8 * i] = db[i];
    }
    sync();
    if (tid() < c.rows) {
        const i64 to = start->beta + tid() * HV;
        dbeta[to] = dbeta_v[to] + (sums[tid()] + sums[C + tid()]);
    }
}

}  // namespace vk
