// Sequences -> the table of chunks of chunks.cuh, on the device, and zeros in rows of no sequence.
//
// No number of this leaves the device, so a launch never waits for one: grids are sized by the upper bound
// floor(T/C) + N of the number of chunks. Offsets out of order or beyond T break the caller's contract; they are cut to
// [0, T] and made non-decreasing here, so that no later kernel can leave its tensors.
#include "chunks.cuh"

namespace vk {

constexpr int layout_threads = 512;

// cu_seqlens [N+1] of int32 or int64; null for N rows of T tokens.
struct Offsets {
    const void* cu_seqlens;
    i32 is_64bit;
    i64 T;
    VK_DEVICE i64 operator[](i32 i) const {
        if (!cu_seqlens) return i * T;
        const i64 x = is_64bit ? static_cast<const i64*>(cu_seqlens)[i] : static_cast<const i32*>(cu_seqlens)[i];
        return min(x, T);
    }
};

// One block. Thread t owns a run of consecutive sequences: a running maximum over offsets, then a sum of chunk counts.
VK_KERNEL_BOUNDS(layout_threads, 1)
void sequence_offsets(const void* cu_seqlens, i32 is_64bit, i64 T, i32 N, i32 C, i64* offsets, i32* first_chunk) {
    VK_DYN_SHARED(smem);
    i64* const carry = reinterpret_cast<i64*>(smem);  // [layout_threads]
    const Offsets given{cu_seqlens, is_64bit, T};
    const i32 run = ceil_div(N + 1, layout_threads), begin = min(tid() * run, N + 1), end = min(begin + run, N + 1);

    i64 top = 0;
    for (i32 i = begin; i < end; ++i) top = max(top, given[i]);
    carry[tid()] = top;
    sync();
    top = 0;
    for (int t = 0; t < tid(); ++t) top = max(top, carry[t]);
    for (i32 i = begin; i < end; ++i) {
        top = max(top, given[i]);
        offsets[i] = top;
    }
    sync();  // offsets[end] belongs to the next thread, and carry is used again

    i64 count = 0;
    for (i32 i = begin; i < min(end, N); ++i) count += (offsets[i + 1] - offsets[i] + C - 1) / C;
    carry[tid()] = count;
    sync();
    count = 0;
    for (int t = 0; t < tid(); ++t) count += carry[t];
    for (i32 i = begin; i < end; ++i) {
        first_chunk[i] = i32(count);
        if (i < N) count += (offsets[i + 1] - offsets[i] + C - 1) / C;
    }
}

// One thread per entry of the table: the last n with first_chunk[n] <= entry is the sequence that owns it.
VK_KERNEL_BOUNDS(128, 1)
void chunk_table(const i64* offsets, const i32* first_chunk, i32 N, i32 C, i32 entries, Chunk* chunks) {
    const i64 entry = i64(bidx()) * nthreads() + tid();
    if (entry >= entries) return;
    i32 low = 0, high = N;
    while (low < high) {
        const i32 middle = low + (high - low + 1) / 2;
        if (first_chunk[middle] <= entry) low = middle;
        else high = middle - 1;
    }
    Chunk c{0, 0, -1};
    if (low < N) {
        c.token = offsets[low] + (entry - first_chunk[low]) * C;
        c.rows = i32(min(i64(C), offsets[low + 1] - c.token));
        c.sequence = low;
    }
    chunks[entry] = c;
}

// Zero bytes in rows ends[N] .. total-1 of a buffer: of tokens (ends = offsets) or of chunks (ends = first_chunk).
template <class Index>
VK_KERNEL_BOUNDS(128, 1) void clear_tail(u8* buffer, i64 row_bytes, const Index* ends, i32 N, i64 total) {
    const i64 begin = ends[N] * row_bytes, end = total * row_bytes, step = i64(gdimx()) * nthreads();
    const i64 self = i64(bidx()) * nthreads() + tid();
    if (row_bytes % 16 == 0 && aligned16(buffer)) {
        for (i64 i = begin + 16 * self; i < end; i += 16 * step) st128(buffer + i, u128{{0, 0, 0, 0}});
    } else {
        for (i64 i = begin + self; i < end; i += step) buffer[i] = 0;
    }
}

}  // namespace vk
