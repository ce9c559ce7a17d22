// Casts between floating-point types, the same bits on host and device: to nearest even as torch
// does, by way of float32 as torch does, and every NaN becomes the positive quiet one (torch's own
// depends on the vector path that it takes).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/hd.h"

namespace rlcore::reshard {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Raw16 {
  uint64_t low, high;
};

RL_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

RL_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

RL_HD float widen(double x) { return static_cast<float>(x); }
RL_HD float widen(float x) { return x; }
RL_HD float widen(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
RL_HD float widen(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rest = x.bits & 0x7fff;
  const uint32_t normal = (rest << 13) + (112u << 23) + (rest >= 0x7c00 ? 112u << 23 : 0u);
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  return float_of(sign | (rest < 0x0400 ? small : normal));
}

RL_HD BFloat16 narrow_bfloat16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};
}

RL_HD Float16 narrow_float16(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  // Below 2^-14: adding 0.5 leaves the multiples of 2^-24 in the last bits, rounded by the adder.
  const uint32_t small = bits_of(float_of(a) + 0.5f) - 0x3f000000;
  const uint32_t normal = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
  uint32_t half = a < 0x38800000 ? small : normal;
  half = sign | (a >= 0x47800000 ? 0x7c00 : half);
  return {static_cast<uint16_t>(a > 0x7f800000 ? 0x7e00 : half)};
}

template <class To, class From>
RL_HD To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return narrow_bfloat16(widen(x));
  } else if constexpr (std::is_same_v<To, Float16>) {
    return narrow_float16(widen(x));
  } else {
    const float narrow = widen(x);
    const float y = narrow == narrow ? narrow : float_of(0x7fc00000);
    return static_cast<To>(y);
  }
}

}  // namespace rlcore::reshard
