#include "oracle.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "crisp/crisp_c.h"
#include "reference/reference.h"

namespace nb = nanobind;

namespace crisp::python {
namespace {

using Rows = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<const bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<nb::numpy, double>;
using Bools = nb::ndarray<nb::numpy, bool>;

reference::Matrix matrix_of(const Rows& rows) {
  reference::Matrix matrix(static_cast<int64_t>(rows.shape(0)),
                           static_cast<int64_t>(rows.shape(1)));
  matrix.values.assign(rows.data(), rows.data() + rows.size());
  return matrix;
}

reference::Head head_of(const Rows& q, const Rows& k, const Rows* v, double scale, bool causal) {
  reference::Head head;
  head.q = matrix_of(q);
  head.k = matrix_of(k);
  if (v != nullptr)
    head.v = matrix_of(*v);
  else
    head.v = reference::Matrix(head.k.rows, 0);
  head.softmax_scale = scale;
  head.causal = causal;
  return head;
}

Doubles to_numpy(std::vector<double> values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<double>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
  return {owned->data(), shape, owner};
}

Bools to_numpy(const reference::BlockSet& blocks) {
  const size_t count = blocks.kept.size();
  auto* owned = new bool[count];
  for (size_t i = 0; i < count; ++i) owned[i] = blocks.kept[i];
  nb::capsule owner(owned, [](void* p) noexcept { delete[] static_cast<bool*>(p); });
  return {owned, {static_cast<size_t>(blocks.rows), static_cast<size_t>(blocks.cols)}, owner};
}

reference::BlockSet blocks_of(const Bits& bits, const reference::Head& head, int64_t block_size) {
  reference::BlockSet blocks = reference::all_blocks(head, block_size);
  if (static_cast<int64_t>(bits.shape(0)) != blocks.rows ||
      static_cast<int64_t>(bits.shape(1)) != blocks.cols) {
    throw std::invalid_argument("blocks is " + std::to_string(bits.shape(0)) + " x " +
                                std::to_string(bits.shape(1)) + ", must be " +
                                std::to_string(blocks.rows) + " x " + std::to_string(blocks.cols));
  }
  for (size_t i = 0; i < blocks.kept.size(); ++i) {
    if (!bits.data()[i]) blocks.kept[i] = false;
  }
  return blocks;
}

reference::CrispOptions crisp_options(const crisp_policy& policy) {
  reference::CrispOptions options;
  options.tau_proxy = static_cast<double>(policy.tau_proxy);
  options.alpha = static_cast<double>(policy.alpha);
  options.gamma = static_cast<double>(policy.gamma);
  options.tau_js = static_cast<double>(policy.tau_js);
  options.sink_tokens = policy.sink_tokens;
  options.recency_tokens = policy.recency_tokens;
  options.min_budget_tokens = policy.min_budget_tokens;
  options.dense_below_tokens = policy.dense_below_tokens;
  options.noise_floor = static_cast<reference::NoiseFloor>(policy.noise_floor);
  options.pooled_keeps_budget = policy.pooled_keeps_budget != 0;
  options.routing = static_cast<reference::Routing>(policy.routing);
  options.selection = static_cast<reference::SelectionRule>(policy.selection);
  return options;
}

reference::FlexPrefillOptions flex_options(const crisp_policy& policy) {
  auto options = policy.variant == CRISP_OFFICIAL ? reference::FlexPrefillOptions::official()
                                                  : reference::FlexPrefillOptions::paper();
  options.tau = static_cast<double>(policy.tau_js);
  options.gamma = static_cast<double>(policy.gamma);
  options.min_budget_tokens = policy.min_budget_tokens;
  options.dense_below_tokens = policy.dense_below_tokens;
  return options;
}

reference::Selection select(const reference::Head& head, const crisp_policy& policy) {
  switch (policy.kind) {
    case CRISP_DENSE:
      return reference::select_dense(head);
    case CRISP_CRISP:
      return reference::select_crisp(head, crisp_options(policy));
    case CRISP_FLEX_PREFILL:
      return reference::select_flex_prefill(head, flex_options(policy));
    default:
      throw std::invalid_argument(
          "policy.kind is " + std::to_string(policy.kind) +
          ", must be dense, crisp or flexprefill: a user's mask needs no selection");
  }
}

using Selected = std::tuple<int, double, double, int64_t, int64_t, Bools>;

Selected oracle_select(const Rows& q, const Rows& k, double scale, bool causal,
                       const crisp_policy& policy) {
  reference::Selection selection;
  {
    nb::gil_scoped_release release;
    selection = select(head_of(q, k, nullptr, scale, causal), policy);
  }
  return {static_cast<int>(selection.pattern),
          selection.structural_mass,
          selection.js_distance,
          selection.num_vertical(),
          selection.num_slash(),
          to_numpy(selection.blocks)};
}

std::tuple<Doubles, Doubles> oracle_attend(const Rows& q, const Rows& k, const Rows& v,
                                           double scale, bool causal, const Bits& bits,
                                           int64_t block_size) {
  reference::AttendResult result;
  {
    nb::gil_scoped_release release;
    const reference::Head head = head_of(q, k, &v, scale, causal);
    result = reference::attend(head, blocks_of(bits, head, block_size), block_size);
  }
  const size_t rows = static_cast<size_t>(result.out.rows);
  const size_t cols = static_cast<size_t>(result.out.cols);
  return {to_numpy(std::move(result.out.values), {rows, cols}),
          to_numpy(std::move(result.lse), {rows})};
}

double oracle_coverage(const Rows& q, const Rows& k, double scale, bool causal, const Bits& bits,
                       int64_t block_size) {
  nb::gil_scoped_release release;
  const reference::Head head = head_of(q, k, nullptr, scale, causal);
  return reference::coverage(head, blocks_of(bits, head, block_size), block_size);
}

std::tuple<Doubles, Doubles, double> oracle_proxy(const Rows& q, const Rows& k, double scale,
                                                  int64_t sink_tokens, int64_t recency_tokens) {
  reference::ProxyMap proxy;
  {
    nb::gil_scoped_release release;
    proxy = reference::proxy_map(head_of(q, k, nullptr, scale, true), sink_tokens, recency_tokens);
  }
  const size_t blocks = proxy.p_v.size();
  return {to_numpy(std::move(proxy.p_v), {blocks}), to_numpy(std::move(proxy.p_s), {blocks}),
          proxy.structural_mass};
}

}  // namespace

void add_oracle(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("oracle_select", &oracle_select, "q"_a, "k"_a, "scale"_a, "causal"_a, "policy"_a,
             "q [q_len, d], k [kv_len, d] -> (pattern, structural mass, JS distance, verticals, "
             "slashes, kept blocks [q_blocks, kv_blocks])");
  module.def("oracle_attend", &oracle_attend, "q"_a, "k"_a, "v"_a, "scale"_a, "causal"_a,
             "blocks"_a, "block_size"_a, "-> (out [q_len, d], lse [q_len])");
  module.def("oracle_coverage", &oracle_coverage, "q"_a, "k"_a, "scale"_a, "causal"_a, "blocks"_a,
             "block_size"_a, "Mean over rows of the dense attention mass in the kept blocks");
  module.def("oracle_proxy", &oracle_proxy, "q"_a, "k"_a, "scale"_a, "sink_tokens"_a,
             "recency_tokens"_a,
             "-> (mass per key block, mass per block diagonal, structural mass)");
}

}  // namespace crisp::python
