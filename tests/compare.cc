#include "compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace crisp::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct NaiveRow {
  std::vector<float> out;
  float lse = -INFINITY;
};

// Keys that query i of the segment may see, by position and kept blocks.
std::vector<int64_t> visible_keys(const Segment& segment, const reference::BlockSet& blocks,
                                  int64_t block_size, bool causal, int64_t i) {
  const int64_t position = std::max<int64_t>(segment.kv_len - segment.q_len, 0) + i;
  const int64_t row = position / block_size - blocks.first_q_block;
  std::vector<int64_t> keys;
  for (int64_t j = 0; j < segment.kv_len; ++j) {
    if ((!causal || j <= position) && blocks.at(row, j / block_size)) keys.push_back(j);
  }
  return keys;
}

// q . k as tensor cores add it up: 16 exact products and the sum so far are aligned to the largest
// of them and cut off there, not rounded (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of
// NVIDIA tensor cores, 2021). Without the guard bits that some of them have.
float tensor_core_dot(const float* q, const float* k, int64_t dim) {
  constexpr int64_t kStep = 16;
  double sum = 0;
  for (int64_t first = 0; first < dim; first += kStep) {
    const int64_t count = std::min(kStep, dim - first);
    double terms[kStep + 1] = {sum}, largest = std::abs(sum);
    for (int64_t c = 0; c < count; ++c) {
      terms[c + 1] = double{q[first + c]} * k[first + c];
      largest = std::max(largest, std::abs(terms[c + 1]));
    }
    if (largest == 0) continue;
    const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
    double units = 0;
    for (int64_t c = 0; c <= count; ++c) units += std::trunc(terms[c] / unit);
    sum = units * unit;
    if (!std::isfinite(sum)) break;
  }
  return static_cast<float>(sum);
}

// softmax(scale q k^T) v of one query as a plain program in this dtype, on this device, has it.
NaiveRow naive_row(const Inputs& inputs, const Segment& segment, int64_t q_head, int64_t i,
                   const std::vector<int64_t>& keys, bool folded) {
  constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
  const DType dtype = inputs.config.dtype;
  const int64_t dim = inputs.q.dim, kv_head = q_head / (inputs.q.heads / inputs.k.heads);
  std::vector<float> q(inputs.q.row(segment.q_start + i, q_head),
                       inputs.q.row(segment.q_start + i, q_head) + dim);
  if (folded) {
    for (float& value : q) value *= inputs.softmax_scale * kLog2E;
  }
  NaiveRow result{std::vector<float>(static_cast<size_t>(dim), 0.f)};
  if (keys.empty()) return result;
  std::vector<float> scores;
  float largest = -INFINITY;
  for (const int64_t j : keys) {
    const float* k = inputs.k.row(segment.kv_start + j, kv_head);
    float dot = 0;
    if (inputs.config.device == Device::kCuda && !folded) {
      dot = tensor_core_dot(q.data(), k, dim);
    } else {
      for (int64_t c = 0; c < dim; ++c) dot += q[static_cast<size_t>(c)] * k[c];
    }
    scores.push_back(folded ? dot : dot * inputs.softmax_scale);
    largest = std::max(largest, scores.back());
  }
  if (largest == -INFINITY) largest = 0;
  float sum = 0;
  for (size_t e = 0; e < keys.size(); ++e) {
    const float weight = folded ? std::exp2(scores[e] - largest) : std::exp(scores[e] - largest);
    sum += weight;
    const float* v = inputs.v.row(segment.kv_start + keys[e], kv_head);
    const float p = round_to(dtype, weight);
    for (int64_t c = 0; c < dim; ++c) result.out[static_cast<size_t>(c)] += p * v[c];
  }
  for (float& value : result.out) value = round_to(dtype, value / sum);
  result.lse = folded ? (largest + std::log2(sum)) * kLn2 : largest + std::log(sum);
  return result;
}

void fill_segment(const Inputs& inputs, size_t index, int64_t q_head, const OwnedMask& mask,
                  const MaskRows& rows, Truth& truth) {
  const Segment& segment = inputs.segments[index];
  const int64_t block_size = mask.mask.block_size, dim = inputs.q.dim;
  const reference::BlockSet blocks = block_set(mask, rows, q_head);
  const reference::AttendResult exact =
      reference::attend(reference_head(inputs, segment, q_head), blocks, block_size);
  for (int64_t i = 0; i < segment.q_len; ++i) {
    const std::vector<int64_t> keys =
        visible_keys(segment, blocks, block_size, inputs.config.causal, i);
    const NaiveRow naive = naive_row(inputs, segment, q_head, i, keys, false);
    const NaiveRow folded = naive_row(inputs, segment, q_head, i, keys, true);
    const int64_t token = segment.q_start + i;
    const auto at = static_cast<size_t>((token * inputs.q.heads + q_head) * dim);
    for (int64_t c = 0; c < dim; ++c)
      truth.out.reference[at + static_cast<size_t>(c)] = exact.out(i, c);
    std::copy_n(naive.out.data(), dim, truth.out.naive.data() + at);
    std::copy_n(folded.out.data(), dim, truth.out.folded.data() + at);
    const auto lse_at = static_cast<size_t>(q_head * inputs.q.tokens + token);
    truth.lse.reference[lse_at] = exact.lse[static_cast<size_t>(i)];
    truth.lse.naive[lse_at] = naive.lse;
    truth.lse.folded[lse_at] = folded.lse;
  }
}

Expected nothing(const std::vector<int64_t>& shape) {
  Expected expected;
  expected.shape = shape;
  size_t size = 1;
  for (const int64_t length : shape) size *= static_cast<size_t>(length);
  expected.reference.assign(size, kNaN);
  expected.naive.assign(size, std::numeric_limits<float>::quiet_NaN());
  expected.folded = expected.naive;
  return expected;
}

std::string position(size_t element, const std::vector<int64_t>& shape) {
  std::string text;
  for (size_t axis = shape.size(); axis-- > 0;) {
    const auto length = static_cast<size_t>(shape[axis]);
    text = std::to_string(element % length) + (text.empty() ? "" : ", ") + text;
    element /= length;
  }
  return "(" + text + ")";
}

// NaN, +Inf, -Inf and finite numbers are four kinds.
int kind(double value) {
  return std::isnan(value) ? 0 : std::isfinite(value) ? 3 : value > 0 ? 1 : 2;
}

}  // namespace

reference::BlockSet block_set(const OwnedMask& mask, const MaskRows& rows, int64_t head) {
  reference::BlockSet blocks;
  blocks.first_q_block = rows.first_q_block;
  blocks.rows = rows.num_rows;
  blocks.cols = rows.num_kv_blocks;
  blocks.kept.resize(static_cast<size_t>(blocks.rows * blocks.cols));
  for (int64_t r = 0; r < blocks.rows; ++r) {
    for (int64_t c = 0; c < blocks.cols; ++c)
      blocks.at(r, c) = mask.at(head, rows.first_row + r, c);
  }
  return blocks;
}

void derive_tolerance(Expected& expected, DType dtype) {
  double naive_error = 0, largest = 0;
  for (size_t i = 0; i < expected.reference.size(); ++i) {
    const double reference = expected.reference[i];
    if (!std::isfinite(reference)) continue;
    largest = std::max(largest, std::abs(reference));
    for (const float naive : {expected.naive[i], expected.folded[i]}) {
      if (std::isfinite(naive)) naive_error = std::max(naive_error, std::abs(naive - reference));
    }
  }
  const int fraction_bits = dtype == DType::kFloat32 ? 23 : dtype == DType::kFloat16 ? 10 : 7;
  const double atol = std::ldexp(1.0, std::ilogb(largest + 0.3) - fraction_bits);
  expected.tolerance = 2 * naive_error + atol;
}

::testing::AssertionResult within(const std::vector<float>& got, const Expected& expected,
                                  const char* what) {
  if (got.size() != expected.reference.size()) {
    return ::testing::AssertionFailure() << what << " has " << got.size()
                                         << " elements, should have " << expected.reference.size();
  }
  size_t worst = 0;
  double worst_error = -1;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool same_kind = kind(got[i]) == kind(expected.reference[i]);
    const double error = !same_kind          ? INFINITY
                         : kind(got[i]) == 3 ? std::abs(got[i] - expected.reference[i])
                                             : 0;
    if (error > worst_error) worst = i, worst_error = error;
  }
  if (worst_error <= expected.tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << what << " is worst at " << position(worst, expected.shape) << ": " << got[worst]
         << ", should be " << expected.reference[worst] << " (naive " << expected.naive[worst]
         << "), error " << worst_error << " > " << expected.tolerance;
}

Truth truth_of(const Inputs& inputs, const OwnedMask& mask) {
  Truth truth{inputs.config, nothing({inputs.q.tokens, inputs.q.heads, inputs.q.dim}),
              nothing({inputs.q.heads, inputs.q.tokens})};
  const std::vector<MaskRows> rows = mask_rows(inputs, mask.mask.block_size);
  for (int64_t head = 0; head < inputs.q.heads; ++head) {
    for (size_t s = 0; s < rows.size(); ++s) fill_segment(inputs, s, head, mask, rows[s], truth);
  }
  derive_tolerance(truth.out, inputs.config.dtype);
  derive_tolerance(truth.lse, DType::kFloat32);
  return truth;
}

::testing::AssertionResult matches(const Outcome& outcome, const Truth& truth) {
  const ::testing::AssertionResult out =
      within(outcome.out.data, truth.out, "out [token, head, dim]");
  if (!out)
    return ::testing::AssertionFailure()
           << out.message() << "\n  CRISP_CASE='" << truth.config << "'";
  const ::testing::AssertionResult lse = within(outcome.lse, truth.lse, "lse [head, token]");
  if (!lse)
    return ::testing::AssertionFailure()
           << lse.message() << "\n  CRISP_CASE='" << truth.config << "'";
  return ::testing::AssertionSuccess();
}

namespace {

// The rows of an array whose rows, [token, head] or [head, token], have `width` elements each.
template <class T, class RowOf>
std::vector<T> cut_rows(const std::vector<T>& from, int64_t begin, int64_t end,
                        const std::vector<int64_t>& heads, bool token_first, int64_t width,
                        RowOf&& row_of) {
  std::vector<T> part;
  const auto take = [&](int64_t token, int64_t head) {
    const auto at = from.begin() + row_of(token, head) * width;
    part.insert(part.end(), at, at + width);
  };
  if (token_first) {
    for (int64_t token = begin; token < end; ++token) {
      for (const int64_t head : heads) take(token, head);
    }
  } else {
    for (const int64_t head : heads) {
      for (int64_t token = begin; token < end; ++token) take(token, head);
    }
  }
  return part;
}

Expected cut_expected(const Expected& whole, int64_t begin, int64_t end,
                      const std::vector<int64_t>& heads) {
  const bool is_out = whole.shape.size() == 3;
  const int64_t width = is_out ? whole.shape[2] : 1;
  const auto row_of = [&](int64_t token, int64_t head) {
    return is_out ? token * whole.shape[1] + head : head * whole.shape[1] + token;
  };
  const auto num_heads = static_cast<int64_t>(heads.size());
  Expected part;
  part.shape = is_out ? std::vector<int64_t>{end - begin, num_heads, width}
                      : std::vector<int64_t>{num_heads, end - begin};
  part.reference = cut_rows(whole.reference, begin, end, heads, is_out, width, row_of);
  part.naive = cut_rows(whole.naive, begin, end, heads, is_out, width, row_of);
  part.folded = cut_rows(whole.folded, begin, end, heads, is_out, width, row_of);
  part.tolerance = whole.tolerance;
  return part;
}

}  // namespace

Truth cut(const Truth& truth, int64_t begin, int64_t end, const std::vector<int64_t>& heads) {
  return {truth.config, cut_expected(truth.out, begin, end, heads),
          cut_expected(truth.lse, begin, end, heads)};
}

::testing::AssertionResult same_or_true(const Outcome& outcome, const Outcome& expected,
                                        const Truth& truth) {
  return outcome.family == expected.family ? same_bits(outcome, expected) : matches(outcome, truth);
}

::testing::AssertionResult is_exact(const Inputs& inputs) {
  const Call call(inputs);
  const OwnedMask mask = mask_of(inputs, call.attention);
  return matches(run_attend(inputs, call, mask), truth_of(inputs, mask));
}

::testing::AssertionResult is_exact_for_every_length(const Case& c) {
  const Inputs longest = make_inputs(c);
  const Truth truth = truth_of(longest, mask_of(longest, Call(longest).attention));
  for (int64_t length = 1; length <= longest.q.tokens; ++length) {
    const Inputs inputs = slice(longest, 0, {0, 0}, {length, length});
    const Outcome outcome = run_attend(inputs, mask_of(inputs, Call(inputs).attention));
    Truth prefix = truth;
    prefix.config = inputs.config;
    prefix.out.shape[0] = prefix.lse.shape[1] = length;
    prefix.out.reference.resize(outcome.out.data.size());
    prefix.lse.reference.resize(outcome.lse.size());
    const ::testing::AssertionResult result = matches(outcome, prefix);
    if (!result) return result;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace crisp::test
