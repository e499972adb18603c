// merge_suite.h - merge_states(): two halves make the whole, whatever their size, dtype and layout,
// on any backend.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "backend.h"
#include "compare.h"
#include "run.h"

namespace crisp::test {

// The attention of one chunk of queries over a split key range: keys [0, split) of a cached prefix,
// which every query sees, and the rest, which is causal.
struct Halves {
  Inputs whole, prefix, suffix;
  Halves(const Case& c, int64_t split) : whole(make_inputs(c)) {
    const Lengths end = c.segments[0];
    prefix = slice(whole, 0, {0, 0}, {end.q_len, split});
    prefix.config.causal = false;
    suffix = slice(whole, 0, {0, split}, end);
  }
};

// A state laid out for merge_states, guarded.
class State {
 public:
  State(const Outcome& from, DType dtype, Layout layout) : State(from.out, dtype, layout) {
    std::copy(from.lse.begin(), from.lse.end(), lse_.as<float>().begin());
    for (int64_t token = 0; token < from.out.tokens; ++token) {
      for (int64_t head = 0; head < from.out.heads; ++head) {
        for (int64_t i = 0; i < from.out.dim; ++i)
          store(dtype, from.out.row(token, head)[i], at(token, head, i));
      }
    }
  }
  State(const Values& shape, DType dtype, Layout layout)
      : dtype_(dtype),
        tokens_(shape.tokens),
        heads_(shape.heads),
        dim_(shape.dim),
        strides_(strides_of(layout, tokens_, heads_, dim_)),
        out_(static_cast<size_t>(strides_.elements * element_bytes(dtype))),
        lse_(static_cast<size_t>(tokens_ * heads_) * sizeof(float)) {}

  // Where a call on the device finds it. Read back by fetch().
  void place(Device device) {
    placed_out_.emplace(device, out_);
    placed_lse_.emplace(device, lse_);
  }
  void fetch() {
    placed_out_->fetch();
    placed_lse_->fetch();
  }
  Tensor out() {
    return {placed_out_->data() + strides_.first * element_bytes(dtype_),
            dtype_,
            tokens_,
            heads_,
            dim_,
            strides_.token,
            strides_.head};
  }
  ConstTensor const_out() {
    const Tensor tensor = out();
    return {tensor.data, dtype_, tokens_, heads_, dim_, strides_.token, strides_.head};
  }
  std::span<float> lse() { return placed_lse_->as<float>(); }
  Outcome read() {
    EXPECT_TRUE(out_.intact() && lse_.intact());
    const std::span<float> lse = lse_.as<float>();
    Outcome outcome{Values(tokens_, heads_, dim_), {lse.begin(), lse.end()}};
    for (int64_t token = 0; token < tokens_; ++token) {
      for (int64_t head = 0; head < heads_; ++head) {
        for (int64_t i = 0; i < dim_; ++i)
          outcome.out.row(token, head)[i] = load(dtype_, at(token, head, i));
      }
    }
    return outcome;
  }

 private:
  std::byte* at(int64_t token, int64_t head, int64_t i) {
    return out_.data() + (strides_.first + token * strides_.token + head * strides_.head + i) *
                             element_bytes(dtype_);
  }
  DType dtype_;
  int64_t tokens_, heads_, dim_;
  Strides strides_;
  Guarded out_, lse_;
  std::optional<Placed> placed_out_, placed_lse_;
};

class Merge : public OnBackend {
 protected:
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  static constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

  // `into` may be `a`. Without lse wanted, that of `into` stays as it was.
  Outcome run_merge(State& a, State& b, State& into, int num_threads = 1, bool with_lse = true) {
    Context context;
    context.device = is_cuda() ? Device::kCuda : Device::kCpu;
    context.num_threads = num_threads;
    for (State* state : {&a, &b, &into}) state->place(context.device);
    merge_states(a.const_out(), a.lse(), b.const_out(), b.lse(), into.out(),
                 with_lse ? into.lse() : std::span<float>(), context);
    synchronize(context.device);
    for (State* state : {&a, &b, &into}) state->fetch();
    return into.read();
  }
  Outcome merge_constants(const Outcome& first, const Outcome& second) {
    State a(first, DType::kFloat32, Layout::kContiguous),
        b(second, DType::kFloat32, Layout::kContiguous);
    State into(first.out, DType::kFloat32, Layout::kContiguous);
    return run_merge(a, b, into);
  }
};

inline Outcome half(const Inputs& inputs) {
  return run_attend(inputs, mask_of(inputs, Call(inputs).attention));
}

// What a plain program makes of two plain halves.
inline void merge_naive(const Expected& out_a, const Expected& lse_a, const Expected& out_b,
                        const Expected& lse_b, const Inputs& inputs, Truth& whole) {
  const int64_t dim = inputs.q.dim, tokens = inputs.q.tokens, heads = inputs.q.heads;
  for (const auto program : {&Expected::naive, &Expected::folded}) {
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t head = 0; head < heads; ++head) {
        const auto row = static_cast<size_t>(head * tokens + token);
        const float a = (lse_a.*program)[row], b = (lse_b.*program)[row], largest = std::max(a, b);
        const float lse = largest + std::log(std::exp(a - largest) + std::exp(b - largest));
        (whole.lse.*program)[row] = lse;
        for (int64_t i = 0; i < dim; ++i) {
          const auto e = static_cast<size_t>((token * heads + head) * dim + i);
          (whole.out.*program)[e] =
              round_to(inputs.config.dtype, std::exp(a - lse) * (out_a.*program)[e] +
                                                std::exp(b - lse) * (out_b.*program)[e]);
        }
      }
    }
  }
  derive_tolerance(whole.out, inputs.config.dtype);
  derive_tolerance(whole.lse, DType::kFloat32);
}

// The oracle's whole, with the error of a plain program that merges.
inline Truth merged_truth(const Halves& halves) {
  const auto truth = [](const Inputs& inputs) {
    return truth_of(inputs, mask_of(inputs, Call(inputs).attention));
  };
  Truth whole = truth(halves.whole);
  const Truth a = truth(halves.prefix), b = truth(halves.suffix);
  merge_naive(a.out, a.lse, b.out, b.lse, halves.whole, whole);
  return whole;
}

// D3: kv 4,096 = 1,500 + 2,596.
TEST_P(Merge, HalvesMakeTheWhole) {
  for (const DType dtype : dtypes()) {
    const Halves halves(
        on({.num_q_heads = 2, .head_dim = 64, .segments = {{70, 4096}}, .dtype = dtype}), 1500);
    State a(half(halves.prefix), dtype, Layout::kContiguous),
        b(half(halves.suffix), dtype, Layout::kHeadMajor);
    State into(halves.whole.q, dtype, Layout::kOddStrides);
    EXPECT_TRUE(matches(run_merge(a, b, into), merged_truth(halves)));
  }
}

TEST_P(Merge, EverySplit) {
  for (const int64_t split : {1, 5, 127, 128, 129, 200, 255}) {
    const Halves halves(on({.num_q_heads = 2, .head_dim = 16, .segments = {{10, 266}}}), split);
    State a(half(halves.prefix), DType::kFloat32, Layout::kContiguous);
    State b(half(halves.suffix), DType::kFloat32, Layout::kContiguous);
    State into(halves.whole.q, DType::kFloat32, Layout::kContiguous);
    EXPECT_TRUE(matches(run_merge(a, b, into), merged_truth(halves))) << split;
  }
}

// In place, on any number of threads, and into any dtype: the same bits as into memory of its own.
TEST_P(Merge, InPlaceAndThreads) {
  const Halves halves(on({.num_q_heads = 3, .head_dim = 24, .segments = {{200, 450}}}), 250);
  const Outcome first = half(halves.prefix), second = half(halves.suffix);
  for (const DType dtype : kDTypes) {
    for (const Layout layout : {Layout::kContiguous, Layout::kHeadMajor, Layout::kOddStrides}) {
      State a(first, dtype, layout), b(second, dtype, Layout::kContiguous),
          into(halves.whole.q, dtype, layout);
      const Outcome expected = run_merge(a, b, into);
      for (const int num_threads : {2, 3, 8})
        EXPECT_TRUE(same_bits(run_merge(a, b, into, num_threads), expected));
      EXPECT_TRUE(same_bits(run_merge(a, b, a), expected)) << "in place";
    }
  }
}

TEST_P(Merge, EachTensorHasItsOwnDType) {
  const Halves halves(on({.head_dim = 8, .segments = {{40, 100}}}), 60);
  const Outcome first = half(halves.prefix), second = half(halves.suffix);
  State a(first, DType::kFloat32, Layout::kContiguous),
      b(second, DType::kFloat32, Layout::kContiguous);
  State wide(halves.whole.q, DType::kFloat32, Layout::kContiguous);
  Outcome expected = run_merge(a, b, wide);
  expected.out.round(DType::kBFloat16);
  State narrow(halves.whole.q, DType::kBFloat16, Layout::kContiguous);
  EXPECT_TRUE(same_bits(run_merge(a, b, narrow), expected));
}

// Without lse wanted, out is the same.
TEST_P(Merge, LseMayBeUnwanted) {
  const Halves halves(on({.head_dim = 8, .segments = {{40, 100}}}), 60);
  State a(half(halves.prefix), DType::kFloat32, Layout::kContiguous);
  State b(half(halves.suffix), DType::kFloat32, Layout::kContiguous);
  State with(halves.whole.q, DType::kFloat32, Layout::kContiguous),
      without(halves.whole.q, DType::kFloat32, Layout::kContiguous);
  const Outcome expected = run_merge(a, b, with);
  const Outcome outcome = run_merge(a, b, without, 1, /*with_lse=*/false);
  EXPECT_TRUE(same_bits(outcome.out.data, expected.out.data, "out"));
  for (const float lse : outcome.lse) ASSERT_TRUE(std::isnan(lse)) << "written";
}

inline Outcome state_of(float value, float lse) {
  Outcome outcome{Values(3, 2, 8), std::vector<float>(6, lse)};
  std::fill(outcome.out.data.begin(), outcome.out.data.end(), value);
  return outcome;
}

// E1: an empty state adds nothing, whatever its out holds; two of them are empty.
TEST_P(Merge, EmptyStates) {
  const Outcome full = state_of(1.25f, -3.5f), empty = state_of(kNaN, -kInf);
  EXPECT_TRUE(same_bits(merge_constants(full, empty), full));
  EXPECT_TRUE(same_bits(merge_constants(empty, full), full));
  EXPECT_TRUE(same_bits(merge_constants(empty, empty), state_of(0, -kInf)));
}

TEST_P(Merge, FarApartStatesDoNotOverflow) {
  EXPECT_TRUE(same_bits(merge_constants(state_of(1, 1000), state_of(2, -1000)), state_of(1, 1000)));
  EXPECT_TRUE(
      same_bits(merge_constants(state_of(1, -3e38f), state_of(2, 3e38f)), state_of(2, 3e38f)));
}

TEST_P(Merge, EqualStatesAverage) {
  const Outcome merged = merge_constants(state_of(1, 2), state_of(3, 2));
  EXPECT_FLOAT_EQ(merged.out.data[0], 2);
  EXPECT_FLOAT_EQ(merged.lse[0], 2 + std::log(2.f));
}

TEST_P(Merge, NaNOfAFullStateShows) {
  EXPECT_TRUE(std::isnan(merge_constants(state_of(kNaN, 0), state_of(1, 0)).out.data[0]));
  EXPECT_TRUE(std::isnan(merge_constants(state_of(1, kNaN), state_of(1, 0)).lse[0]));
}

}  // namespace crisp::test
