// x @ weight.T with weights packed into panels, one thread's share at a time.
//
// Every element of the result is summed along the depth in the same order whatever the number of rows, so a row's
// result doesn't depend on its batch.
#pragma once

#include <omp.h>

#include "weights.h"

namespace {

// Rows that share one pass over a panel, a multiple of each kTileRows; their sums stay in the L1 cache.
constexpr int kRowBlock = 96;

// sums[rows][kPanel] (+)= a[rows][depth] @ panel. `lda` counts elements, `depth` is a multiple of kPack.
// `ahead`, if any, is as large as the panel and fetched meanwhile.
template <int kRows, typename T>
inline void multiply_tile(const T* a, ptrdiff_t lda, const T* panel, int depth, float* sums, bool add,
                          const T* ahead = nullptr) {
  constexpr int kPack = Element<T>::kPack;
  Floats sum[kRows][2];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    sum[row][0] = add ? load(sums + row * kPanel) : splat(0);
    sum[row][1] = add ? load(sums + row * kPanel + kLanes) : splat(0);
  }
  for (int k = 0; k < depth; k += kPack) {
    const ptrdiff_t place = static_cast<ptrdiff_t>(k) * kPanel;
    const T* at = panel + place;
    if (ahead)
      for (int byte = 0; byte < kPack * kPanel * static_cast<int>(sizeof(T)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(ahead + place) + byte, 0, 2);
    if constexpr (kPack == 1) {
      Floats b0 = load(at), b1 = load(at + kLanes);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        Floats x = splat(a[row * lda + k]);
        sum[row][0] += x * b0;
        sum[row][1] += x * b1;
      }
    } else {
      Words b0 = *reinterpret_cast<const Words*>(at);
      Words b1 = *reinterpret_cast<const Words*>(at + 2 * kLanes);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        uint32_t pair;
        std::memcpy(&pair, a + row * lda + k, 4);
        sum[row][0] = multiply_pairs(sum[row][0], pair, b0);
        sum[row][1] = multiply_pairs(sum[row][1], pair, b1);
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    store(sums + row * kPanel, sum[row][0]);
    store(sums + row * kPanel + kLanes, sum[row][1]);
  }
}

template <typename T, int kRows = kTileRows>
inline void multiply_rest(int rows, const T* a, ptrdiff_t lda, const T* panel, int depth, float* sums, bool add) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<kRows>(a, lda, panel, depth, sums, add);
    multiply_rest<T, kRows - 1>(rows, a, lda, panel, depth, sums, add);
  }
}

// The same for any number of rows. The first rows wait for the panel to come from memory; while the second ones
// find it in the cache, what lies `ahead` is fetched.
template <typename T>
inline void multiply(int rows, const T* a, ptrdiff_t lda, const T* panel, int depth, float* sums, bool add,
                     const T* ahead = nullptr) {
  for (int first = 0; rows > kTileRows; rows -= kTileRows, a += kTileRows * lda, sums += kTileRows * kPanel) {
    multiply_tile<kTileRows>(a, lda, panel, depth, sums, add, first == kTileRows ? ahead : nullptr);
    first += kTileRows;
  }
  multiply_rest<T>(rows, a, lda, panel, depth, sums, add);
}

// Multiplies all rows of x [rows][depth] with all panels, and hands each block of sums to
// `finish(first_row, rows, panel, sums)`. Called by every thread of a parallel region, which share the panels;
// ends with a barrier.
template <typename T, typename Weight, typename Finish>
void matmul(const T* x, int rows, Weight weight, int num_panels, Finish finish) {
  const int depth = weight.depth;
  for (int first = 0; first < rows; first += kRowBlock) {
    const int count = rows - first < kRowBlock ? rows - first : kRowBlock;
#pragma omp for schedule(dynamic, 1)
    for (int panel = 0; panel < num_panels; ++panel) {
      alignas(64) float sums[kRowBlock * kPanel];
      if (weight.multiply_few(x + first * static_cast<ptrdiff_t>(depth), count, panel, sums)) {
        finish(first, count, panel, sums);
        continue;
      }
      alignas(64) T scratch[Weight::kScratch];
      for (int k = 0; k < depth; k += Weight::kDepthBlock) {
        const int part = depth - k < Weight::kDepthBlock ? depth - k : Weight::kDepthBlock;
        // Most likely this thread's next one.
        const int next = panel + omp_get_num_threads();
        multiply(count, x + first * static_cast<ptrdiff_t>(depth) + k, depth, weight.part(panel, k, part, scratch), part,
                 sums, k > 0, next < num_panels ? weight.ahead(next, k) : nullptr);
      }
      finish(first, count, panel, sums);
    }
  }
}

// The same for a weight in any format. Only bfloat16 is multiplied with quantised ones.
template <typename T, typename Finish>
void matmul(const T* x, int rows, const void* weight, Format format, int depth, int num_panels, Finish finish) {
  if constexpr (Element<T>::kPack == 2) {
    const uint8_t* data = static_cast<const uint8_t*>(weight);
    if (format == kQ8_0) return matmul(x, rows, QuantisedWeight<8>{data, depth}, num_panels, finish);
    if (format != kDense) return matmul(x, rows, QuantisedWeight<4>{data, depth}, num_panels, finish);
  }
  matmul(x, rows, DenseWeight<T>{static_cast<const T*>(weight), depth}, num_panels, finish);
}

}  // namespace
