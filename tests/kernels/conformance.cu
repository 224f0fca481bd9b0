// One small kernel per primitive of vk.cuh and tile.cuh. Each only moves registers to and from global memory, so that a
// test can compare the bits with plain loops, for the host twin and for the device.
#include "../../kernels_cuda/gate.cuh"
#include "tile.cuh"

namespace vk {

VK_KERNEL void position(i32* out) {  // [blocks, threads, 12]
    const int block = (bidz() * gdimy() + bidy()) * gdimx() + bidx();
    i32* const p = out + (block * nthreads() + tid()) * 12;
    const i32 row[12] = {tid(), lane(), warp(), nthreads(), bidx(), bidy(), bidz(), gdimx(), gdimy(), gdimz(), 0, 0};
    for (int i = 0; i < 12; ++i) p[i] = row[i];
}

template <class T>
VK_KERNEL void convert(const float* x, T* rounded, float* back, u32* packed, float* unpacked, i32 n) {
    for (int i = bidx() * nthreads() + tid(); i < n; i += gdimx() * nthreads()) {
        rounded[i] = from_float<T>(x[i]);
        back[i] = to_float(rounded[i]);
        if constexpr (is_16bit<T>) {
            packed[i] = pack2<T>(x[i], x[(i + 1) % n]);
            unpack2<T>(packed[i], unpacked[2 * i], unpacked[2 * i + 1]);
        }
    }
}

template <class T> VK_KERNEL void widen(const T* x, float* out, i32 n) {
    for (int i = bidx() * nthreads() + tid(); i < n; i += gdimx() * nthreads()) out[i] = to_float(x[i]);
}

// Every lane has its own operand.
template <class X> VK_KERNEL void exchange(const X* x, const i32* operand, X* out) {  // [4, threads]
    const int t = tid(), n = nthreads();
    out[t] = shfl(x[t], operand[t]);
    out[n + t] = shfl_xor(x[t], operand[t]);
    out[2 * n + t] = shfl_up(x[t], operand[t]);
    out[3 * n + t] = shfl_down(x[t], operand[t]);
}

VK_KERNEL void reduce(const float* x, float* out) {  // [2, threads]
    out[tid()] = warp_sum(x[tid()]);
    out[nthreads() + tid()] = warp_max(x[tid()]);
}

// words [threads] go to shared memory; lane l points at 16-byte row rows[l].
template <int Matrices, bool Transposed> VK_KERNEL void matrices(const u32* words, const i32* rows, u32* out) {
    VK_DYN_SHARED(smem);
    u32* const s = reinterpret_cast<u32*>(smem);
    for (int i = 0; i < 8; ++i) s[8 * tid() + i] = words[8 * tid() + i];
    sync();
    const void* const row = smem + 16 * rows[tid()];
    u32 r[Matrices];
    if constexpr (Matrices == 4 && Transposed) ldmatrix_x4_trans(r, row);
    if constexpr (Matrices == 4 && !Transposed) ldmatrix_x4(r, row);
    if constexpr (Matrices == 2 && Transposed) ldmatrix_x2_trans(r, row);
    if constexpr (Matrices == 2 && !Transposed) ldmatrix_x2(r, row);
    for (int j = 0; j < Matrices; ++j) out[tid() * Matrices + j] = r[j];
}

template <class T> VK_KERNEL void multiply(const u32* a, const u32* b, float* d) {  // registers of each thread
    u32 ra[4], rb[2];
    float rd[4];
    for (int i = 0; i < 4; ++i) ra[i] = a[4 * tid() + i], rd[i] = d[4 * tid() + i];
    for (int i = 0; i < 2; ++i) rb[i] = b[2 * tid() + i];
    if constexpr (is_same<T, tf32>) mma1688(rd, ra, rb);
    else mma16816<T>(rd, ra, rb);
    for (int i = 0; i < 4; ++i) d[4 * tid() + i] = rd[i];
}

// Rows of vec<T> + 1 elements, at any alignment.
template <class T> VK_KERNEL void elements(const T* x, T* out, const i32* counts) {
    const int i = tid() * (vec<T> + 1);
    u128 v = ld_elements(x + i, counts[tid()]);
    for (int e = 0; e < vec<T>; ++e) set<T>(v, e, get<T>(v, e));
    st_elements(out + i, v, counts[nthreads() + tid()]);
}

VK_KERNEL void vectors(const u32* x, u32* out) { st128(out + 4 * tid(), ld128(x + 4 * tid())); }

// Three groups in flight; each is read after its own wait. pred 0 fills with zeros and never reads its source.
VK_KERNEL void copies(const u32* x, const i32* pred, u32* out) {  // [3, threads, 4]
    VK_DYN_SHARED(smem);
    const int n = nthreads(), t = tid();
    for (int g = 0; g < 3; ++g) {
        cp_async16(smem + 16 * (g * n + t), x + 4 * (g * n + t), pred[g * n + t] != 0);
        cp_async_commit();
    }
    for (int g = 0; g < 3; ++g) {
        if (g == 0) cp_async_wait<2>();
        if (g == 1) cp_async_wait<1>();
        if (g == 2) cp_async_wait<0>();
        sync();
        const int other = (t + 1) % n;  // what another thread copied
        st128(out + 4 * (g * n + t), ld128(smem + 16 * (g * n + other)));
    }
}

VK_KERNEL void math(const float* x, const float* y, const float* z, float* out, i32 n) {  // [12, n]
    for (int i = bidx() * nthreads() + tid(); i < n; i += gdimx() * nthreads()) {
        float* const p = out + i;
        p[0 * n] = exp2(x[i]);
        p[1 * n] = log2f(x[i]);
        p[2 * n] = exp(x[i]);
        p[3 * n] = log1p(x[i]);
        p[4 * n] = rsqrtf(x[i]);
        p[5 * n] = sqrt_rn(x[i]);
        p[6 * n] = fma(x[i], y[i], z[i]);
        p[7 * n] = fmax(x[i], y[i]);
        p[8 * n] = fmin(x[i], y[i]);
        p[9 * n] = fabs(x[i]);
        p[10 * n] = exp2_close(-fabs(x[i]));
        p[11 * n] = exp2_close(x[i]);
    }
}

VK_KERNEL void integers(const i32* x, i32* out) {
    const int a = x[2 * tid()], b = x[2 * tid() + 1];
    i32* const p = out + 6 * tid();
    p[0] = min(a, b), p[1] = max(a, b), p[2] = ceil_div(a, b), p[3] = round_up(a, b);
    p[4] = i32(min(i64(a), i64(b))), p[5] = i32(max(i64(a), i64(b)));
}

// C = C0 + A B, A and B in the form F, read and written in global memory as dense matrices.
template <class T, int M, int N, int K, Form F>
VK_KERNEL void product(const T* A, const T* B, const float* C0, float* C) {
    VK_DYN_SHARED(smem);
    constexpr bool ta = F == TN || F == TT, tb = F == NT || F == TT;
    constexpr int ar = ta ? K : M, ac = ta ? M : K, br = tb ? N : K, bc = tb ? K : N;
    constexpr int la = pitch<T>(ac), lb = pitch<T>(bc);
    T* const a = reinterpret_cast<T*>(smem);
    T* const b = a + ar * la;
    for (int i = tid(); i < ar * ac; i += nthreads()) a[i / ac * la + i % ac] = A[i];
    for (int i = tid(); i < br * bc; i += nthreads()) b[i / bc * lb + i % bc] = B[i];
    sync();
    float acc[M / 16][N / 8][4];
    for_each_acc(acc, [&](int r, int c, float& x) { x = C0[r * N + c]; });
    warp_mma<T, M, N, K, F>(acc, a, la, b, lb);
    for_each_acc(acc, [&](int r, int c, float& x) { C[r * N + c] = x; });
}

// C = round(A B) D without shared memory between the products (16-bit), and round(A B) through store_acc.
template <class T> VK_KERNEL void chain(const T* A, const T* B, const T* D, T* AB, float* C) {  // all 16 x 16
    VK_DYN_SHARED(smem);
    constexpr int ld = pitch<T>(16);
    T* const a = reinterpret_cast<T*>(smem);
    T *const b = a + 16 * ld, *const d = b + 16 * ld, *const ab = d + 16 * ld;
    for (int i = tid(); i < 256; i += nthreads()) {
        a[i / 16 * ld + i % 16] = A[i];
        b[i / 16 * ld + i % 16] = B[i];
        d[i / 16 * ld + i % 16] = D[i];
    }
    sync();
    float acc[1][2][4], out[1][2][4];
    clear(acc);
    clear(out);
    warp_mma<T, 16, 16, 16>(acc, a, ld, b, ld);
    store_acc(ab, ld, acc);
    syncwarp();
    if constexpr (is_16bit<T>) {
        u32 fa[4], fd[4];
        acc_to_a<T>(fa, acc[0][0], acc[0][1]);
        load_b2<false>(fd, d, ld, 0, 0);
        const u32 d0[2] = {fd[0], fd[1]}, d1[2] = {fd[2], fd[3]};
        mma16816<T>(out[0][0], fa, d0);
        mma16816<T>(out[0][1], fa, d1);
    } else {
        warp_mma<T, 16, 16, 16>(out, ab, ld, d, ld);
    }
    for_each_acc(out, [&](int r, int c, float& x) { C[r * 16 + c] = x; });
    for (int i = lane(); i < 256; i += warp_size) AB[i] = ab[i / 16 * ld + i % 16];
}

// A tile of 16 x 32 at G, of which rows x columns exist.
template <class T> VK_KERNEL void tile(const T* G, i64 row_stride, i32 rows, i32 columns, T* out) {
    VK_DYN_SHARED(smem);
    constexpr int ld = pitch<T>(32);
    T* const s = reinterpret_cast<T*>(smem);
    load_tile<T, 16, 32>(s, ld, G, row_stride, rows, columns, tid(), nthreads());
    cp_async_commit();
    cp_async_wait<0>();
    sync();
    for (int i = tid(); i < 16 * 32; i += nthreads()) out[i] = s[i / 32 * ld + i % 32];
}

}  // namespace vk
