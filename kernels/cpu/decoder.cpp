// Decoder layers on a CPU: all of a step's layers in one call, one parallel region, barriers between phases.
//
// The functions at the end are what library.py binds; it checks every size and type before it calls.

#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "experts.h"

namespace {

// Mirrored in library.py, field by field.
struct Shape {
  int32_t hidden_size, num_heads, num_kv_heads, head_dim;
  float eps, scale, soft_cap;
};

struct Layer {
  const void *attention_norm, *query_norm, *key_norm, *mlp_norm;  // weights; query_norm and key_norm may be null
  const void *qkv, *output, *gate_up, *down;                      // panels
  const void *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // may be null
  void *key_cache, *value_cache;
  const Experts* experts;  // may be null
  Format qkv_format, output_format, gate_up_format, down_format;
  int32_t sliding_window;
  int32_t mlp_size;  // 0: no MLP, but experts
};

struct Step {
  int32_t num_seqs, num_tokens, block_size, table_stride;
  const int64_t* slot_mapping;
  const int32_t *block_tables, *query_start, *seq_lens;
  const void *cos, *sin;  // [num_tokens, head_dim / 2]
  void (*sum_over_ranks)();  // makes `hidden` whole, where this is one of several ranks; else null
  int32_t adds_to_hidden;    // of several ranks, one
};

// Memory that only grows, so that a step allocates nothing once the largest has run.
template <typename T>
struct Buffer {
  std::unique_ptr<T[]> data;
  size_t size = 0;

  T* reserve(size_t wanted) {
    if (size < wanted) {
      data.reset(new T[wanted + 64]);
      size = wanted;
    }
    return data.get();
  }
};

// Rows of one KV head that one thread attends for: `rows` from `first_row` on, of the sequence's
// (token, query head of the group) pairs.
struct AttentionTask {
  int seq, kv_head, first_row, rows;
  int first, last;   // tokens to attend to
  int64_t partial;   // where the span's state goes, in floats; -1: the task covers all spans
};

struct MergeTask {
  int seq, kv_head, rows, spans;
  int64_t partial;
};

struct Plan {
  std::vector<AttentionTask> attend;
  std::vector<MergeTask> merge;
  int64_t partial_size = 0;
};

inline int64_t state_size(int rows, int head_dim) { return int64_t{rows} * (padded(head_dim) + 2); }

inline SoftmaxState state_at(float* at, int rows) { return {at, at + rows, at + 2 * rows}; }

void plan_attention(const Shape& shape, const Step& step, int sliding_window, Plan& plan) {
  plan.attend.clear();
  plan.merge.clear();
  plan.partial_size = 0;
  const int group = shape.num_heads / shape.num_kv_heads;
  for (int seq = 0; seq < step.num_seqs; ++seq) {
    const int tokens = step.query_start[seq + 1] - step.query_start[seq];
    const int computed = step.seq_lens[seq] - tokens;
    const int all_rows = tokens * group;
    for (int row = 0; row < all_rows; row += kQueryRows) {
      const int rows = std::min(kQueryRows, all_rows - row);
      const int last = computed + (row + rows - 1) / group + 1;
      int first = sliding_window ? std::max(0, computed + row / group + 1 - sliding_window) : 0;
      first = first / kTile * kTile;
      const int spans = (last - 1) / kSpan - first / kSpan + 1;
      // A long context under few rows, so under few tasks, is what one thread should not walk alone.
      const bool split = spans > 1 && all_rows <= kQueryRows;
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        if (!split) {
          plan.attend.push_back({seq, head, row, rows, first, last, -1});
          continue;
        }
        plan.merge.push_back({seq, head, rows, spans, plan.partial_size});
        for (int at = first; at < last; at = (at / kSpan + 1) * kSpan) {
          plan.attend.push_back({seq, head, row, rows, at, std::min(last, (at / kSpan + 1) * kSpan), plan.partial_size});
          plan.partial_size += state_size(rows, shape.head_dim);
        }
      }
    }
  }
}

template <typename T>
struct Decoder {
  const Shape& shape;
  const Step& step;
  T* hidden;  // [num_tokens, hidden_size]
  T *normed, *qkv, *attended, *activated, *gathered;
  float *partials, *mixed, *scores;
  Share* chosen;
  Assignment& assignment;

  int query_size() const { return shape.num_heads * shape.head_dim; }
  int kv_size() const { return shape.num_kv_heads * shape.head_dim; }
  int qkv_size() const { return query_size() + 2 * kv_size(); }

  static void norm_row(const T* x, const T* weight, int size, float eps, T* to) {
    Floats squares = splat(0);
    float rest = 0;
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) squares += load(x + i) * load(x + i);
    for (; i < size; ++i) rest += widen(x[i]) * widen(x[i]);
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / static_cast<float>(size) + eps);
    for (i = 0; i + kLanes <= size; i += kLanes) {
      store(to + i, load(x + i) * scale);
      store(to + i, load(to + i) * load(weight + i));
    }
    for (; i < size; ++i) {
      narrow(widen(x[i]) * scale, to + i);
      narrow(widen(to[i]) * widen(weight[i]), to + i);
    }
  }

  static void rotate(T* head, const T* cos, const T* sin, int half) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      Floats a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
      store(head + i, a * c - b * s);
      store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
      const float a = widen(head[i]), b = widen(head[half + i]), c = widen(cos[i]), s = widen(sin[i]);
      narrow(a * c - b * s, head + i);
      narrow(b * c + a * s, head + half + i);
    }
  }

  void norm(const T* weight) {
#pragma omp for schedule(static)
    for (int token = 0; token < step.num_tokens; ++token) {
      const ptrdiff_t row = static_cast<ptrdiff_t>(token) * shape.hidden_size;
      norm_row(hidden + row, weight, shape.hidden_size, shape.eps, normed + row);
    }
  }

  // to[rows][size] = sums + bias, (+ to).
  template <bool kAdd>
  static auto writer(T* to, const T* bias, int size) {
    return [=](int first, int rows, int panel, const float* sums) {
      const int column0 = panel * kPanel;
      for (int row = 0; row < rows; ++row, sums += kPanel) {
        T* line = to + static_cast<ptrdiff_t>(first + row) * size + column0;
        int i = 0;
        for (; i < kPanel && column0 + i + kLanes <= size; i += kLanes) {
          Floats value = load(sums + i);
          if (bias) value += load(bias + column0 + i);
          if (kAdd) value += load(line + i);
          store(line + i, value);
        }
        for (; i < kPanel && column0 + i < size; ++i) {
          float value = sums[i];
          if (bias) value += widen(bias[column0 + i]);
          if (kAdd) value += widen(line[i]);
          narrow(value, line + i);
        }
      }
    };
  }

  // A panel of gate_up holds `kLanes` gates, then their ups.
  static auto gated_writer(T* to, const T* bias, int size) {
    return [=](int first, int rows, int panel, const float* sums) {
      const int column0 = panel * kLanes;
      const int width = std::min(kLanes, size - column0);
      Floats gate_bias = splat(0), up_bias = splat(0);
      for (int lane = 0; bias && lane < width; ++lane) {
        gate_bias[lane] = widen(bias[column0 + lane]);
        up_bias[lane] = widen(bias[size + column0 + lane]);
      }
      for (int row = 0; row < rows; ++row, sums += kPanel) {
        Floats value = silu(load(sums) + gate_bias) * (load(sums + kLanes) + up_bias);
        T* line = to + static_cast<ptrdiff_t>(first + row) * size + column0;
        if (width == kLanes)
          store(line, value);
        else
          for (int lane = 0; lane < width; ++lane) narrow(value[lane], line + lane);
      }
    };
  }

  void place_keys_and_values(const Layer& layer) {
    const int dim = shape.head_dim, half = dim / 2;
    const T* query_norm = static_cast<const T*>(layer.query_norm);
    const T* key_norm = static_cast<const T*>(layer.key_norm);
#pragma omp for schedule(static)
    for (int token = 0; token < step.num_tokens; ++token) {
      T* row = qkv + static_cast<ptrdiff_t>(token) * qkv_size();
      const T* cos = static_cast<const T*>(step.cos) + static_cast<ptrdiff_t>(token) * half;
      const T* sin = static_cast<const T*>(step.sin) + static_cast<ptrdiff_t>(token) * half;
      for (int head = 0; head < shape.num_heads + shape.num_kv_heads; ++head) {
        const T* weight = head < shape.num_heads ? query_norm : key_norm;
        if (weight) norm_row(row + head * dim, weight, dim, shape.eps, row + head * dim);
        rotate(row + head * dim, cos, sin, half);
      }
      const ptrdiff_t slot = static_cast<ptrdiff_t>(step.slot_mapping[token]) * kv_size();
      std::memcpy(static_cast<T*>(layer.key_cache) + slot, row + query_size(), sizeof(T) * kv_size());
      std::memcpy(static_cast<T*>(layer.value_cache) + slot, row + query_size() + kv_size(), sizeof(T) * kv_size());
    }
  }

  void write_attended(const SoftmaxState& state, int seq, int kv_head, int first_row, int rows) {
    const int group = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim;
    for (int row = 0; row < rows; ++row) {
      const int token = step.query_start[seq] + (first_row + row) / group;
      const int head = kv_head * group + (first_row + row) % group;
      T* to = attended + static_cast<ptrdiff_t>(token) * query_size() + head * dim;
      const float share = 1.0f / state.total[row];
      int i = 0;
      for (; i + kLanes <= dim; i += kLanes)
        store(to + i, load(state.weighted + (i / kPanel * rows + row) * kPanel + i % kPanel) * share);
      for (; i < dim; ++i) narrow(state.weighted[(i / kPanel * rows + row) * kPanel + i % kPanel] * share, to + i);
    }
  }

  void attend(const Layer& layer, const Plan& plan) {
    const int group = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim;
    const AttentionParams params{dim, shape.scale, shape.soft_cap, layer.sliding_window};
#pragma omp for schedule(dynamic, 1)
    for (size_t index = 0; index < plan.attend.size(); ++index) {
      const AttentionTask& task = plan.attend[index];
      alignas(64) T queries[kQueryRows * kMaxHeadDim];
      int positions[kQueryRows];
      const int tokens = step.query_start[task.seq + 1] - step.query_start[task.seq];
      for (int row = 0; row < task.rows; ++row) {
        const int token = (task.first_row + row) / group;
        const int head = task.kv_head * group + (task.first_row + row) % group;
        positions[row] = step.seq_lens[task.seq] - tokens + token;
        const T* from = qkv + static_cast<ptrdiff_t>(step.query_start[task.seq] + token) * qkv_size() + head * dim;
        std::memcpy(queries + row * dim, from, sizeof(T) * dim);
      }
      const int32_t* table = step.block_tables + static_cast<ptrdiff_t>(task.seq) * step.table_stride;
      const ptrdiff_t head = static_cast<ptrdiff_t>(task.kv_head) * dim;
      const PagedCache<T> cache{static_cast<const T*>(layer.key_cache) + head,
                                static_cast<const T*>(layer.value_cache) + head, table, step.block_size, kv_size()};
      if (task.partial >= 0) {
        attend_span(queries, positions, task.rows, cache, task.first, task.last, params,
                    state_at(partials + task.partial, task.rows));
        continue;
      }
      alignas(64) float memory[2][kQueryRows * (kMaxHeadDim + 2)];
      const SoftmaxState whole = state_at(memory[0], task.rows), part = state_at(memory[1], task.rows);
      for (int at = task.first; at < task.last; at = (at / kSpan + 1) * kSpan) {
        const int end = std::min(task.last, (at / kSpan + 1) * kSpan);
        const bool alone = at == task.first;
        attend_span(queries, positions, task.rows, cache, at, end, params, alone ? whole : part);
        if (!alone) merge(whole, part, task.rows, dim);
      }
      write_attended(whole, task.seq, task.kv_head, task.first_row, task.rows);
    }
    if (plan.merge.empty()) return;
#pragma omp for schedule(static)
    for (size_t index = 0; index < plan.merge.size(); ++index) {
      const MergeTask& task = plan.merge[index];
      const SoftmaxState whole = state_at(partials + task.partial, task.rows);
      for (int span = 1; span < task.spans; ++span)
        merge(whole, state_at(partials + task.partial + span * state_size(task.rows, dim), task.rows), task.rows, dim);
      write_attended(whole, task.seq, task.kv_head, 0, task.rows);
    }
  }

  void attention_half(const Layer& layer, const Plan& plan) {
    norm(static_cast<const T*>(layer.attention_norm));
    multiply_into<false>(normed, layer.qkv, layer.qkv_format, layer.qkv_bias, shape.hidden_size, qkv_size(), qkv);
    place_keys_and_values(layer);
    attend(layer, plan);
    multiply_back(attended, layer.output, layer.output_format, layer.output_bias, query_size());
  }

  void mlp_half(const Layer& layer) {
    norm(static_cast<const T*>(layer.mlp_norm));
    if (layer.experts) return mix(layer, *layer.experts);
    multiply_gated(normed, step.num_tokens, layer.gate_up, layer.gate_up_format, layer.gate_up_bias, layer.mlp_size);
    multiply_back(activated, layer.down, layer.down_format, layer.down_bias, layer.mlp_size);
  }

  void multiply_gated(const T* x, int rows, const void* weight, Format format, const void* bias, int size) {
    matmul(x, rows, weight, format, shape.hidden_size, PanelOrder{2 * size, true}.num_panels(),
           gated_writer(activated, static_cast<const T*>(bias), size));
  }

  // `mixed` collects, in float32, what the layer's own MLP and then each expert makes of its tokens.
  void mix(const Layer& layer, const Experts& experts) {
    const int hidden_size = shape.hidden_size, panels = padded(hidden_size) / kPanel;
#pragma omp for schedule(static)
    for (int token = 0; token < step.num_tokens; ++token) {
      const T* x = normed + static_cast<ptrdiff_t>(token) * hidden_size;
      float* own = scores + static_cast<ptrdiff_t>(token) * (experts.num_experts + 1);
      choose(x, token, experts, hidden_size, own, chosen + static_cast<ptrdiff_t>(token) * experts.num_per_token);
      const T* shared = static_cast<const T*>(experts.shared_gate);
      own[experts.num_experts] = shared ? sigmoid(dot(x, shared, hidden_size)) : 1.0f;
      std::fill_n(mixed + static_cast<ptrdiff_t>(token) * hidden_size, hidden_size, 0.0f);
    }
#pragma omp single
    assignment.fill(experts, chosen, step.num_tokens * experts.num_per_token);

    if (layer.mlp_size) {
      multiply_gated(normed, step.num_tokens, layer.gate_up, layer.gate_up_format, layer.gate_up_bias,
                     layer.mlp_size);
      matmul(activated, step.num_tokens, layer.down, layer.down_format, layer.mlp_size, panels,
             adder(static_cast<const T*>(layer.down_bias), [&](int row) {
               return Share{-1, row, scores[static_cast<ptrdiff_t>(row + 1) * (experts.num_experts + 1) - 1]};
             }));
    }
    for (int index = 0; index < experts.num_held; ++index) {
      const Share* shares = assignment.shares.data() + assignment.starts[static_cast<size_t>(index)];
      const int count = assignment.starts[static_cast<size_t>(index) + 1] - assignment.starts[static_cast<size_t>(index)];
      if (!count) continue;
#pragma omp for schedule(static)
      for (int row = 0; row < count; ++row)
        std::memcpy(gathered + static_cast<ptrdiff_t>(row) * hidden_size,
                    normed + static_cast<ptrdiff_t>(shares[row].token) * hidden_size,
                    sizeof(T) * static_cast<size_t>(hidden_size));
      multiply_gated(gathered, count, experts.gate_up[index], kDense, nullptr, experts.expert_size);
      matmul(activated, count, experts.down[index], kDense, experts.expert_size, panels,
             adder(nullptr, [=](int row) { return shares[row]; }));
    }
#pragma omp for schedule(static)
    for (int token = 0; token < step.num_tokens; ++token) {
      const ptrdiff_t row = static_cast<ptrdiff_t>(token) * hidden_size;
      for (int i = 0; i < hidden_size; ++i)
        narrow(mixed[row + i] + (step.adds_to_hidden ? widen(hidden[row + i]) : 0.0f), hidden + row + i);
    }
    sum_over_ranks();
  }

  // mixed[token] += share * (sums + bias), where `share_of` says what the i-th row is.
  template <typename ShareOf>
  auto adder(const T* bias, ShareOf share_of) {
    return [=, this](int first, int rows, int panel, const float* sums) {
      const int column0 = panel * kPanel, width = std::min(kPanel, shape.hidden_size - column0);
      for (int row = 0; row < rows; ++row, sums += kPanel) {
        const Share one = share_of(first + row);
        float* line = mixed + static_cast<ptrdiff_t>(one.token) * shape.hidden_size + column0;
        for (int i = 0; i < width; ++i) line[i] += one.share * (sums[i] + (bias ? widen(bias[column0 + i]) : 0.0f));
      }
    };
  }

  // The end of each half: back to the hidden state.
  void multiply_back(const T* x, const void* weight, Format format, const void* bias, int depth) {
    if (step.adds_to_hidden)
      multiply_into<true>(x, weight, format, bias, depth, shape.hidden_size, hidden);
    else
      multiply_into<false>(x, weight, format, bias, depth, shape.hidden_size, hidden);
    sum_over_ranks();
  }

  void sum_over_ranks() {
    if (!step.sum_over_ranks) return;
#pragma omp master
    step.sum_over_ranks();
#pragma omp barrier
  }

  template <bool kAdd>
  void multiply_into(const T* x, const void* weight, Format format, const void* bias, int depth, int size, T* to) {
    matmul(x, step.num_tokens, weight, format, depth, padded(size) / kPanel,
           writer<kAdd>(to, static_cast<const T*>(bias), size));
  }
};

template <typename T>
void run_layers(const Shape& shape, const Layer* layers, int num_layers, const Step& step, T* hidden) {
  // Of the calling thread: each shard's steps run on one.
  static thread_local Buffer<T> normed, qkv, attended, activated, gathered;
  static thread_local Buffer<float> partials, mixed, scores;
  static thread_local Buffer<Share> chosen;
  static thread_local Plan full, windowed;
  static thread_local Assignment assignment;

  int window = 0;
  int widest = 0, num_experts = -1, num_per_token = 0;
  for (int layer = 0; layer < num_layers; ++layer) {
    window = std::max(window, layers[layer].sliding_window);
    widest = std::max(widest, layers[layer].mlp_size);
    if (const Experts* experts = layers[layer].experts) {
      widest = std::max(widest, experts->expert_size);
      num_experts = std::max(num_experts, experts->num_experts);
      num_per_token = std::max(num_per_token, experts->num_per_token);
    }
  }
  plan_attention(shape, step, 0, full);
  if (window) plan_attention(shape, step, window, windowed);

  const size_t tokens = static_cast<size_t>(step.num_tokens);
  Decoder<T> decoder{shape,   step,    hidden,  nullptr, nullptr, nullptr,   nullptr,
                     nullptr, nullptr, nullptr, nullptr, nullptr, assignment};
  decoder.normed = normed.reserve(tokens * static_cast<size_t>(shape.hidden_size));
  decoder.qkv = qkv.reserve(tokens * static_cast<size_t>(decoder.qkv_size()));
  decoder.attended = attended.reserve(tokens * static_cast<size_t>(decoder.query_size()));
  decoder.activated = activated.reserve(tokens * static_cast<size_t>(widest));
  if (num_experts >= 0) {
    decoder.gathered = gathered.reserve(tokens * static_cast<size_t>(shape.hidden_size));
    decoder.mixed = mixed.reserve(tokens * static_cast<size_t>(shape.hidden_size));
    decoder.scores = scores.reserve(tokens * static_cast<size_t>(num_experts + 1));
    decoder.chosen = chosen.reserve(tokens * static_cast<size_t>(num_per_token));
  }
  decoder.partials = partials.reserve(static_cast<size_t>(std::max(full.partial_size, windowed.partial_size)));
  const Plan &full_plan = full, &windowed_plan = windowed;
#pragma omp parallel
  for (int layer = 0; layer < num_layers; ++layer) {
    decoder.attention_half(layers[layer], layers[layer].sliding_window ? windowed_plan : full_plan);
    decoder.mlp_half(layers[layer]);
  }
}

template <typename T>
void linear(const T* x, int rows, const void* weight, Format format, int depth, int size, float* to) {
#pragma omp parallel
  matmul(x, rows, weight, format, depth, padded(size) / kPanel,
         [=](int first, int count, int panel, const float* sums) {
           const int width = std::min(kPanel, size - panel * kPanel);
           for (int row = 0; row < count; ++row)
             std::memcpy(to + static_cast<ptrdiff_t>(first + row) * size + panel * kPanel, sums + row * kPanel,
                         sizeof(float) * static_cast<size_t>(width));
         });
}

}  // namespace

#define PAGODA_API extern "C" __attribute__((visibility("default")))

// Bytes that a matrix takes in panels; `element_size`: of dense ones.
PAGODA_API int64_t pagoda_packed_bytes(int32_t size, int32_t depth, int32_t gated, Format format,
                                       int32_t element_size) {
  const int64_t columns = int64_t{PanelOrder{size, gated != 0}.num_panels()} * kPanel;
  if (format == kDense) return columns * depth * element_size;
  return columns * (depth / kGroup) * (8 + kGroup * bits_of(format) / 8);
}

PAGODA_API void pagoda_pack_quantised(const uint8_t* rows, int32_t size, int32_t depth, int32_t gated, Format format,
                                      uint8_t* packed) {
  pack_quantised(rows, format, {size, gated != 0}, depth, packed);
}

#define PAGODA_EXPORT(T, suffix)                                                                                   \
  PAGODA_API void pagoda_run_layers_##suffix(const Shape* shape, const Layer* layers, int32_t num_layers,          \
                                             const Step* step, T* hidden) {                                        \
    run_layers<T>(*shape, layers, num_layers, *step, hidden);                                                      \
  }                                                                                                                \
  PAGODA_API void pagoda_pack_##suffix(const T* weight, int32_t size, int32_t depth, int32_t gated, T* packed) {   \
    pack_dense<T>(weight, {size, gated != 0}, depth, packed);                                                      \
  }                                                                                                                \
  PAGODA_API void pagoda_linear_##suffix(const T* x, int32_t rows, const void* weight, Format format,              \
                                         int32_t depth, int32_t size, float* to) {                                 \
    linear<T>(x, rows, weight, format, depth, size, to);                                                           \
  }

PAGODA_EXPORT(float, float32)
PAGODA_EXPORT(bf16, bfloat16)
