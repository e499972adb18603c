#include "commands/check_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "commands/engine.h"
#include "commands/engine_cuda.h"
#include "commands/oracle.h"
#include "commands/policy_options.h"
#include "core/half.h"
#include "core/problem.h"

namespace crisp::cli {

namespace {

// The tensors of a case; contiguous [heads, tokens, head_dim], or k and v in shuffled pages.
struct CaseData {
  std::vector<std::byte> q, k, v;
  std::vector<int32_t> block_table;
  std::vector<Segment> segments;
  std::vector<uint64_t> mask_words;
  Attention attention;
};

// Bell-shaped, mean 0, variance 1, the same bits on every machine: a sum of four uniform numbers.
float draw(std::mt19937_64& random) {
  const uint64_t bits = random();
  double sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<double>(bits >> (16 * i) & 0xffff) / 65536.0;
  return static_cast<float>((sum - 2) * std::sqrt(3.0));
}

// kv head 0 gets a sink: its first keys and its queries share a direction, so that both routes
// occur.
void fill(std::vector<std::byte>& memory, const ConstTensor& shape, std::mt19937_64& random,
          int64_t num_sink_heads, int64_t num_sink_tokens) {
  memory.resize(static_cast<size_t>(tensor_bytes(shape)));
  int64_t at = 0;
  for (int64_t head = 0; head < shape.num_heads; ++head) {
    for (int64_t token = 0; token < shape.num_tokens; ++token) {
      for (int64_t dim = 0; dim < shape.head_dim; ++dim, ++at) {
        float value = draw(random);
        if (head < num_sink_heads && token < num_sink_tokens && dim < 4) value += 3.f;
        store_float(memory.data(), shape.dtype, at, value);
      }
    }
  }
}

ConstTensor shape_only(DType dtype, int64_t heads, int64_t tokens, int64_t head_dim) {
  return as_const(head_major(nullptr, dtype, heads, tokens, head_dim));
}

// Tokens of `from` (contiguous) spread over pages in the order of the table.
ConstTensor into_pages(const CaseData& data, const ConstTensor& shape, int64_t page_size,
                       std::vector<std::byte>& memory) {
  const auto num_pages = static_cast<int64_t>(data.block_table.size());
  std::vector<std::byte> paged(static_cast<size_t>(num_pages * page_size * shape.num_heads *
                                                   shape.head_dim * element_bytes(shape.dtype)));
  ConstTensor out = shape;
  out.num_tokens = num_pages * page_size;
  out.token_stride = shape.num_heads * shape.head_dim;
  out.head_stride = shape.head_dim;
  out.page_stride = page_size * out.token_stride;
  const auto row_bytes = static_cast<size_t>(shape.head_dim * element_bytes(shape.dtype));
  for (int64_t head = 0; head < shape.num_heads; ++head) {
    for (int64_t token = 0; token < shape.num_tokens; ++token) {
      const int64_t page = data.block_table[static_cast<size_t>(token / page_size)];
      const int64_t to =
          page * out.page_stride + token % page_size * out.token_stride + head * out.head_stride;
      const int64_t from = head * shape.head_stride + token * shape.token_stride;
      std::memcpy(paged.data() + to * element_bytes(shape.dtype),
                  memory.data() + from * element_bytes(shape.dtype), row_bytes);
    }
  }
  memory = std::move(paged);
  out.data = memory.data();
  return out;
}

CaseData make_data(const CheckCase& one) {
  CaseData data;
  int64_t q_tokens = 0, kv_tokens = 0;
  for (const auto& [q_len, kv_len] : one.segments) {
    data.segments.push_back({q_tokens, q_len, kv_tokens, kv_len, 0});
    q_tokens += q_len;
    kv_tokens += kv_len;
  }
  std::mt19937_64 random(static_cast<uint64_t>(kv_tokens * 131 + one.head_dim));
  const int64_t group = one.num_q_heads / one.num_kv_heads;
  Attention& a = data.attention;
  a.q = shape_only(one.dtype, one.num_q_heads, q_tokens, one.head_dim);
  a.k = a.v = shape_only(one.dtype, one.num_kv_heads, kv_tokens, one.head_dim);
  a.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(one.head_dim)));
  fill(data.q, a.q, random, group, q_tokens);
  fill(data.k, a.k, random, 1, 4);
  fill(data.v, a.v, random, 0, 0);
  a.q.data = data.q.data();
  a.k.data = data.k.data();
  a.v.data = data.v.data();
  a.segments = data.segments;
  if (one.page_size > 0) {
    data.block_table.resize(static_cast<size_t>(ceil_div(kv_tokens, one.page_size)));
    std::iota(data.block_table.begin(), data.block_table.end(), 0);
    std::shuffle(data.block_table.begin(), data.block_table.end(), random);
    const ConstTensor shape = a.k;
    a.k = into_pages(data, shape, one.page_size, data.k);
    a.v = into_pages(data, shape, one.page_size, data.v);
    const auto entries = static_cast<int64_t>(data.block_table.size());
    a.pages = {data.block_table.data(), 1, entries, one.page_size};
  }
  return data;
}

// The policy to run: the case's, or a random mask, which forces nothing: rows may be empty.
Policy policy_of(const CheckCase& one, CaseData& data) {
  if (one.density >= 1) return one.policy;
  BlockMask mask = mask_for(data.attention);
  data.mask_words.assign(static_cast<size_t>(mask.bytes() / 8), 0);
  std::mt19937_64 random(7);
  for (uint64_t& word : data.mask_words) {
    for (int bit = 0; bit < 64; ++bit) {
      const bool keep = static_cast<double>(random() >> 11) * 0x1p-53 < one.density;
      word |= static_cast<uint64_t>(keep) << bit;
    }
  }
  mask.words = reinterpret_cast<uint32_t*>(data.mask_words.data());
  return UserMask{mask};
}

double largest_norm(const reference::Matrix& rows) {
  double largest = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < rows.cols; ++c) sum += rows(r, c) * rows(r, c);
    largest = std::max(largest, sum);
  }
  return std::sqrt(largest);
}

// First-order bounds of float32 arithmetic with unit roundoff u, whatever the order of the sums.
// |s| <= B = scale |q| |k|. A logit is a dot product of d terms, scaled, turned to base 2: its
// error is at most (d + 4) u B. A weight adds that of exp2 (at most 4 u here); a sum of n terms
// adds n u. Tensor cores cut sums off instead of rounding them, so that u is twice as large, and
// take weights in the dtype of v.
struct Bounds {
  double out, lse;
};
Bounds bounds_of(const reference::Head& head, DType dtype, bool on_cuda) {
  constexpr double kRounding[] = {0x1p-24, 0x1p-11, 0x1p-8};  // to the dtype
  const double unit = on_cuda ? 0x1p-23 : 0x1p-24;
  const double rounding = kRounding[static_cast<size_t>(dtype)] * (on_cuda ? 2 : 1);
  const double logit = head.softmax_scale * largest_norm(head.q) * largest_norm(head.k);
  const double weight = unit * (static_cast<double>(head.k.cols + 4) * logit + 4);
  const double sum = unit * static_cast<double>(head.k.rows);
  double value = 0;
  for (const double v : head.v.values) value = std::max(value, std::abs(v));
  const double lse = logit + std::log(static_cast<double>(std::max<int64_t>(head.k.rows, 1)));
  return {value * (2 * weight + 2 * sum + rounding), weight + sum + 2 * unit * lse};
}

// The policy with its threshold moved by a share `shift`; negative keeps no fewer blocks.
Policy shifted(const Policy& policy, float shift) {
  Policy moved = policy;
  if (auto* crisp = std::get_if<Crisp>(&moved)) {
    crisp->alpha *= 1 + shift;
    crisp->gamma = std::min(1.f, crisp->gamma * (1 - shift));
  } else if (auto* flex = std::get_if<FlexPrefill>(&moved)) {
    flex->gamma = std::min(1.f, flex->gamma * (1 - shift));
  }
  return moved;
}

// Blocks outside [strict, lenient]: kept though even the lenient threshold drops them, or dropped
// though even the strict one keeps them. A user's mask has no threshold.
int64_t blocks_off(const Policy& policy, const reference::Head& head,
                   const reference::BlockSet& kept, int64_t q_head, int64_t mask_row) {
  constexpr float kShift = 1e-4f;
  const auto select = [&](const Policy& moved) {
    return reference_select(head, moved, q_head, mask_row).blocks;
  };
  if (kept.kept == select(policy).kept) return 0;
  const auto strict = select(shifted(policy, kShift)), lenient = select(shifted(policy, -kShift));
  int64_t off = 0;
  for (size_t i = 0; i < kept.kept.size(); ++i) {
    off += (kept.kept[i] && !lenient.kept[i]) || (!kept.kept[i] && strict.kept[i]) ? 1 : 0;
  }
  return off;
}

// |got - exact|; an infinity that is meant is no error.
double error_of(double got, double exact) { return got == exact ? 0 : std::abs(got - exact); }

void compare_head(const CheckCase& one, const Attention& attention, const Run& run,
                  const SegmentShape& shape, int64_t q_head, bool on_cuda, CheckResult& result) {
  const Segment segment{shape.q_start, shape.q_len, shape.kv_start, shape.kv_len, shape.page_row};
  const reference::Head head = reference_head(attention, segment, q_head);
  const auto blocks = blocks_of(run.mask, head, q_head, shape.first_mask_row);
  result.blocks_off += blocks_off(run.policy, head, blocks, q_head, shape.first_mask_row);
  const reference::AttendResult exact = reference::attend(head, blocks);
  const Bounds bounds = bounds_of(head, one.dtype, on_cuda);
  result.out_bound = std::max(result.out_bound, bounds.out);
  result.lse_bound = std::max(result.lse_bound, bounds.lse);
  const auto worst = [](double& largest, double error) {
    if (!(error <= largest)) largest = error;  // keeps a NaN
  };
  for (int64_t i = 0; i < shape.q_len; ++i) {
    const int64_t token = shape.q_start + i;
    worst(result.lse_error,
          error_of(static_cast<double>(
                       run.lse[static_cast<size_t>(q_head * run.out.num_tokens + token)]),
                   exact.lse[static_cast<size_t>(i)]));
    for (int64_t dim = 0; dim < one.head_dim; ++dim) {
      const int64_t at = q_head * run.out.head_stride + token * run.out.token_stride + dim;
      worst(result.out_error, error_of(static_cast<double>(load_float(run.out.data, one.dtype, at)),
                                       exact.out(i, dim)));
    }
  }
}

bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

std::string describe(const CheckCase& one) {
  std::string lengths;
  for (const auto& [q_len, kv_len] : one.segments) {
    lengths += fmt::format("{}{}/{}", lengths.empty() ? "" : " ", q_len, kv_len);
  }
  std::string policy =
      one.density < 1 ? fmt::format("mask of density {}", one.density) : name(kind_of(one.policy));
  if (const auto* crisp = std::get_if<Crisp>(&one.policy)) {
    if (crisp->routing == Routing::kJsDistance) policy += " js";
    policy += crisp->selection == Selection::kCoverage    ? " coverage"
              : crisp->noise_floor == NoiseFloor::kMedian ? " median"
                                                          : "";
  } else if (const auto* flex = std::get_if<FlexPrefill>(&one.policy)) {
    policy += flex->variant == FlexPrefill::Variant::kPaper ? " paper" : " official";
  }
  return fmt::format("{}, {}, head_dim {}, heads {}/{}, q/kv {}{}", policy, name(one.dtype),
                     one.head_dim, one.num_q_heads, one.num_kv_heads, lengths,
                     one.page_size > 0 ? fmt::format(", pages of {}", one.page_size) : "");
}

CheckResult run_case(const CheckCase& one, int num_threads, bool on_cuda) {
  CaseData data = make_data(one);
  const Policy policy = policy_of(one, data);
  Run run = make_run(data.attention, policy), single = make_run(data.attention, policy);
  if (on_cuda) {
    const DeviceInput input(data.attention);
    for (Run* one_run : {&run, &single}) execute_on_cuda(input.attention(), *one_run, {});
  } else {
    execute(data.attention, run, num_threads, 1);
    execute(data.attention, single, 1, 1);
  }
  CheckResult result;
  result.same_bits =
      same_bytes(run.out_values.bytes(), single.out_values.bytes()) &&
      same_bytes(run.mask_words.bytes(), single.mask_words.bytes()) &&
      same_bytes(std::as_bytes(std::span(run.lse)), std::as_bytes(std::span(single.lse)));
  int64_t mask_row = 0;
  for (const Segment& segment : data.segments) {
    SegmentShape shape = segment_shape(segment, kBlockSize);
    shape.first_mask_row = mask_row;
    mask_row += shape.num_q_blocks;
    for (int64_t head = 0; head < one.num_q_heads && segment.q_len > 0; ++head) {
      compare_head(one, data.attention, run, shape, head, on_cuda, result);
    }
  }
  return result;
}

}  // namespace crisp::cli
