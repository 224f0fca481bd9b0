// From gradients per value head, in float32, to those of the caller's arguments:
//
//     dq, dk   sum over the value heads of a group, in order; y = x / sqrt(sum x^2 + eps): dx = (dy - y (y . dy)) / |x|
//     dbeta    sigmoid: times s (1 - s), doubled with beta_twice_sigmoid
//     dg       softplus  g = -r log(1 + exp z):   dz = -dg r sigmoid(z)                 dA_log = sum dg g
//              bounded   g = b sigmoid(r z):      dz = dg b s (1 - s) r                 dA_log = sum dg b s (1 - s) r z
//              with z = x + dt_bias, r = exp(A_log); ddt_bias = sum over tokens of dz
//
// Sums over tokens are two-level, in a fixed order, each level with its rounding error carried along. Rows that belong to
// no sequence, after offsets[N], get 0 and their float32 gradients are never read.
#include "gate.cuh"

namespace vk {

// Sum with the rounding error of each addition carried along (Neumaier).
struct Sum {
    float s = 0.f, lost = 0.f;
    VK_DEVICE void add(float x) {
        const float t = s + x;
        lost += fabs(s) >= fabs(x) ? (s - t) + x : (x - t) + s;
        s = t;
    }
    VK_DEVICE float value() const { return s + lost; }
};

// One warp per (token, head). wide: float [tokens,HV,K], gradient per value head of the (normalised) x; x, out [tokens,H,K].
template <class T>
VK_KERNEL_BOUNDS(128, 1)
void backward_qk(const float* wide, const T* x, T* out, const i64* offsets, i32 N, i64 tokens, i32 H, i32 HV, i32 K,
                 i32 l2norm) {
    const i64 row = i64(bidx()) * 4 + warp();
    if (row >= tokens * H) return;
    const i64 token = row / H;
    const int group = HV / H;
    const float* const from = wide + (token * HV + row % H * group) * K;
    const bool used = token < offsets[N];
    float dot = 0.f, inverse = 0.f;
    if (l2norm && used) {
        inverse = inverse_norm(x + row * K, K);
        for (int d = lane(); d < K; d += warp_size) {
            float dy = 0.f;
            for (int g = 0; g < group; ++g) dy += from[i64(g) * K + d];
            dot = fma(dy, to_float(x[row * K + d]) * inverse, dot);
        }
        dot = warp_sum(dot);
    }
    for (int d = lane(); d < K; d += warp_size) {
        float dy = 0.f;
        if (used) {
            for (int g = 0; g < group; ++g) dy += from[i64(g) * K + d];
            if (l2norm) dy = (dy - to_float(x[row * K + d]) * inverse * dot) * inverse;
        }
        out[row * K + d] = from_float<T>(dy);
    }
}

// wide float [tokens,HV]; x, out [tokens,HV] of T or float.
template <class T>
VK_KERNEL_BOUNDS(128, 1)
void backward_beta(const float* wide, const void* x, void* out, const i64* offsets, i32 N, i64 tokens, i32 HV, i32 kind,
                   i32 is_float) {
    const i64 i = i64(bidx()) * 128 + tid();
    if (i >= tokens * HV) return;
    float y = 0.f;
    if (i / HV < offsets[N]) {
        y = wide[i];
        if (kind != beta_given) {
            const float a = load_either<T>(x, i, is_float);
            y *= sigmoid(a) * sigmoid(-a) * (kind == beta_twice_sigmoid ? 2.f : 1.f);
        }
    }
    if (is_float) static_cast<float*>(out)[i] = y;
    else static_cast<T*>(out)[i] = from_float<T>(y);
}

constexpr int gate_tile = 64;  // tokens of one block

// One block per (tile of tokens, value head). wide: float [tokens,HV,K], gradient of g. out: gradient of the raw gate, of its
// dtype. Partial sums: bias_part float [tiles,HV,K], log_part float [tiles,HV].
template <class T>
VK_KERNEL_BOUNDS(128, 1)
void backward_gate(const float* wide, void* out, const void* raw, const float* A_log, const float* dt_bias,
                   float lower_bound, i32 kind, i32 g_is_float, const i64* offsets, i32 N, i64 tokens, i32 HV, i32 K,
                   float* bias_part, float* log_part) {
    VK_DYN_SHARED(shared);
    float* const sums = reinterpret_cast<float*>(shared);  // [4]
    const int head = bidx() % HV;
    const i64 tile = bidx() / HV, begin = tile * gate_tile, end = min(begin + gate_tile, tokens), used = offsets[N];
    const float rate = A_log ? exp(A_log[head]) : 1.f;
    Sum all;
    for (int d = tid(); d < K; d += 128) {
        const float bias = dt_bias ? dt_bias[i64(head) * K + d] : 0.f;
        Sum column;
        for (i64 t = begin; t < end; ++t) {
            const i64 i = (t * HV + head) * K + d;
            float dz = 0.f;
            if (t < used) {
                const float dg = wide[i], z = load_either<T>(raw, i, g_is_float) + bias;
                float dlog = 0.f;
                if (dg != 0.f) {  // a closed gate has dg = 0 and may have an unbounded slope
                    if (kind == gate_softplus) {
                        dz = -dg * rate * sigmoid(z);
                        dlog = -dg * rate * (fmax(z, 0.f) + log1p(exp(-fabs(z))));
                    } else {
                        const float y = rate * z, dy = dg * lower_bound * sigmoid(y) * sigmoid(-y);
                        dz = dy * rate;
                        dlog = dy * y;
                    }
                }
                all.add(dlog);
                column.add(dz);
            }
            if (g_is_float) static_cast<float*>(out)[i] = dz;
            else static_cast<T*>(out)[i] = from_float<T>(dz);
        }
        bias_part[(tile * HV + head) * K + d] = column.value();
    }
    const float x = warp_sum(all.value());
    if (lane() == 0) sums[warp()] = x;
    sync();
    if (tid() == 0) log_part[tile * HV + head] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// part float [tiles,columns] -> out float [columns], one thread per column.
VK_KERNEL_BOUNDS(128, 1) void sum_tiles(const float* part, float* out, i64 tiles, i64 columns) {
    const i64 i = i64(bidx()) * 128 + tid();
    if (i >= columns) return;
    Sum sum;
    for (i64 t = 0; t < tiles; ++t) sum.add(part[t * columns + i]);
    out[i] = sum.value();
}

}  // namespace vk
