// A mixture of experts: which of them a token takes, and which tokens each of them gets.
//
// As `route` and `mix_experts` in kernels/reference.py have it. A token's experts are summed in their own order, in
// float32, so its result doesn't depend on its batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

// Mirrored in library.py, field by field.
struct Experts {
  const void *gate, *shared_gate;                // [num_experts][hidden_size]; [hidden_size] or null
  const void *const *gate_up, *const *down;      // of each expert that is held, panels
  int32_t num_experts, first, num_held, num_per_token, expert_size, normalise;
};

template <typename T>
inline float dot(const T* a, const T* b, int size) {
  Floats products = splat(0);
  float rest = 0;
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) products += load(a + i) * load(b + i);
  for (; i < size; ++i) rest += widen(a[i]) * widen(b[i]);
  return sum(products) + rest;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// What a token is to one of its experts.
struct Share {
  int expert, token;
  float share;
};

// The highest `num_per_token` of a token's scores, for which `scores` has room for all; of equals, the first.
template <typename T>
void choose(const T* x, int token, const Experts& experts, int hidden_size, float* scores, Share* to) {
  const T* gate = static_cast<const T*>(experts.gate);
  float highest = -INFINITY, total = 0, taken = 0;
  for (int expert = 0; expert < experts.num_experts; ++expert) {
    scores[expert] = dot(x, gate + static_cast<ptrdiff_t>(expert) * hidden_size, hidden_size);
    highest = std::max(highest, scores[expert]);
  }
  for (int expert = 0; expert < experts.num_experts; ++expert)
    total += scores[expert] = std::exp(scores[expert] - highest);
  for (int place = 0; place < experts.num_per_token; ++place) {
    const int best = static_cast<int>(std::max_element(scores, scores + experts.num_experts) - scores);
    to[place] = {best, token, scores[best]};
    taken += scores[best];
    scores[best] = -1;
  }
  for (int place = 0; place < experts.num_per_token; ++place) to[place].share /= experts.normalise ? taken : total;
}

// The shares of each expert that is held, in the order of tokens: those of the i-th from starts[i] on.
struct Assignment {
  std::vector<Share> shares;
  std::vector<int> starts;

  void fill(const Experts& experts, const Share* chosen, int count) {
    starts.assign(static_cast<size_t>(experts.num_held) + 1, 0);
    const auto held = [&](const Share& one) {
      const int index = one.expert - experts.first;
      return index >= 0 && index < experts.num_held ? index : -1;
    };
    for (int i = 0; i < count; ++i)
      if (const int index = held(chosen[i]); index >= 0) ++starts[static_cast<size_t>(index) + 1];
    for (size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
    shares.resize(static_cast<size_t>(starts.back()));
    std::vector<int> next(starts.begin(), starts.end() - 1);
    for (int i = 0; i < count; ++i)
      if (const int index = held(chosen[i]); index >= 0)
        shares[static_cast<size_t>(next[static_cast<size_t>(index)]++)] = chosen[i];
  }
};

}  // namespace
