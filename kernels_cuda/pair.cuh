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
// x = hi + lo in bf16: float's range, relative error 2^-17.
VK_DEVICE void split_pair(u32& hi, u32& lo, float x, float y) {
    hi = bf16x2_round(x, y);
    lo = bf16x2_round(x - as_float(hi << 16), y - as_float(hi & 0xffff0000u));
}

template <class T> VK_DEVICE Pair<T> zero_pair() { return round_pair<T>(0.f, 0.f); }

// The first `count` (any number) of two elements at p, the rest zero. Whole: p is aligned to two elements and count is even,
// so that one access does.
template <bool Whole, class T> VK_DEVICE Pair<T> load_pair(const T* p, int count) {
    if constexpr (Whole) return count > 0 ? *reinterpret_cast<const Pair<T>*>(p) : zero_pair<T>();
    else return round_pair<T>(count > 0 ? to_float(p[0]) : 0.f, count > 1 ? to_float(p[1]) : 0.f);
}
template <bool Whole, class T> VK_DEVICE void store_pair(T* p, const Pair<T>& x, int count) {
    if constexpr (Whole) {
        if (count > 0) *reinterpret_cast<Pair<T>*>(p) = x;
    } else {
        const pair32 y = unpack<T>(x);
        if (count > 0) p[0] = from_float<T>(y.x);
        if (count > 1) p[1] = from_float<T>(y.y);
    }
}

}  // namespace vk
