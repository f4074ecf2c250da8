// Vectors of this machine's width, in the compiler's portable vector types, and the element types stored in them.
//
// Compiled once per instruction set (see build.py); only what a portable expression can't reach is conditional.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 12;  // x 2 vectors: 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileRows = 4;  // x 2 vectors: 8 of 16 registers accumulate
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 8;  // x 2 vectors: 16 of 32 registers accumulate
#endif
// Columns of one panel of packed weights: two vectors.
constexpr int kPanel = 2 * kLanes;

// Aligned to elements only, so that dereferencing compiles to an unaligned load.
typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

struct bf16 {
  uint16_t bits;
};

template <typename T>
struct Element;
template <>
struct Element<float> {
  static constexpr int kPack = 1;  // values of neighbouring depth that lie side by side in a panel
};
template <>
struct Element<bf16> {
  static constexpr int kPack = 2;
};

inline Floats splat(float x) { return x - Floats{}; }
inline Floats as_floats(Words x) { return (Floats)x; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To the nearest, ties to even; a NaN stays one.
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = x == x ? static_cast<uint16_t>(rounded) : static_cast<uint16_t>((bits >> 16) | 0x40);
}

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline Words extend(Halves x) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)x);  // which GCC 12 doesn't find by itself
#else
  return __builtin_convertvector(x, Words);
#endif
}

inline Words extend(Bytes x) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}

inline Halves load_halves(const bf16* from) { return *reinterpret_cast<const Halves*>(from); }
inline Floats load(const bf16* from) { return as_floats(extend(load_halves(from)) << 16); }

inline void store(float* to, Floats x) { *reinterpret_cast<Floats*>(to) = x; }
// Rounded to bfloat16, in the upper half of each word; what is in the lower half is left there.
inline Words round_to_upper(Floats x) {
  Words bits = (Words)x;
  Words is_number = (Words)(x == x);
  return ((bits + 0x7fff + ((bits >> 16) & 1)) & is_number) | ((bits | 0x400000) & ~is_number);
}

inline void store(bf16* to, Floats x) {
#if defined(__AVX512BF16__)
  __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &halves, 32);
#else
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(round_to_upper(x) >> 16, Halves);
#endif
}

// Both rounded to bfloat16 and side by side in each word, `low` in its lower half.
inline Words interleave(Floats low, Floats high) {
#if defined(__AVX512BF16__)
  constexpr auto order = [] {
    struct { uint16_t at[32]; } order{};
    for (int lane = 0; lane < 16; ++lane) {
      order.at[2 * lane] = static_cast<uint16_t>(lane);
      order.at[2 * lane + 1] = static_cast<uint16_t>(16 + lane);
    }
    return order;
  }();
  __m512i index;
  std::memcpy(&index, order.at, 64);
  return (Words)_mm512_permutexvar_epi16(index, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  return (round_to_upper(low) >> 16) | (round_to_upper(high) & 0xffff0000u);
#endif
}

// sum += a pair of bfloat16 in `x` times those in each word of `weights`.
inline Floats multiply_pairs(Floats sum, uint32_t x, Words weights) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)), (__m512bh)weights);
#else
  sum += as_floats(Words{} + (x << 16)) * as_floats(weights << 16);
  return sum + as_floats(Words{} + (x & 0xffff0000u)) * as_floats(weights & 0xffff0000u);
#endif
}

// The second one, should one be a NaN.
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// Folds the upper half of `x` onto the lower, until one lane holds them all.
template <int kWidth = kLanes, typename Combine>
inline float reduce(Floats x, Combine combine) {
  if constexpr (kWidth == 1) {
    return x[0];
  } else {
    Words upper;
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) upper[lane] = (lane + kWidth / 2) % kLanes;
    return reduce<kWidth / 2>(combine(x, __builtin_shuffle(x, upper)), combine);
  }
}

inline float sum(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return a + b; });
}

inline float largest(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return max(a, b); });
}

// e^x for x <= 88 to about 1e-7 of its value; below -87, and for -inf, 0; of a NaN, a NaN.
// 2^n times the Taylor polynomial on the rest, which is at most ln 2 / 2.
[[gnu::always_inline]] inline Floats exp(Floats x) {
  Floats clamped = max(splat(-87.0f), x);
  Ints n = __builtin_convertvector(clamped * 1.44269504f + (clamped < 0 ? splat(-0.5f) : splat(0.5f)), Ints);
  Floats whole = __builtin_convertvector(n, Floats);
  Floats r = clamped - whole * 0.693145752f - whole * 1.42860677e-6f;
  Floats p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Floats result = p * (Floats)((n + 127) << 23);
  return x < -87.0f ? splat(0) : result;
}

inline Floats silu(Floats x) {
  // exp's argument is bounded, or a large negative x would overflow; silu(-88) is 0 in float32 already.
  Floats bounded = max(x, splat(-87.0f));
  return x / (1.0f + exp(-bounded));
}

// Of `kLanes` rows of `kLanes` words, columns that lie `kSize` apart change places with rows that do; the masks
// are constants, and the rows stay in registers, only with everything known to the compiler.
template <int kSize>
[[gnu::always_inline]] inline void transpose_from(Words (&rows)[kLanes]) {
  if constexpr (kSize < kLanes) {
    Words low, high;
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) {
      low[lane] = lane & kSize ? kLanes + lane - kSize : lane;
      high[lane] = lane & kSize ? kLanes + lane : lane + kSize;
    }
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      if (row & kSize) continue;
      Words a = rows[row], b = rows[row + kSize];
      rows[row] = __builtin_shuffle(a, b, low);
      rows[row + kSize] = __builtin_shuffle(a, b, high);
    }
    transpose_from<kSize * 2>(rows);
  }
}

// Turns rows into columns.
[[gnu::always_inline]] inline void transpose(Words (&rows)[kLanes]) { transpose_from<1>(rows); }

}  // namespace
