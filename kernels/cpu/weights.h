// Weight matrices in panels, plain or in blocks of 32 with a scale and an offset, as ggml has them.
//
// A panel holds `kPanel` output features, depth-major, `kPack` neighbouring depths side by side:
// [depth / kPack][kPanel][kPack]. A quantised one holds, per 32 depths, [scale f32 x kPanel][offset f32 x kPanel]
// and then the whole numbers of two neighbouring depths side by side, as nibbles of a byte or as two bytes.
#pragma once

#include "simd.h"

namespace {

constexpr int kGroup = 32;

// As ggml numbers its types.
enum Format : int32_t { kDense = -1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8 };

constexpr int bits_of(Format format) { return format == kQ8_0 ? 8 : 4; }

// What a step of the multiplication reads: `part` gives depths [k, k + count) of a panel, which may lie in `scratch`.
template <typename T>
struct DenseWeight {
  static constexpr int kDepthBlock = 4096;  // a panel's part stays in the L2 cache while row after row is multiplied
  static constexpr int kScratch = 1;
  const T* data;
  int depth;

  const T* part(int panel, int k, int, T*) const {
    return data + (static_cast<ptrdiff_t>(panel) * depth + k) * kPanel;
  }

  const T* ahead(int panel, int k) const { return part(panel, k, 0, nullptr); }

  static bool multiply_few(const T*, int, int, float*) { return false; }
};

template <int kBits>
struct QuantisedWeight {
  static constexpr int kDepthBlock = 256;  // unpacked, it stays in the L1 cache
  static constexpr int kScratch = kDepthBlock * kPanel;
  static constexpr ptrdiff_t kGroupBytes = kPanel * (8 + kGroup * kBits / 8);
  const uint8_t* data;
  int depth;

  const uint8_t* group_at(int panel, int k) const {
    return data + (static_cast<ptrdiff_t>(panel) * (depth / kGroup) + k / kGroup) * kGroupBytes;
  }

  // What unpacks depths 2 * pair and 2 * pair + 1 of a group, from `column` on. Scale and offset are applied in
  // float32 and the weights rounded to bfloat16: what dequantising beforehand gives.
  struct Unpacker {
    Floats scale, offset;
    const uint8_t* pairs;

    Unpacker(const uint8_t* group, int column)
        : scale(load(reinterpret_cast<const float*>(group) + column)),
          offset(load(reinterpret_cast<const float*>(group) + kPanel + column)),
          pairs(group + 8 * kPanel + column * (kBits / 4)) {}

    Words at(int pair) const {
      Ints low, high;
      if constexpr (kBits == 4) {
        const Words both = extend(*reinterpret_cast<const Bytes*>(pairs + pair * kPanel));
        low = (Ints)(both & 15);
        high = (Ints)(both >> 4);
      } else {
        const Words both = extend(*reinterpret_cast<const Halves*>(pairs + pair * 2 * kPanel));
        low = (Ints)(both << 24) >> 24;
        high = (Ints)(both << 16) >> 24;
      }
      return interleave(__builtin_convertvector(low, Floats) * scale + offset,
                        __builtin_convertvector(high, Floats) * scale + offset);
    }
  };

  const bf16* part(int panel, int k, int count, bf16* scratch) const {
    const uint8_t* group = group_at(panel, k);
    uint32_t* to = reinterpret_cast<uint32_t*>(scratch);
    for (int done = 0; done < count; done += kGroup, group += kGroupBytes, to += kGroup / 2 * kPanel)
      for (int column = 0; column < kPanel; column += kLanes) {
        const Unpacker weights(group, column);
#pragma GCC unroll 16
        for (int pair = 0; pair < kGroup / 2; ++pair)
          *reinterpret_cast<Words*>(to + pair * kPanel + column) = weights.at(pair);
      }
    return scratch;
  }

  // One or two rows are multiplied as the weights are unpacked, by the same sums in the same order; whether there
  // were so few.
  bool multiply_few(const bf16* x, int rows, int panel, float* sums) const {
    if (rows == 1) multiply_rows<1>(x, panel, sums);
    if (rows == 2) multiply_rows<2>(x, panel, sums);
    return rows <= 2;
  }

  template <int kRows>
  void multiply_rows(const bf16* x, int panel, float* sums) const {
    Floats sum[kRows][2] = {};
    const uint8_t* group = group_at(panel, 0);
    for (int k = 0; k < depth; k += kGroup, group += kGroupBytes) {
      const Unpacker left(group, 0), right(group, kLanes);
#pragma GCC unroll 16
      for (int pair = 0; pair < kGroup / 2; ++pair) {
        const Words b0 = left.at(pair), b1 = right.at(pair);
        for (int row = 0; row < kRows; ++row) {
          uint32_t both;
          std::memcpy(&both, x + static_cast<ptrdiff_t>(row) * depth + k + 2 * pair, 4);
          sum[row][0] = multiply_pairs(sum[row][0], both, b0);
          sum[row][1] = multiply_pairs(sum[row][1], both, b1);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      store(sums + row * kPanel, sum[row][0]);
      store(sums + row * kPanel + kLanes, sum[row][1]);
    }
  }

  // A third of the bytes and all the unpacking: memory is not what these wait for.
  const bf16* ahead(int, int) const { return nullptr; }
};

inline int padded(int size) { return (size + kPanel - 1) / kPanel * kPanel; }

// Which panels a matrix of `size` output features takes, and which feature a column holds; -1: none, the column is 0.
// With `gated`, the matrix is two halves, gates and ups, and each panel holds `kLanes` gates and their ups.
struct PanelOrder {
  int size;
  bool gated;

  int num_panels() const { return gated ? (size / 2 + kLanes - 1) / kLanes : padded(size) / kPanel; }

  int row(int panel, int column) const {
    if (!gated) return panel * kPanel + column < size ? panel * kPanel + column : -1;
    const int within = panel * kLanes + column % kLanes;
    return within < size / 2 ? within + (column < kLanes ? 0 : size / 2) : -1;
  }
};

template <typename T>
void pack_dense(const T* weight, PanelOrder order, int depth, T* packed) {
  constexpr int kPack = Element<T>::kPack;
#pragma omp parallel for schedule(static)
  for (int panel = 0; panel < order.num_panels(); ++panel)
    for (int column = 0; column < kPanel; ++column) {
      const int row = order.row(panel, column);
      T* to = packed + static_cast<ptrdiff_t>(panel) * depth * kPanel + column * kPack;
      for (int k = 0; k < depth; k += kPack, to += kPack * kPanel)
        if (row >= 0)
          std::memcpy(to, weight + static_cast<ptrdiff_t>(row) * depth + k, 4);
        else
          std::memset(to, 0, 4);
    }
}

// IEEE half precision, as ggml keeps scales.
inline float half(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const float size = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                     : exponent == 31 ? (fraction ? NAN : INFINITY)
                                      : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return bits >> 15 ? -size : size;
}

// `rows`: ggml blocks, [size][depth / kGroup].
inline void pack_quantised(const uint8_t* rows, Format format, PanelOrder order, int depth, uint8_t* packed) {
  const int groups = depth / kGroup;
  const int block_bytes = format == kQ8_0 ? 34 : format == kQ4_1 ? 20 : 18;
  const ptrdiff_t group_bytes = kPanel * (8 + kGroup * bits_of(format) / 8);
#pragma omp parallel for schedule(static)
  for (int panel = 0; panel < order.num_panels(); ++panel)
    for (int group = 0; group < groups; ++group) {
      uint8_t* to = packed + (static_cast<ptrdiff_t>(panel) * groups + group) * group_bytes;
      float* scales = reinterpret_cast<float*>(to);
      uint8_t* numbers = to + 8 * kPanel;
      for (int column = 0; column < kPanel; ++column) {
        const int row = order.row(panel, column);
        if (row < 0) {
          scales[column] = scales[kPanel + column] = 0;
          for (int pair = 0; pair < kGroup / 2; ++pair)
            std::memset(numbers + (pair * kPanel + column) * bits_of(format) / 4, 0,
                        static_cast<size_t>(bits_of(format) / 4));
          continue;
        }
        const uint8_t* block = rows + (static_cast<ptrdiff_t>(row) * groups + group) * block_bytes;
        const float scale = half(block);
        scales[column] = scale;
        scales[kPanel + column] = format == kQ4_1 ? half(block + 2) : format == kQ4_0 ? -8 * scale : 0;
        const uint8_t* from = block + (format == kQ4_1 ? 4 : 2);
        for (int pair = 0; pair < kGroup / 2; ++pair) {
          if (format == kQ8_0) {
            std::memcpy(numbers + (pair * kPanel + column) * 2, from + 2 * pair, 2);
            continue;
          }
          // Bytes hold number i in their low half and number i + 16 in their high one.
          const int first = 2 * pair % 16, shift = 2 * pair < 16 ? 0 : 4;
          const int low = from[first] >> shift & 15, next = from[first + 1] >> shift & 15;
          numbers[pair * kPanel + column] = static_cast<uint8_t>(low | next << 4);
        }
      }
    }
}

}  // namespace
