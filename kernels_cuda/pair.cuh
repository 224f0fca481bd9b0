// Two neighbouring channels of one row: what one lane holds where a warp covers 64 channels.
#pragma once
#include "vk.cuh"

namespace vk {

struct alignas(8) pair32 { float x, y; };

// Packed in one register for 16-bit T.
template <class T> struct PairOf { using type = u32; };
template <> struct PairOf<float> { using type = pair32; };
template <class T> using Pair = typename PairOf<T>::type;

template <class T> VK_DEVICE pair32 unpack(const Pair<T>& p) {
    if constexpr (is_16bit<T>) {
        pair32 x;
        unpack2<T>(p, x.x, x.y);
        return x;
    } else {
        return p;
    }
}
template <class T> VK_DEVICE Pair<T> round_pair(float x, float y) {
    if constexpr (is_16bit<T>) return pack2<T>(x, y);
    else return pair32{x, y};
}
template <class T> VK_DEVICE Pair<T> zero_pair() { return round_pair<T>(0.f, 0.f); }

template <class T> VK_DEVICE bool pair_aligned(const void* p) { return (reinterpret_cast<u64>(p) & (2 * sizeof(T) - 1)) == 0; }

// The first `count` (any number) of two elements at p, the rest zero; `aligned`: p is pair_aligned, so one access does.
template <class T> VK_DEVICE Pair<T> load_pair(const T* p, int count, bool aligned) {
    if (count <= 0) return zero_pair<T>();
    if (aligned && count > 1) return *reinterpret_cast<const Pair<T>*>(p);
    return round_pair<T>(to_float(p[0]), count > 1 ? to_float(p[1]) : 0.f);
}
template <class T> VK_DEVICE void store_pair(T* p, const Pair<T>& x, int count, bool aligned) {
    if (count <= 0) return;
    if (aligned && count > 1) {
        *reinterpret_cast<Pair<T>*>(p) = x;
        return;
    }
    const pair32 y = unpack<T>(x);
    p[0] = from_float<T>(y.x);
    if (count > 1) p[1] = from_float<T>(y.y);
}

}  // namespace vk
