// module.cc - the extension crisp_prefill._core: crisp_c.h with addresses for pointers. What arrays
// are, and who owns them, is the business of the Python side.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "call.h"
#include "oracle.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace crisp::python {
namespace {

crisp_tensor make_tensor(uintptr_t data, int32_t dtype, int64_t num_tokens, int64_t num_heads,
                         int64_t head_dim, int64_t token_stride, int64_t head_stride,
                         int64_t page_stride) {
  return {reinterpret_cast<void*>(data),
          num_tokens,
          num_heads,
          head_dim,
          token_stride,
          head_stride,
          page_stride,
          dtype,
          0};
}

crisp_mask make_mask(uintptr_t words, int64_t num_heads, int64_t num_q_blocks,
                     int64_t num_kv_blocks, int64_t block_size) {
  return {reinterpret_cast<uint32_t*>(words), num_heads, num_q_blocks, num_kv_blocks, block_size};
}

void merge_states(const crisp_tensor& out_a, uintptr_t lse_a, const crisp_tensor& out_b,
                  uintptr_t lse_b, const crisp_tensor& out, uintptr_t lse, int32_t device,
                  uintptr_t stream, int32_t num_threads) {
  crisp_merge_args args = {};
  args.struct_size = sizeof(args);
  args.device = device;
  args.out_a = out_a;
  args.out_b = out_b;
  args.out = out;
  args.lse_a = reinterpret_cast<const float*>(lse_a);
  args.lse_b = reinterpret_cast<const float*>(lse_b);
  args.lse = reinterpret_cast<float*>(lse);
  args.stream = reinterpret_cast<void*>(stream);
  args.num_threads = num_threads;
  check_status(crisp_merge_states(&args));
}

crisp_policy default_policy(int32_t kind) {
  crisp_policy policy = {};
  check_status(crisp_policy_init(&policy, sizeof(policy), kind));
  return policy;
}

// numpy's __array_struct__, an interface that is documented as fixed: where an array lies, at a
// tenth of the price of __array_interface__.
struct ArrayStruct {
  int two, nd;
  char typekind;
  int itemsize, flags;
  intptr_t *shape, *strides;
  void* data;
};

constexpr int kWriteable = 0x400;  // of ArrayStruct::flags

const ArrayStruct& array_struct(const nb::capsule& capsule) {
  const auto* array = static_cast<const ArrayStruct*>(capsule.data());
  if (array == nullptr || array->two != 2) {
    throw std::invalid_argument("the capsule is no __array_struct__, expected one");
  }
  return *array;
}

// One sequence [1, tokens, heads, head_dim] with dense head_dim, else nothing.
std::optional<crisp_tensor> one_sequence(const nb::capsule& capsule, int32_t dtype) {
  const ArrayStruct& array = array_struct(capsule);
  const intptr_t size = array.itemsize;
  if (array.nd != 4 || array.shape[0] != 1) return std::nullopt;
  if (array.shape[1] == 0) {  // numpy gives arrays without elements strides of 0
    return make_tensor(reinterpret_cast<uintptr_t>(array.data), dtype, 0, array.shape[2],
                       array.shape[3], array.shape[2] * array.shape[3], array.shape[3], 0);
  }
  if (array.strides[3] != size) return std::nullopt;
  if (array.strides[1] % size != 0 || array.strides[2] % size != 0) return std::nullopt;
  return make_tensor(reinterpret_cast<uintptr_t>(array.data), dtype, array.shape[1], array.shape[2],
                     array.shape[3], array.strides[1] / size, array.strides[2] / size, 0);
}

bool same_shape(const crisp_tensor& a, const crisp_tensor& b) {
  return a.num_tokens == b.num_tokens && a.num_heads == b.num_heads && a.head_dim == b.head_dim;
}

// The common call in one step: numpy arrays of one dtype, one sequence, keys at least as many as
// queries. False, and nothing set, for every other: the Python side then says what is wrong, or how
// to go about it.
bool set_arrays(Call& call, const nb::capsule& q, const nb::capsule& k, const nb::capsule& v,
                const nb::capsule& out, int32_t dtype) {
  const auto to_q = one_sequence(q, dtype), to_k = one_sequence(k, dtype);
  const auto to_v = one_sequence(v, dtype), to_out = one_sequence(out, dtype);
  if (!to_q || !to_k || !to_v || !to_out || !same_shape(*to_k, *to_v)) return false;
  if (!same_shape(*to_q, *to_out) || (array_struct(out).flags & kWriteable) == 0) return false;
  if (to_q->num_tokens > to_k->num_tokens) return false;
  call.args.q = *to_q;
  call.args.k = *to_k;
  call.args.v = *to_v;
  call.args.out = *to_out;
  return true;
}

std::pair<uintptr_t, nb::tuple> array_layout(const nb::capsule& capsule) {
  const ArrayStruct& array = array_struct(capsule);
  nb::list strides;
  for (int i = 0; i < array.nd; ++i) {
    if (array.itemsize == 0 || array.strides[i] % array.itemsize != 0) {
      throw Refused{"an array has a stride of " + std::to_string(array.strides[i]) +
                    " bytes, expected a multiple of its elements' " +
                    std::to_string(array.itemsize)};
    }
    strides.append(array.strides[i] / array.itemsize);
  }
  return {reinterpret_cast<uintptr_t>(array.data), nb::tuple(strides)};
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Refused& error) {
    PyErr_SetString(PyExc_ValueError, error.message.c_str());
  } catch (const Failed& error) {
    PyErr_SetString(error.status == CRISP_OUT_OF_MEMORY ? PyExc_MemoryError : PyExc_RuntimeError,
                    error.message.c_str());
  }
}

void add_structs(nb::module_& module) {
  nb::class_<crisp_tensor>(module, "Tensor", "crisp_tensor; strides in elements")
      .def(
          "__init__",
          [](crisp_tensor* self, uintptr_t data, int32_t dtype, int64_t num_tokens,
             int64_t num_heads, int64_t head_dim, int64_t token_stride, int64_t head_stride,
             int64_t page_stride) {
            new (self) crisp_tensor(make_tensor(data, dtype, num_tokens, num_heads, head_dim,
                                                token_stride, head_stride, page_stride));
          },
          "data"_a, "dtype"_a, "num_tokens"_a, "num_heads"_a, "head_dim"_a, "token_stride"_a,
          "head_stride"_a, "page_stride"_a = 0);
  nb::class_<crisp_mask>(module, "Mask", "crisp_mask")
      .def(
          "__init__",
          [](crisp_mask* self, uintptr_t words, int64_t num_heads, int64_t num_q_blocks,
             int64_t num_kv_blocks, int64_t block_size) {
            new (self)
                crisp_mask(make_mask(words, num_heads, num_q_blocks, num_kv_blocks, block_size));
          },
          "words"_a, "num_heads"_a, "num_q_blocks"_a, "num_kv_blocks"_a, "block_size"_a)
      .def_ro("num_heads", &crisp_mask::num_heads)
      .def_ro("num_q_blocks", &crisp_mask::num_q_blocks)
      .def_ro("num_kv_blocks", &crisp_mask::num_kv_blocks)
      .def_ro("block_size", &crisp_mask::block_size)
      .def_prop_ro("words_per_row",
                   [](const crisp_mask& mask) { return crisp_mask_words_per_row(&mask); });
  nb::class_<crisp_policy>(module, "Policy",
                           "crisp_policy; Policy(kind) holds the defaults of a kind")
      .def(
          "__init__",
          [](crisp_policy* self, int32_t kind) { new (self) crisp_policy(default_policy(kind)); },
          "kind"_a)
      .def_ro("kind", &crisp_policy::kind)
      .def_rw("tau_proxy", &crisp_policy::tau_proxy)
      .def_rw("alpha", &crisp_policy::alpha)
      .def_rw("gamma", &crisp_policy::gamma)
      .def_rw("tau_js", &crisp_policy::tau_js)
      .def_rw("sink_tokens", &crisp_policy::sink_tokens)
      .def_rw("recency_tokens", &crisp_policy::recency_tokens)
      .def_rw("min_budget_tokens", &crisp_policy::min_budget_tokens)
      .def_rw("dense_below_tokens", &crisp_policy::dense_below_tokens)
      .def_rw("noise_floor", &crisp_policy::noise_floor)
      .def_rw("pooled_keeps_budget", &crisp_policy::pooled_keeps_budget)
      .def_rw("routing", &crisp_policy::routing)
      .def_rw("selection", &crisp_policy::selection)
      .def_rw("variant", &crisp_policy::variant)
      .def_rw("mask", &crisp_policy::mask);
}

// The work runs without the GIL: other Python threads go on.
void add_call(nb::module_& module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  const auto set_tensor = [](crisp_tensor crisp_args::*field) {
    return [field](Call& call, const crisp_tensor& tensor) { call.args.*field = tensor; };
  };
  nb::class_<Call>(module, "Call", "crisp_args and what it points to")
      .def(nb::init<int32_t, uintptr_t, int32_t, float, bool>(), "device"_a, "stream"_a,
           "num_threads"_a, "softmax_scale"_a, "causal"_a)
      .def("set_q", set_tensor(&crisp_args::q), "tensor"_a)
      .def("set_k", set_tensor(&crisp_args::k), "tensor"_a)
      .def("set_v", set_tensor(&crisp_args::v), "tensor"_a)
      .def("set_out", set_tensor(&crisp_args::out), "tensor"_a)
      .def(
          "set_lse",
          [](Call& call, uintptr_t data) { call.args.lse = reinterpret_cast<float*>(data); },
          "data"_a)
      .def(
          "set_report",
          [](Call& call, uintptr_t data) {
            call.args.report = reinterpret_cast<crisp_head_report*>(data);
          },
          "data"_a)
      .def(
          "set_mask", [](Call& call, const crisp_mask& mask) { call.args.mask = mask; }, "mask"_a)
      .def("set_arrays", &set_arrays, "q"_a, "k"_a, "v"_a, "out"_a, "dtype"_a,
           "From __array_struct__ of numpy arrays of one dtype; False if it is not the plain case")
      .def("set_segments", &Call::set_segments, "segments"_a,
           "(q_start, q_len, kv_start, kv_len, page_row) each")
      .def("set_pages", &Call::set_pages, "block_table"_a, "num_rows"_a, "row_stride"_a,
           "page_size"_a)
      .def("set_policy", &Call::set_policy, "policy"_a)
      .def("set_workspace", &Call::set_workspace, "data"_a, "bytes"_a)
      .def("set_own_mask", &Call::set_own_mask, "block_size"_a)
      .def("mask_shape", &Call::mask_shape, "block_size"_a)
      .def("num_causal_blocks", &Call::num_causal_blocks, "block_size"_a)
      .def("workspace_bytes", &Call::workspace_bytes)
      .def("why_unsupported", &Call::why_unsupported, "'' if the call would be accepted")
      .def("select", &Call::select, Unlocked())
      .def("attend", &Call::attend, Unlocked())
      .def("prefill", &Call::prefill, Unlocked())
      .def_prop_ro("stage_ms", &Call::stage_ms,
                   "proxy, route, select, mask, attend of the last run");
}

}  // namespace
}  // namespace crisp::python

NB_MODULE(_core, module) {
  using namespace crisp::python;
  // Policies in Python's caches outlive the interpreter's own clean-up; that is no leak.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  add_structs(module);
  add_call(module);
  add_oracle(module);
  module.def("merge_states", &merge_states, "out_a"_a, "lse_a"_a, "out_b"_a, "lse_b"_a, "out"_a,
             "lse"_a, "device"_a, "stream"_a, "num_threads"_a,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("array_layout", &array_layout, "array_struct"_a, "-> (address, strides in elements)");
  module.def("version", [] { return std::string(crisp_version()); });
  module.def("cpu_target", [] { return std::string(crisp_cpu_target()); });
  module.def(
      "report_layout",
      [] {
        return std::array<size_t, 7>{offsetof(crisp_head_report, pattern),
                                     offsetof(crisp_head_report, structural_mass),
                                     offsetof(crisp_head_report, js_distance),
                                     offsetof(crisp_head_report, num_vertical),
                                     offsetof(crisp_head_report, num_slash),
                                     offsetof(crisp_head_report, num_blocks),
                                     sizeof(crisp_head_report)};
      },
      "Offsets of crisp_head_report's fields, and its size, in bytes");
}
