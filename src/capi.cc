// capi.cc - crisp_c.h over crisp.h: structs -> structs, exceptions -> codes.
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <new>

#include "core/check.h"
#include "crisp/crisp.h"
#include "crisp/crisp_c.h"

namespace crisp {
namespace {

thread_local char last_error[512] = "";

int fail(int status, const char* message) noexcept {
  std::snprintf(last_error, sizeof(last_error), "%s", message);
  return status;
}

// Runs `body`; nothing leaves as an exception.
template <class Body>
int guarded(Body&& body) noexcept {
  try {
    body();
    return CRISP_OK;
  } catch (const Error& error) {
    return fail(CRISP_INVALID_ARGUMENT, error.what());
  } catch (const DeviceError& error) {
    return fail(CRISP_DEVICE_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return fail(CRISP_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return fail(CRISP_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail(CRISP_INTERNAL_ERROR, "an exception of unknown type");
  }
}

// The part of a caller's struct that it has, over the defaults already in `local`. Fields up to
// `first_optional` have been there from the first version.
template <class Struct>
void copy_sized(const char* name, Struct* local, const Struct* given, size_t first_optional) {
  CRISP_CHECK(given != nullptr, name, " is NULL, must point to a struct");
  const uint32_t size = given->struct_size;
  CRISP_CHECK(size >= first_optional && size <= sizeof(Struct), name, "->struct_size is ", size,
              ", must be sizeof of the struct, in [", first_optional, ", ", sizeof(Struct),
              "] for this library");
  std::memcpy(local, given, size);
}

template <class Enum>
Enum to_enum(const char* name, int32_t value, int32_t last) {
  CRISP_CHECK(value >= 0 && value <= last, name, " is ", value, ", must be in [0, ", last, "]");
  return static_cast<Enum>(value);
}

bool to_bool(const char* name, int32_t value) {
  CRISP_CHECK(value == 0 || value == 1, name, " is ", value, ", must be 0 or 1");
  return value == 1;
}

Tensor to_tensor(const char* name, const crisp_tensor& tensor) {
  const auto dtype = to_enum<DType>(name, tensor.dtype, 2);
  return {tensor.data,        dtype,
          tensor.num_tokens,  tensor.num_heads,
          tensor.head_dim,    tensor.token_stride,
          tensor.head_stride, tensor.page_stride};
}

ConstTensor to_const_tensor(const char* name, const crisp_tensor& tensor) {
  const Tensor t = to_tensor(name, tensor);
  return {t.data,     t.dtype,        t.num_tokens,  t.num_heads,
          t.head_dim, t.token_stride, t.head_stride, t.page_stride};
}

BlockMask to_mask(const crisp_mask& mask) {
  return {mask.words, mask.num_heads, mask.num_q_blocks, mask.num_kv_blocks, mask.block_size};
}

// Entries of an array whose length the ABI implies. Counts no call accepts give 0: such a call is
// refused for the counts themselves, which are checked first.
size_t implied_count(const void* data, int64_t a, int64_t b) {
  int64_t count = 0;
  if (data == nullptr || a < 0 || b < 0 || __builtin_mul_overflow(a, b, &count)) return 0;
  return count > INT64_MAX / 64 ? 0 : static_cast<size_t>(count);
}

// The caller's arrays of segments and reports are used in place.
static_assert(sizeof(crisp_segment) == sizeof(Segment) &&
              alignof(crisp_segment) == alignof(Segment));
static_assert(offsetof(crisp_segment, q_len) == offsetof(Segment, q_len));
static_assert(offsetof(crisp_segment, kv_start) == offsetof(Segment, kv_start));
static_assert(offsetof(crisp_segment, kv_len) == offsetof(Segment, kv_len));
static_assert(offsetof(crisp_segment, page_row) == offsetof(Segment, page_row));
static_assert(sizeof(crisp_head_report) == sizeof(HeadReport));
static_assert(alignof(crisp_head_report) == alignof(HeadReport));
static_assert(offsetof(crisp_head_report, structural_mass) ==
              offsetof(HeadReport, structural_mass));
static_assert(offsetof(crisp_head_report, js_distance) == offsetof(HeadReport, js_distance));
static_assert(offsetof(crisp_head_report, num_vertical) == offsetof(HeadReport, num_vertical));
static_assert(offsetof(crisp_head_report, num_slash) == offsetof(HeadReport, num_slash));
static_assert(offsetof(crisp_head_report, num_blocks) == offsetof(HeadReport, num_blocks));
static_assert(CRISP_STAGE_ATTEND == static_cast<int>(Stage::kAttend));
static_assert(CRISP_PATTERN_USER_MASK == static_cast<int>(Pattern::kUserMask));
static_assert(CRISP_BFLOAT16 == static_cast<int>(DType::kBFloat16));

crisp_policy default_policy(int32_t kind) {
  const Crisp crisp;
  const FlexPrefill flex;
  const bool is_flex = kind == CRISP_FLEX_PREFILL;
  crisp_policy policy = {};
  policy.struct_size = sizeof(policy);
  policy.kind = kind;
  policy.tau_proxy = crisp.tau_proxy;
  policy.alpha = crisp.alpha;
  policy.gamma = is_flex ? flex.gamma : crisp.gamma;
  policy.tau_js = is_flex ? flex.tau : crisp.tau_js;
  policy.sink_tokens = crisp.sink_tokens;
  policy.recency_tokens = crisp.recency_tokens;
  policy.min_budget_tokens = is_flex ? flex.min_budget_tokens : crisp.min_budget_tokens;
  policy.dense_below_tokens = is_flex ? flex.dense_below_tokens : crisp.dense_below_tokens;
  policy.noise_floor = static_cast<int32_t>(crisp.noise_floor);
  policy.pooled_keeps_budget = crisp.pooled_keeps_budget ? 1 : 0;
  policy.routing = static_cast<int32_t>(crisp.routing);
  policy.selection = static_cast<int32_t>(crisp.selection);
  policy.variant = static_cast<int32_t>(flex.variant);
  policy.mask.block_size = BlockMask{}.block_size;
  return policy;
}

Crisp to_crisp(const crisp_policy& policy) {
  Crisp crisp;
  crisp.tau_proxy = policy.tau_proxy;
  crisp.alpha = policy.alpha;
  crisp.gamma = policy.gamma;
  crisp.sink_tokens = policy.sink_tokens;
  crisp.recency_tokens = policy.recency_tokens;
  crisp.min_budget_tokens = policy.min_budget_tokens;
  crisp.dense_below_tokens = policy.dense_below_tokens;
  crisp.noise_floor = to_enum<NoiseFloor>("policy.noise_floor", policy.noise_floor, 1);
  crisp.pooled_keeps_budget = to_bool("policy.pooled_keeps_budget", policy.pooled_keeps_budget);
  crisp.routing = to_enum<Routing>("policy.routing", policy.routing, 1);
  crisp.selection = to_enum<Selection>("policy.selection", policy.selection, 1);
  crisp.tau_js = policy.tau_js;
  return crisp;
}

FlexPrefill to_flex_prefill(const crisp_policy& policy) {
  FlexPrefill flex;
  flex.tau = policy.tau_js;
  flex.gamma = policy.gamma;
  flex.min_budget_tokens = policy.min_budget_tokens;
  flex.dense_below_tokens = policy.dense_below_tokens;
  flex.variant = to_enum<FlexPrefill::Variant>("policy.variant", policy.variant, 1);
  return flex;
}

Policy to_policy(const crisp_policy* given) {
  CRISP_CHECK(given != nullptr, "policy is NULL, must point to a crisp_policy");
  constexpr size_t kFirstOptional = offsetof(crisp_policy, mask);
  CRISP_CHECK(given->struct_size >= kFirstOptional, "policy->struct_size is ", given->struct_size,
              ", must be sizeof(crisp_policy), at least ", kFirstOptional);
  crisp_policy policy = default_policy(given->kind);
  copy_sized("policy", &policy, given, kFirstOptional);
  switch (policy.kind) {
    case CRISP_DENSE:
      return Dense{};
    case CRISP_CRISP:
      return to_crisp(policy);
    case CRISP_FLEX_PREFILL:
      return to_flex_prefill(policy);
    case CRISP_USER_MASK:
      return UserMask{to_mask(policy.mask)};
    default:
      throw_error("policy.kind is ", policy.kind, ", must be in [0, ",
                  static_cast<int>(CRISP_USER_MASK), "]");
  }
}

// A caller's arguments as the C++ interface wants them. Not copyable: the context points into it.
class Call {
 public:
  explicit Call(const crisp_args* given) {
    copy_sized("args", &args_, given, offsetof(crisp_args, on_stage));
    attention.q = to_const_tensor("q.dtype", args_.q);
    attention.k = to_const_tensor("k.dtype", args_.k);
    attention.v = to_const_tensor("v.dtype", args_.v);
    attention.softmax_scale = args_.softmax_scale;
    attention.causal = to_bool("causal", args_.causal);
    attention.pages = {args_.block_table, args_.num_page_rows, args_.page_row_stride,
                       args_.page_size};
    set_segments();
    mask = to_mask(args_.mask);
    context.device = to_enum<Device>("device", args_.device, CRISP_CUDA);
    context.stream = static_cast<CUstream_st*>(args_.stream);
    context.num_threads = args_.num_threads;
    context.workspace = {static_cast<std::byte*>(args_.workspace), args_.workspace_bytes};
    if (args_.on_stage != nullptr) {
      context.on_stage = [](Stage stage, void* user) {
        const auto& args = *static_cast<const crisp_args*>(user);
        args.on_stage(static_cast<int32_t>(stage), args.on_stage_user);
      };
      context.on_stage_user = &args_;
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Policy policy() const { return to_policy(args_.policy); }
  Policy policy_or_dense() const { return args_.policy == nullptr ? Policy(Dense{}) : policy(); }
  Tensor out() const { return to_tensor("out.dtype", args_.out); }
  std::span<float> lse() const {
    return {args_.lse, implied_count(args_.lse, args_.q.num_heads, args_.q.num_tokens)};
  }
  std::span<HeadReport> report() const {
    const int64_t segments = args_.num_segments == 0 ? 1 : args_.num_segments;
    return {reinterpret_cast<HeadReport*>(args_.report),
            implied_count(args_.report, segments, args_.q.num_heads)};
  }

  Attention attention;
  BlockMask mask;
  Context context;

 private:
  void set_segments() {
    CRISP_CHECK(args_.num_segments >= 0 && args_.num_segments <= INT32_MAX, "num_segments is ",
                args_.num_segments, ", must be in [0, 2^31 - 1]");
    CRISP_CHECK(args_.num_segments == 0 || args_.segments != nullptr,
                "segments is NULL, must point to num_segments = ", args_.num_segments, " entries");
    attention.segments = {reinterpret_cast<const Segment*>(args_.segments),
                          static_cast<size_t>(args_.num_segments)};
  }

  crisp_args args_ = {};
};

void merge(const crisp_merge_args* given) {
  crisp_merge_args args = {};
  copy_sized("args", &args, given, sizeof(args));
  Context context;
  context.device = to_enum<Device>("device", args.device, CRISP_CUDA);
  context.stream = static_cast<CUstream_st*>(args.stream);
  context.num_threads = args.num_threads;
  const auto count = [&](const void* data) {
    return implied_count(data, args.out_a.num_heads, args.out_a.num_tokens);
  };
  merge_states(to_const_tensor("out_a.dtype", args.out_a), {args.lse_a, count(args.lse_a)},
               to_const_tensor("out_b.dtype", args.out_b), {args.lse_b, count(args.lse_b)},
               to_tensor("out.dtype", args.out), {args.lse, count(args.lse)}, context);
}

template <class Pointer>
void check_result(const char* name, Pointer* result) {
  CRISP_CHECK(result != nullptr, name, " is NULL, must point to the result");
}

}  // namespace
}  // namespace crisp

using namespace crisp;  // NOLINT: the functions below are the global C names

int crisp_mask_shape(const crisp_args* args, int64_t block_size, crisp_mask* mask) {
  return guarded([&] {
    check_result("mask", mask);
    const BlockMask shape = mask_for(Call(args).attention, block_size);
    *mask = {nullptr, shape.num_heads, shape.num_q_blocks, shape.num_kv_blocks, shape.block_size};
  });
}

int crisp_num_causal_blocks(const crisp_args* args, int64_t block_size, int64_t* blocks) {
  return guarded([&] {
    check_result("blocks", blocks);
    *blocks = num_causal_blocks(Call(args).attention, block_size);
  });
}

int crisp_workspace_size(const crisp_args* args, size_t* bytes) {
  return guarded([&] {
    check_result("bytes", bytes);
    const Call call(args);
    *bytes = workspace_bytes(call.attention, call.policy_or_dense(), call.mask, call.context);
  });
}

int crisp_measured_gate(const crisp_args* args, int32_t* tokens) {
  return guarded([&] {
    check_result("tokens", tokens);
    const Call call(args);
    *tokens = measured_gate(call.policy(), call.context);
  });
}

const char* crisp_why_unsupported(const crisp_args* args) {
  const char* reason = nullptr;
  const int status = guarded([&] {
    const Call call(args);
    reason = why_unsupported(call.attention, call.policy_or_dense(), call.mask, call.context);
  });
  return status == CRISP_OK ? reason : last_error;
}

int crisp_select(const crisp_args* args) {
  return guarded([&] {
    const Call call(args);
    select_blocks(call.attention, call.policy(), call.mask, call.context, call.report());
  });
}

int crisp_attend(const crisp_args* args) {
  return guarded([&] {
    const Call call(args);
    attend(call.attention, call.mask, call.out(), call.lse(), call.context);
  });
}

int crisp_prefill(const crisp_args* args) {
  return guarded([&] {
    const Call call(args);
    prefill(call.attention, call.policy(), call.mask, call.out(), call.lse(), call.context,
            call.report());
  });
}

int crisp_merge_states(const crisp_merge_args* args) {
  return guarded([&] { merge(args); });
}

int crisp_policy_init(crisp_policy* policy, uint32_t struct_size, int32_t kind) {
  return guarded([&] {
    check_result("policy", policy);
    CRISP_CHECK(kind >= CRISP_DENSE && kind <= CRISP_USER_MASK, "kind is ", kind,
                ", must be in [0, ", static_cast<int>(CRISP_USER_MASK), "]");
    crisp_policy defaults = default_policy(kind);
    CRISP_CHECK(struct_size >= offsetof(crisp_policy, mask) && struct_size <= sizeof(defaults),
                "struct_size is ", struct_size, ", must be in [", offsetof(crisp_policy, mask),
                ", ", sizeof(defaults), "] for this library");
    defaults.struct_size = struct_size;
    std::memcpy(policy, &defaults, struct_size);
  });
}

const char* crisp_strerror(int status) {
  switch (status) {
    case CRISP_OK:
      return "ok";
    case CRISP_INVALID_ARGUMENT:
      return "invalid argument";
    case CRISP_DEVICE_ERROR:
      return "device error";
    case CRISP_OUT_OF_MEMORY:
      return "out of memory";
    case CRISP_INTERNAL_ERROR:
      return "internal error";
    default:
      return "unknown status";
  }
}

const char* crisp_last_error(void) { return last_error; }
uint32_t crisp_abi_version(void) { return CRISP_ABI_VERSION; }
const char* crisp_version(void) { return version(); }
const char* crisp_cpu_target(void) { return cpu_target(); }
