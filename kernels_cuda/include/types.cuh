// The types of vk.cuh. Nothing is included: NVRTC has no <cstdint>, and the toolkit's 16-bit headers have no host twin.
#pragma once

namespace vk {

using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// 16-bit floats are bits: arithmetic happens in float, rounding happens where from_float or pack2 is written.
struct f16 { u16 x; };
struct bf16 { u16 x; };
// What tensor cores read of a float: sign, 8 bits of exponent, 10 of fraction. They ignore the 13 bits below.
struct tf32 { float x; };

struct alignas(16) u128 { u32 w[4]; };

template <class A, class B> struct same_type { static constexpr bool value = false; };
template <class A> struct same_type<A, A> { static constexpr bool value = true; };
template <class A, class B> inline constexpr bool is_same = same_type<A, B>::value;

template <bool, class A, class B> struct Either { using type = A; };
template <class A, class B> struct Either<false, A, B> { using type = B; };

template <class T> inline constexpr bool is_16bit = is_same<T, f16> || is_same<T, bf16>;

constexpr int warp_size = 32;

}  // namespace vk
