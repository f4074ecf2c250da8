// Causal attention over a paged KV cache, online softmax over tiles of `kTile` tokens.
//
// Tiles and spans lie at fixed positions of the sequence, whatever the step computes of it. A row's result is
// therefore the same bit for bit in every batch, chunked or not.
// Source: PagedAttention (arXiv 2309.06180), section 4.1; FlashAttention-2 (arXiv 2307.08691), section 3.1.
#pragma once

#include "matmul.h"

namespace {

constexpr int kTile = 64;  // tokens, a multiple of kPanel
// Tokens whose attention is one task; a row's spans are merged in order.
constexpr int kSpan = 256;
constexpr int kQueryRows = 48;  // a multiple of each kTileRows
constexpr int kMaxHeadDim = 256;

template <typename T>
struct PagedCache {
  const T* keys;  // [num_blocks, block_size, num_kv_heads, head_dim], from this KV head's elements on
  const T* values;
  const int32_t* table;
  int block_size;
  ptrdiff_t token_stride;  // elements

  // Where tokens [first, first + count) lie, in elements.
  void locate(int first, int count, ptrdiff_t* offsets) const {
    int block = first / block_size, within = first % block_size;
    for (int token = 0; token < count; ++token) {
      offsets[token] = (static_cast<ptrdiff_t>(table[block]) * block_size + within) * token_stride;
      if (++within == block_size) {
        within = 0;
        ++block;
      }
    }
  }
};

// Asks for rows of one head ahead of their use: they lie far apart, which the hardware doesn't foresee.
template <typename T>
void prefetch(const T* cache, const ptrdiff_t* offsets, int count, int head_dim) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  for (int token = 0; token < count; ++token)
    for (int column = 0; column < head_dim; column += kLine) __builtin_prefetch(cache + offsets[token] + column);
}

// Rows of K as panels of depth head_dim, one per kPanel tokens; absent tokens are 0.
template <typename T>
void pack_keys(const T* cache, const ptrdiff_t* offsets, int count, int head_dim, T* packed) {
  constexpr int kPack = Element<T>::kPack;
  const int words = head_dim / kPack;  // of 4 bytes
  for (int token = 0; token / kPanel * kPanel < count; token += kLanes) {
    const int present = count - token < kLanes ? count - token : kLanes;
    uint32_t* to = reinterpret_cast<uint32_t*>(packed) + static_cast<ptrdiff_t>(token / kPanel) * words * kPanel +
                   token % kPanel;
    int word = 0;
    for (; word + kLanes <= words && present == kLanes; word += kLanes) {
      Words square[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane)
        square[lane] = *reinterpret_cast<const Words*>(cache + offsets[token + lane] + word * kPack);
      transpose(square);
#pragma GCC unroll 16
      for (int row = 0; row < kLanes; ++row)
        *reinterpret_cast<Words*>(to + static_cast<ptrdiff_t>(word + row) * kPanel) = square[row];
    }
    for (; word < words; word += kLanes) {
      const int width = words - word < kLanes ? words - word : kLanes;
      Words square[kLanes] = {};
      for (int lane = 0; lane < present; ++lane)
        std::memcpy(&square[lane], cache + offsets[token + lane] + word * kPack, static_cast<size_t>(width) * 4);
      transpose(square);
      for (int row = 0; row < width; ++row)
        *reinterpret_cast<Words*>(to + static_cast<ptrdiff_t>(word + row) * kPanel) = square[row];
    }
  }
}

// Rows of V as panels of depth `count`, rounded up to kPack, one per kPanel elements of a head.
template <typename T>
void pack_values(const T* cache, const ptrdiff_t* offsets, int count, int head_dim, T* packed) {
  constexpr int kPack = Element<T>::kPack;
  const int depth = (count + kPack - 1) / kPack * kPack;
  for (int column = 0; column < head_dim; column += kLanes) {
    const int width = head_dim - column < kLanes ? head_dim - column : kLanes;
    T* to = packed + static_cast<ptrdiff_t>(column / kPanel) * depth * kPanel + column % kPanel * kPack;
    int token = 0;
    for (; token + kPack <= count && width == kLanes; token += kPack, to += kPack * kPanel) {
      const T* row = cache + offsets[token] + column;
      if constexpr (kPack == 1)
        store(to, load(row));
      else
        *reinterpret_cast<Words*>(to) =
            extend(load_halves(row)) | (extend(load_halves(cache + offsets[token + 1] + column)) << 16);
    }
    for (; token < count; token += kPack, to += kPack * kPanel) {
      alignas(64) T rows[kPack][kLanes] = {};
      for (int i = 0; i < kPack && token + i < count; ++i)
        std::memcpy(rows[i], cache + offsets[token + i] + column, sizeof(T) * static_cast<size_t>(width));
      for (int lane = 0; lane < kLanes; ++lane)
        for (int i = 0; i < kPack; ++i) to[lane * kPack + i] = rows[i][lane];
    }
  }
}

// Of each row: the largest score so far, the sum of e^(score - largest), and the values weighted so.
struct SoftmaxState {
  float* largest;   // [rows]
  float* total;     // [rows]
  float* weighted;  // [padded head_dim / kPanel][rows][kPanel]
};

struct AttentionParams {
  int head_dim;
  float scale;
  float soft_cap;      // 0: none
  int sliding_window;  // 0: none
};

// Folds tokens [first, last) of one span into `state`, which must be empty. `positions`: of each row.
template <typename T>
void attend_span(const T* queries, const int* positions, int rows, const PagedCache<T>& cache, int first, int last,
                 const AttentionParams& params, const SoftmaxState& state) {
  constexpr int kPack = Element<T>::kPack;
  alignas(64) T packed[kTile * kMaxHeadDim];
  alignas(64) float scores[kQueryRows * kPanel], tile[kQueryRows * kTile];
  alignas(64) T weights[kQueryRows * kTile];
  const int dim = params.head_dim;
  for (int row = 0; row < rows; ++row) {
    state.largest[row] = -INFINITY;
    state.total[row] = 0;
  }
  std::memset(state.weighted, 0, sizeof(float) * rows * padded(dim));

  ptrdiff_t places[2][kTile];
  auto fetch_keys = [&](int start, ptrdiff_t* offsets) {
    const int count = last - start < kTile ? last - start : kTile;
    if (count <= 0) return;
    cache.locate(start, count, offsets);
    prefetch(cache.keys, offsets, count, dim);
  };
  fetch_keys(first, places[0]);
  for (int start = first; start < last; start += kTile) {
    const int count = last - start < kTile ? last - start : kTile;
    const ptrdiff_t* offsets = places[(start - first) / kTile % 2];
    prefetch(cache.values, offsets, count, dim);
    const int depth = (count + kPack - 1) / kPack * kPack;
    pack_keys(cache.keys, offsets, count, dim, packed);
    for (int panel = 0; panel * kPanel < count; ++panel) {
      multiply(rows, queries, dim, packed + static_cast<ptrdiff_t>(panel) * dim * kPanel, dim, scores, false);
      for (int row = 0; row < rows; ++row)
        std::memcpy(tile + row * kTile + panel * kPanel, scores + row * kPanel, kPanel * sizeof(float));
    }
    fetch_keys(start + kTile, places[((start - first) / kTile + 1) % 2]);
    const int covered = padded(count);
    for (int row = 0; row < rows; ++row) {
      float* line = tile + row * kTile;
      const int end = positions[row] + 1 - start;  // tokens from here on are in the row's future
      const int begin = params.sliding_window ? end - params.sliding_window : 0;
      Ints lane_index;
      for (int lane = 0; lane < kLanes; ++lane) lane_index[lane] = lane;
      Floats most = splat(-INFINITY);
      for (int lane0 = 0; lane0 < covered; lane0 += kLanes) {
        Floats score = load(line + lane0) * params.scale;
        if (params.soft_cap != 0) {
          // tanh(x) = 1 - 2 / (e^2x + 1), within exp's range.
          Floats twice = score * (2 / params.soft_cap);
          twice = twice > 60.0f ? splat(60.0f) : twice;
          score = params.soft_cap * (1.0f - 2.0f / (exp(twice) + 1.0f));
        }
        Ints index = lane_index + lane0;
        score = (index < end) & (index >= begin) & (index < count) ? score : splat(-INFINITY);
        store(line + lane0, score);
        most = max(most, score);
      }
      const float before = state.largest[row];
      const float now = std::fmax(before, largest(most));
      T* weight = weights + row * kTile;
      if (now == -INFINITY) {
        std::memset(weight, 0, sizeof(T) * kTile);
        continue;
      }
      Floats added = splat(0);
      for (int lane0 = 0; lane0 < covered; lane0 += kLanes) {
        Floats p = exp(load(line + lane0) - now);
        added += p;
        store(weight + lane0, p);
      }
      if (now != before) {
        const float shrink = before == -INFINITY ? 0.0f : std::exp(before - now);
        state.largest[row] = now;
        state.total[row] *= shrink;
        for (int column = 0; column < dim; column += kLanes) {
          float* at = state.weighted + (column / kPanel * rows + row) * kPanel + column % kPanel;
          store(at, load(at) * shrink);
        }
      }
      state.total[row] += sum(added);
    }
    pack_values(cache.values, offsets, count, dim, packed);
    for (int panel = 0; panel * kPanel < dim; ++panel)
      multiply(rows, weights, kTile, packed + static_cast<ptrdiff_t>(panel) * depth * kPanel, depth,
               state.weighted + static_cast<ptrdiff_t>(panel) * rows * kPanel, true);
  }
}

// Folds `part` into `whole`.
inline void merge(const SoftmaxState& whole, const SoftmaxState& part, int rows, int head_dim) {
  for (int row = 0; row < rows; ++row) {
    if (part.largest[row] == -INFINITY) continue;
    const float now = std::fmax(whole.largest[row], part.largest[row]);
    const float kept = whole.largest[row] == -INFINITY ? 0.0f : std::exp(whole.largest[row] - now);
    const float taken = std::exp(part.largest[row] - now);
    whole.largest[row] = now;
    whole.total[row] = whole.total[row] * kept + part.total[row] * taken;
    for (int column = 0; column < head_dim; column += kLanes) {
      const ptrdiff_t at = static_cast<ptrdiff_t>(column / kPanel * rows + row) * kPanel + column % kPanel;
      store(whole.weighted + at, load(whole.weighted + at) * kept + load(part.weighted + at) * taken);
    }
  }
}

}  // namespace
