// Any arguments of the C interface either are refused, or run within the caller's memory. Fields
// are spoiled one by one from an accepted call; tensors that claim more than the buffers behind
// them hold are only asked about (no library can tell), everything else is run. Guards round every
// output are checked after each call, and a refused call must have written nothing.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "crisp/crisp_c.h"

namespace {

constexpr size_t kGuard = 256;  // bytes
constexpr uint8_t kGuardByte = 0xa5, kFill = 0x5a;
constexpr int64_t kMaxElements = 1 << 16;
constexpr size_t kMaxWorkspace = size_t{64} << 20;

void require(bool condition) {
  if (!condition) std::abort();
}

// A buffer between guards, aligned to 256 bytes.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes), memory_(bytes + 3 * kGuard, kGuardByte) {
    begin_ = kGuard + (kGuard - reinterpret_cast<uintptr_t>(memory_.data()) % kGuard) % kGuard;
    std::fill_n(data(), bytes_, kFill);
  }
  uint8_t* data() { return memory_.data() + begin_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  void check_guards() const {
    const auto is_guard = [](uint8_t byte) { return byte == kGuardByte; };
    const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(begin_);
    require(std::all_of(memory_.begin(), begin, is_guard));
    require(std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), memory_.end(), is_guard));
  }
  bool untouched() {
    return std::all_of(data(), data() + bytes_, [](uint8_t b) { return b == kFill; });
  }

 private:
  size_t bytes_, begin_ = 0;
  std::vector<uint8_t> memory_;
};

int64_t odd_int64(FuzzedDataProvider& in) {
  constexpr int64_t kOdd[] = {0,   -1,  1,         7,         64,        127,
                              128, 129, INT32_MAX, INT64_MAX, INT64_MIN, int64_t{1} << 40};
  return in.ConsumeBool() ? in.PickValueInArray(kOdd) : in.ConsumeIntegralInRange<int64_t>(-4, 700);
}

int32_t odd_int32(FuzzedDataProvider& in) {
  constexpr int32_t kOdd[] = {0, -1, 1, 2, 3, 4, 128, 256, 1025, INT32_MAX, INT32_MIN};
  return in.PickValueInArray(kOdd);
}

float odd_float(FuzzedDataProvider& in) {
  constexpr float kOdd[] = {0.f, -1.f, 0.05f, 0.5f, 1.f, 2.f, 1e30f, 1e-40f, -0.f};
  if (in.ConsumeBool()) return in.PickValueInArray(kOdd);
  const auto bits = in.ConsumeIntegral<uint32_t>();
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void spoil_tensor(FuzzedDataProvider& in, crisp_tensor& tensor) {
  int64_t* const fields[] = {&tensor.num_tokens,   &tensor.num_heads,   &tensor.head_dim,
                             &tensor.token_stride, &tensor.head_stride, &tensor.page_stride};
  const auto which = in.ConsumeIntegralInRange<size_t>(0, 8);
  if (which < 6) *fields[which] = odd_int64(in);
  if (which == 6) tensor.dtype = odd_int32(in);
  if (which == 7) tensor.data = nullptr;
  if (which == 8)
    tensor.data = static_cast<uint8_t*>(tensor.data) + in.ConsumeIntegralInRange(0, 8);
}

// The harness's own sum, in arithmetic that cannot wrap: does the claim lie inside the buffer?
bool fits(const crisp_tensor& t, int64_t page_size) {
  if (t.num_tokens <= 0 || t.num_heads <= 0 || t.head_dim <= 0) return true;
  using Wide = long double;
  Wide last = static_cast<Wide>(t.num_heads) * std::max<Wide>(0, t.head_stride) + t.head_dim;
  if (page_size > 0) {
    const auto pages = static_cast<Wide>(t.num_tokens) / page_size + 1;
    last += pages * std::max<Wide>(0, t.page_stride) +
            Wide(page_size) * std::max<Wide>(0, t.token_stride);
  } else {
    last += static_cast<Wide>(t.num_tokens) * std::max<Wide>(0, t.token_stride);
  }
  return last <= kMaxElements;
}

struct Harness {
  Guarded q{kMaxElements * 4 + 16}, k{kMaxElements * 4 + 16}, v{kMaxElements * 4 + 16};
  Guarded out{kMaxElements * 4 + 16}, lse{kMaxElements * 4}, mask{1 << 16}, user_mask{1 << 16};
  Guarded report{sizeof(crisp_head_report) * 1024};
  std::vector<crisp_segment> segments;
  std::vector<int32_t> table = std::vector<int32_t>(1024);
  crisp_policy policy;
  crisp_args args = {};

  explicit Harness(FuzzedDataProvider& in)
      : policy(crisp_policy_default(in.ConsumeIntegralInRange(0, 3))) {
    const int64_t group = in.ConsumeIntegralInRange<int64_t>(1, 3);
    const int64_t heads = in.ConsumeIntegralInRange<int64_t>(1, 2);
    const int64_t head_dim = 8 * in.ConsumeIntegralInRange<int64_t>(1, 3);
    const int64_t kv_len = in.ConsumeIntegralInRange<int64_t>(0, 400);
    const int64_t q_len = in.ConsumeIntegralInRange<int64_t>(0, kv_len);
    const int32_t dtype = in.ConsumeIntegralInRange(0, 2);
    args.struct_size = sizeof(args);
    args.q = tensor(q, q_len, heads * group, head_dim, dtype);
    args.k = tensor(k, kv_len, heads, head_dim, dtype);
    args.v = tensor(v, kv_len, heads, head_dim, dtype);
    args.out = tensor(out, q_len, heads * group, head_dim, dtype);
    args.lse = in.ConsumeBool() ? lse.as<float>() : nullptr;
    args.report = in.ConsumeBool() ? report.as<crisp_head_report>() : nullptr;
    args.softmax_scale = 0.25f;
    args.causal = in.ConsumeIntegralInRange(0, 3) > 0 ? 1 : 0;
    args.num_threads = in.ConsumeIntegralInRange(0, 2);
    args.policy = &policy;
    policy.dense_below_tokens = in.ConsumeIntegralInRange(0, 500);
    policy.min_budget_tokens = in.ConsumeIntegralInRange(0, 300);
    if (in.ConsumeBool()) add_pages(in);
    if (in.ConsumeBool()) add_segments(in);
    fill_data(in);
  }

  static crisp_tensor tensor(Guarded& memory, int64_t tokens, int64_t heads, int64_t head_dim,
                             int32_t dtype) {
    crisp_tensor t = {};
    t.data = memory.data();
    t.num_tokens = tokens;
    t.num_heads = heads;
    t.head_dim = head_dim;
    t.token_stride = heads * head_dim;
    t.head_stride = head_dim;
    t.dtype = dtype;
    return t;
  }

  void add_pages(FuzzedDataProvider& in) {
    args.page_size = in.ConsumeIntegralInRange<int64_t>(1, 40);
    args.k.num_tokens = args.v.num_tokens =
        (args.k.num_tokens + args.page_size - 1) / args.page_size * args.page_size;
    args.k.page_stride = args.v.page_stride = args.page_size * args.k.token_stride;
    const auto pages = static_cast<int32_t>(args.k.num_tokens / args.page_size);
    for (int32_t& page : table) page = in.ConsumeIntegralInRange(0, std::max(0, pages - 1));
    args.block_table = table.data();
    args.num_page_rows = 2;
    args.page_row_stride = 512;
  }

  void add_segments(FuzzedDataProvider& in) {
    int64_t q_start = 0;
    while (segments.size() < 4 && in.ConsumeBool()) {
      const int64_t q_len = in.ConsumeIntegralInRange<int64_t>(0, 150);
      const int64_t kv_start = in.ConsumeIntegralInRange<int64_t>(0, 50);
      const int64_t kv_len = q_len + in.ConsumeIntegralInRange<int64_t>(0, 150);
      segments.push_back(
          {q_start, q_len, kv_start, kv_len, in.ConsumeIntegralInRange<int64_t>(0, 1)});
      q_start += q_len + in.ConsumeIntegralInRange<int64_t>(0, 3);
    }
    args.segments = segments.data();
    args.num_segments = static_cast<int64_t>(segments.size());
  }

  void fill_data(FuzzedDataProvider& in) {
    const auto bytes = in.ConsumeBytes<uint8_t>(in.ConsumeIntegralInRange<size_t>(0, 64));
    for (Guarded* memory : {&q, &k, &v, &user_mask}) {
      std::memset(memory->data(), 0x3c, 1 << 16);
      for (size_t i = 0; i < bytes.size(); ++i) memory->data()[i * 37] = bytes[i];
    }
  }

  void spoil(FuzzedDataProvider& in) {
    crisp_tensor* const tensors[] = {&args.q, &args.k, &args.v, &args.out};
    int64_t* const integers[] = {&args.num_page_rows,     &args.page_row_stride,
                                 &args.page_size,         &args.mask.num_heads,
                                 &args.mask.num_q_blocks, &args.mask.num_kv_blocks,
                                 &args.mask.block_size};
    int32_t* const options[] = {&policy.kind,
                                &policy.sink_tokens,
                                &policy.recency_tokens,
                                &policy.min_budget_tokens,
                                &policy.dense_below_tokens,
                                &policy.noise_floor,
                                &policy.pooled_keeps_budget,
                                &policy.routing,
                                &policy.selection,
                                &policy.variant,
                                &args.device,
                                &args.causal,
                                &args.num_threads};
    float* const scalars[] = {&policy.tau_proxy, &policy.alpha, &policy.gamma, &policy.tau_js,
                              &args.softmax_scale};
    switch (in.ConsumeIntegralInRange(0, 7)) {
      case 0:
        return spoil_tensor(in, *in.PickValueInArray(tensors));
      case 1:
        *in.PickValueInArray(integers) = odd_int64(in);
        return;
      case 2:
        *in.PickValueInArray(options) = odd_int32(in);
        return;
      case 3:
        *in.PickValueInArray(scalars) = odd_float(in);
        return;
      case 4:
        table[in.ConsumeIntegralInRange<size_t>(0, 1023)] = odd_int32(in);
        return;
      case 5:
        return spoil_segment(in);
      case 6:
        return spoil_pointer(in);
      default:
        return;
    }
  }

  void spoil_segment(FuzzedDataProvider& in) {
    if (segments.empty()) return;
    crisp_segment& s = segments[in.ConsumeIntegralInRange<size_t>(0, segments.size() - 1)];
    int64_t* const fields[] = {&s.q_start, &s.q_len, &s.kv_start, &s.kv_len, &s.page_row};
    *in.PickValueInArray(fields) = odd_int64(in);
  }

  void spoil_pointer(FuzzedDataProvider& in) {
    switch (in.ConsumeIntegralInRange(0, 6)) {
      case 0:
        args.mask.words = nullptr;
        return;
      case 1:
        args.policy = nullptr;
        return;
      case 2:
        args.block_table = nullptr;
        return;
      case 3:
        args.segments = nullptr;
        return;
      case 4:
        args.workspace = nullptr;
        return;
      case 5:
        args.struct_size =
            static_cast<uint32_t>(in.ConsumeIntegralInRange<size_t>(0, sizeof(args) + 8));
        return;
      default:
        policy.struct_size =
            static_cast<uint32_t>(in.ConsumeIntegralInRange<size_t>(0, sizeof(policy) + 8));
        return;
    }
  }

  bool claims_fit() const {
    const int64_t rows = std::max<int64_t>(args.num_page_rows, 0),
                  stride = std::max<int64_t>(args.page_row_stride, 0);
    if (args.page_size > 0 &&
        static_cast<long double>(rows) * static_cast<long double>(stride) > 1024)
      return false;
    const long double masks = 4.L *
                              static_cast<long double>((args.mask.num_kv_blocks + 63) / 64 * 2) *
                              static_cast<long double>(args.mask.num_heads) *
                              static_cast<long double>(args.mask.num_q_blocks);
    const int64_t segments_or_one = std::max<int64_t>(args.num_segments, 1);
    return fits(args.q, 0) && fits(args.k, args.page_size) && fits(args.v, args.page_size) &&
           fits(args.out, 0) && masks <= 65536 && args.num_threads <= 4 &&
           static_cast<long double>(args.q.num_heads) *
                   static_cast<long double>(args.q.num_tokens) <=
               kMaxElements &&
           static_cast<long double>(args.q.num_heads) * static_cast<long double>(segments_or_one) <=
               1024;
  }

  void check(int status) {
    for (Guarded* memory : {&q, &k, &v, &out, &lse, &mask, &user_mask, &report})
      memory->check_guards();
    if (status == CRISP_OK) return;
    require(status == CRISP_INVALID_ARGUMENT);
    require(crisp_last_error()[0] != '\0');
    for (Guarded* memory : {&out, &lse, &mask, &report}) require(memory->untouched());
  }
};

// Only one of the calls runs per input, so that "untouched" can be held against a fresh buffer.
int run(FuzzedDataProvider& in, const crisp_args& args) {
  switch (in.ConsumeIntegralInRange(0, 2)) {
    case 0:
      return crisp_select(&args);
    case 1:
      return crisp_attend(&args);
    default:
      return crisp_prefill(&args);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  Harness harness(in);
  crisp_args& args = harness.args;
  crisp_mask_shape(&args, in.ConsumeIntegralInRange(0, 3) > 0 ? 128 : 64, &args.mask);
  args.mask.words = harness.mask.as<uint32_t>();
  harness.policy.mask = args.mask;
  harness.policy.mask.words = harness.user_mask.as<uint32_t>();
  for (int times = in.ConsumeIntegralInRange(0, 3); times > 0; --times) harness.spoil(in);

  size_t bytes = 0;
  int64_t blocks = 0;
  const char* why = crisp_why_unsupported(&args);
  const int sized = crisp_workspace_size(&args, &bytes);
  require((why == nullptr) == (sized == CRISP_OK));
  crisp_num_causal_blocks(&args, 128, &blocks);
  require(blocks >= 0);
  if (!harness.claims_fit() || bytes > kMaxWorkspace) return 0;

  Guarded workspace(bytes);
  if (args.policy != nullptr && in.ConsumeIntegralInRange(0, 9) > 0) {
    args.workspace = workspace.data();
    args.workspace_bytes = bytes - (in.ConsumeIntegralInRange(0, 9) == 0 ? bytes / 2 : 0);
  }
  const int status = run(in, args);
  harness.check(status);
  workspace.check_guards();
  if (status != CRISP_OK) require(workspace.untouched());
  return 0;
}
