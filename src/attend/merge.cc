#include "attend/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/device.h"
#include "core/half.h"
#include "core/parallel.h"

namespace crisp {
namespace {

constexpr int64_t kTokensPerTask = 64;

struct Weights {
  float a = 0, b = 0, lse = -std::numeric_limits<float>::infinity();
};

// With m = max(lse_a, lse_b): a = exp(lse_a - m) / s, b = exp(lse_b - m) / s, lse = m + log(s),
// where s is the sum of both numerators. Subtracting m first keeps exp() within range.
Weights merge_weights(float lse_a, float lse_b) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  if (lse_a == kEmpty && lse_b == kEmpty) return {};
  if (lse_a == kEmpty) return {0.f, 1.f, lse_b};
  if (lse_b == kEmpty) return {1.f, 0.f, lse_a};
  const float m = std::max(lse_a, lse_b);
  const float a = std::exp(lse_a - m), b = std::exp(lse_b - m), s = a + b;
  return {a / s, b / s, m + std::log(s)};
}

// A side of weight 0 is not read: what an empty state holds does not matter, not even NaN.
float weighted(const ConstTensor& tensor, int64_t index, float weight) {
  return weight == 0.f ? 0.f : weight * load_float(tensor.data, tensor.dtype, index);
}

template <class AnyTensor>
int64_t row_start(const AnyTensor& tensor, int64_t token, int64_t head) {
  return token * tensor.token_stride + head * tensor.head_stride;
}

}  // namespace

void merge_attention_states(const ConstTensor& out_a, const float* lse_a, const ConstTensor& out_b,
                            const float* lse_b, const Tensor& out, float* lse,
                            const Context& context) {
  if constexpr (kWithCuda) {
    if (context.device == Device::kCuda)
      return merge_attention_states_cuda(out_a, lse_a, out_b, lse_b, out, lse, context);
  }
  const auto merge_token = [&](int64_t token) {
    for (int64_t head = 0; head < out.num_heads; ++head) {
      const int64_t at = head * out.num_tokens + token;
      const Weights weights = merge_weights(lse_a[at], lse_b[at]);
      const int64_t a = row_start(out_a, token, head), b = row_start(out_b, token, head);
      const int64_t o = row_start(out, token, head);
      for (int64_t i = 0; i < out.head_dim; ++i) {
        store_float(out.data, out.dtype, o + i,
                    weighted(out_a, a + i, weights.a) + weighted(out_b, b + i, weights.b));
      }
      if (lse != nullptr) lse[at] = weights.lse;
    }
  };
  const int64_t num_tasks = (out.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(resolve_num_threads(context.num_threads), num_tasks, [&](int, int64_t task) {
    const int64_t end = std::min(out.num_tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) merge_token(token);
  });
}

}  // namespace crisp
