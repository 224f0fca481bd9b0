// What happens to g, beta, q and k before the chunked algorithm.
//
//   log       g = x                     softplus  g = -exp(A_log) log(1 + exp(x + dt_bias))
//   bounded   g = lower_bound sigmoid(exp(A_log) (x + dt_bias))
//   q, k <- x / sqrt(sum x^2 + 1e-6)    beta <- sigmoid(beta) or 2 sigmoid(beta)
//
// 16-bit calls keep decays in units of log2, so that exp Gamma is one exp2. Float calls keep natural logs: a factor log2(e)
// would round a decay of e^-50 by 50 ulp.
#pragma once
#include "vk.cuh"

namespace vk {

enum GateKind { gate_log = 1, gate_softplus = 2, gate_bounded = 3 };
enum BetaKind { beta_given = 0, beta_sigmoid = 1, beta_twice_sigmoid = 2 };

constexpr float log2_e = 1.44269504f;
constexpr float norm_eps = 1e-6f;

// strongest_decay is in units of log2. 2^-152 is 0 in float, subnormals included, so a decay cut here acts as any stronger one does, -inf (a hard reset)
// among them, and differences of sums of decays stay finite.
constexpr float strongest_decay = -152.f;

struct Gate {
    const void* g;         // [B,T,HV,K]
    const float* A_log;    // [HV] or null: multiplier 1
    const float* dt_bias;  // [HV,K] or null: 0
    float lower_bound;
    i32 kind;              // GateKind
    i32 g_is_float;        // else g has the dtype of q
};

template <class T> VK_DEVICE float load_either(const void* p, i64 i, int is_float) {
    return is_float ? static_cast<const float*>(p)[i] : to_float(static_cast<const T*>(p)[i]);
}

VK_DEVICE float sigmoid(float x) { return 1.f / (1.f + exp(-x)); }

VK_DEVICE float gate_rate(const Gate& gate, int head) { return gate.A_log ? exp(gate.A_log[head]) : 1.f; }

template <class T> inline constexpr float log_unit = is_16bit<T> ? log2_e : 1.f;  // of one natural log
template <class T> inline constexpr float strongest_log = strongest_decay / log2_e * log_unit<T>;

// Log of the decay of one token and channel, in log_unit<T>. `rate` = exp(A_log), `bias` = dt_bias.
template <class T> VK_DEVICE float log_decay(const Gate& gate, float x, float rate, float bias) {
    float g = x;
    if (gate.kind == gate_softplus) {
        const float z = x + bias;
        g = -rate * (fmax(z, 0.f) + log1p(exp(-fabs(z))));
    } else if (gate.kind == gate_bounded) {
        g = gate.lower_bound * sigmoid(rate * (x + bias));
    }
    g *= log_unit<T>;
    return g < strongest_log<T> ? strongest_log<T> : g;  // NaN stays NaN
}

// A decay from its log. The second may flush below 2^-126 to 0.
template <class T> VK_DEVICE float exp_decay(float log) { return is_16bit<T> ? exp2(log) : exp(log); }
template <class T> VK_DEVICE float exp_decay_flush(float log) { return is_16bit<T> ? exp2_flush(log) : exp(log); }

// 2^x within 1 ulp for x <= 0, by a Taylor series: for the few factors that a whole state is multiplied by.
VK_DEVICE float exp2_close(float x) {
    if (x > 0.f) return exp2(x);  // no decay: only outside the stable domain
    if (x <= -150.f) return 0.f;
    if (x != x) return x;
    const i32 n = i32(x - 0.5f);
    const float f = x - float(n);  // in [-0.5, 0.5], exact
    float y = 1.5252734e-5f;
    y = fma(y, f, 1.5403530e-4f);
    y = fma(y, f, 1.3333558e-3f);
    y = fma(y, f, 9.6181291e-3f);
    y = fma(y, f, 5.5504109e-2f);
    y = fma(y, f, 2.4022651e-1f);
    y = fma(y, f, 6.9314718e-1f);
    y = fma(y, f, 1.f);
    const i32 normal = max(n, -126);
    return y * as_float(u32(normal + 127) << 23) * as_float(u32(n - normal + 127) << 23);
}

VK_DEVICE float write_strength(float x, int kind) {
    if (kind == beta_given) return x;
    return kind == beta_sigmoid ? sigmoid(x) : 2.f * sigmoid(x);
}

// 1 / sqrt(sum x^2 + eps) of one row of n elements; a whole warp, every lane gets the result.
template <class T> VK_DEVICE float inverse_norm(const T* row, int n) {
    float sum = 0.f;
    for (int d = lane(); d < n; d += warp_size) {
        const float x = to_float(row[d]);
        sum = fma(x, x, sum);
    }
    return 1.f / sqrt_rn(warp_sum(sum) + norm_eps);
}

}  // namespace vk
