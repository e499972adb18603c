// limits.cc - prints docs/limits.md. Every line is asked of why_unsupported, so the page cannot say
// anything else than the code that refuses:
//   build/release/bin/limits > docs/limits.md
#include <cinttypes>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "crisp/crisp.h"

namespace {

using crisp::Attention;
using crisp::BlockMask;
using crisp::Context;
using crisp::DType;
using crisp::Policy;

// A call by its shape alone; no memory behind it.
struct Shape {
  int64_t q_len = 8192, kv_len = 8192, num_q_heads = 32, num_kv_heads = 8, head_dim = 128;
  int64_t block_size = 128, page_size = 0;
  DType dtype = DType::kBFloat16;
  float softmax_scale = 0.1f;
  bool causal = true;
  crisp::Device device = crisp::Device::kCpu;
};

// Probes ask for absurd shapes; what they would multiply to stays a number.
int64_t saturating(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

struct Probe {
  Attention attention;
  BlockMask mask;
  Context context;
  std::string refused;  // by mask_for, which checks the attention

  explicit Probe(const Shape& s) {
    const auto tensor = [&](int64_t tokens, int64_t heads) {
      const int64_t row = saturating(heads, s.head_dim);
      return crisp::ConstTensor{nullptr,    s.dtype, tokens,     heads,
                                s.head_dim, row,     s.head_dim, saturating(s.page_size, row)};
    };
    attention.q = tensor(s.q_len, s.num_q_heads);
    attention.k = attention.v = tensor(s.kv_len, s.num_kv_heads);
    attention.softmax_scale = s.softmax_scale;
    attention.causal = s.causal;
    if (s.page_size > 0)
      attention.pages = {nullptr, 1, (s.kv_len + s.page_size - 1) / s.page_size, s.page_size};
    context.device = s.device;
    context.num_threads = 8;
    try {
      mask = crisp::mask_for(attention, s.block_size);
    } catch (const crisp::Error& error) {
      refused = error.what();
    }
  }
};

// Empty: accepted.
std::string why(const Shape& shape, const Policy& policy = crisp::Dense{}) {
  const Probe probe(shape);
  if (!probe.refused.empty()) return probe.refused;
  const char* reason = crisp::why_unsupported(probe.attention, policy, probe.mask, probe.context);
  return reason == nullptr ? "" : reason;
}

bool accepts(const Shape& shape, const Policy& policy = crisp::Dense{}) {
  return why(shape, policy).empty();
}

struct NamedPolicy {
  const char* name;
  Policy policy;
};
const std::vector<NamedPolicy> kPolicies = {
    {"Dense", crisp::Dense{}}, {"Crisp", crisp::Crisp{}}, {"FlexPrefill", crisp::FlexPrefill{}}};

// Largest value of a field that is accepted, all smaller powers being accepted as well.
int64_t largest(const std::function<Shape(int64_t)>& with) {
  int64_t accepted = 1, refused = int64_t{1} << 62;
  while (refused - accepted > 1) {
    const int64_t middle = accepted + (refused - accepted) / 2;
    (accepts(with(middle)) ? accepted : refused) = middle;
  }
  return accepted;
}

// Rows of dtype and head_dim, with the sentences that refuse `other_dtype` and `other_dim`.
void print_elements(crisp::Device device, DType other_dtype, int64_t other_dim) {
  std::printf("| dtype of q, k, v, out (one for all) |");
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16"};
  const char* comma = " ";
  for (uint8_t dtype = 0; dtype < 3; ++dtype) {
    if (!accepts(Shape{.dtype = DType(dtype), .device = device})) continue;
    std::printf("%s%s", comma, kNames[dtype]);
    comma = ", ";
  }
  std::printf(" | %s |\n", why(Shape{.dtype = other_dtype, .device = device}).c_str());

  int64_t first = 0, last = 0, count = 0;
  for (int64_t head_dim = 1; head_dim <= 4096; ++head_dim) {
    if (!accepts(Shape{.head_dim = head_dim, .device = device})) continue;
    if (first == 0) first = head_dim;
    last = head_dim;
    ++count;
  }
  std::printf("| head_dim | %" PRId64 " to %" PRId64 " in steps of %" PRId64 " | %s |\n", first,
              last, (last - first) / (count - 1),
              why(Shape{.head_dim = other_dim, .device = device}).c_str());
}

void print_types() {
  std::printf("## Types and sizes\n\n| what | accepted | else |\n|---|---|---|\n");
  print_elements(crisp::Device::kCpu, DType(3), 100);
  std::printf("| q heads per kv head | any whole number | %s |\n",
              why(Shape{.num_q_heads = 9}).c_str());
  const int64_t heads =
      largest([](int64_t n) { return Shape{.num_q_heads = n, .num_kv_heads = 1}; });
  std::printf("| heads | 1 to %" PRId64 " | %s |\n", heads, why(Shape{.num_kv_heads = 0}).c_str());
  std::printf("| softmax_scale | > 0 and finite | %s |\n", why(Shape{.softmax_scale = 0}).c_str());
  std::printf("| page_size of a paged KV cache | 1 and up, 0: contiguous | %s |\n",
              why(Shape{.kv_len = 8192, .page_size = 48}).c_str());
}

void print_policies() {
  std::printf(
      "\n## Policies\n\n| policy | causal | non-causal | block_size 128 | block_size 64 |\n");
  std::printf("|---|---|---|---|---|\n");
  const auto mark = [](bool yes) { return yes ? "yes" : "refused"; };
  for (const auto& [name, policy] : kPolicies) {
    std::printf("| %s | %s | %s | %s | %s |\n", name, mark(accepts(Shape{}, policy)),
                mark(accepts(Shape{.causal = false}, policy)), mark(accepts(Shape{}, policy)),
                mark(accepts(Shape{.block_size = 64}, policy)));
  }
  std::printf("\nA user's mask and `attend` accept what `Dense` accepts. Causal attention wants ");
  std::printf("kv_len >= q_len, or kv_len 0;\na shorter one is refused: \"%s\".\n",
              why(Shape{.q_len = 200, .kv_len = 100}).c_str());
}

std::string size(size_t bytes) {
  char text[32];
  const double mib = static_cast<double>(bytes) / (1 << 20);
  if (mib < 1) {
    std::snprintf(text, sizeof(text), "%.0f KiB", mib * 1024);
  } else {
    std::snprintf(text, sizeof(text), "%.1f MiB", mib);
  }
  return text;
}

void print_lengths() {
  std::printf("\n## Largest n\n\n");
  std::printf(
      "The largest q_len = kv_len that is accepted; whether the memory is there is another "
      "question.\n\n");
  std::printf("| q / kv heads | head_dim | block_size | largest n |\n|---|---|---|---|\n");
  struct Model {
    int64_t q, kv, dim, block;
  };
  for (const Model m : {Model{32, 8, 128, 128}, Model{9, 3, 64, 128}, Model{64, 8, 256, 128},
                        Model{1, 1, 8, 128}, Model{32, 8, 128, 64}}) {
    const auto with = [m](int64_t n) {
      return Shape{.q_len = n,
                   .kv_len = n,
                   .num_q_heads = m.q,
                   .num_kv_heads = m.kv,
                   .head_dim = m.dim,
                   .block_size = m.block};
    };
    std::printf("| %" PRId64 " / %" PRId64 " | %" PRId64 " | %" PRId64 " | %" PRId64 " |\n", m.q,
                m.kv, m.dim, m.block, largest(with));
  }
  std::printf(
      "\nBesides q, k, v and out a call takes its mask and its workspace; for 32 / 8 heads of "
      "128, ");
  std::printf("on 8 threads:\n\n");
  std::printf("| n | mask | workspace of Dense | Crisp | FlexPrefill |\n|---|---|---|---|---|\n");
  for (const int64_t n : {8192, 32768, 131072, 524288, 1048576}) {
    const Probe probe(Shape{.q_len = n, .kv_len = n});
    std::printf("| %" PRId64 " | %s |", n, size(static_cast<size_t>(probe.mask.bytes())).c_str());
    for (const auto& named : kPolicies)
      std::printf(" %s |", size(crisp::workspace_bytes(probe.attention, named.policy, probe.mask,
                                                       probe.context))
                               .c_str());
    std::printf("\n");
  }
}

// Only what differs; printed by builds that have the backend.
void print_cuda() {
  constexpr crisp::Device kCuda = crisp::Device::kCuda;
  std::printf("\n## On CUDA\n\n");
  std::printf("A build with a CUDA compiler also accepts `Device::kCuda`, on cards of compute ");
  std::printf(
      "capability 8.0 and up. What differs:\n\n| what | accepted | else |\n|---|---|---|\n");
  print_elements(kCuda, DType::kFloat32, 264);
  std::printf("| q heads x tiles of queries | to 2^31 - 1 | %s |\n",
              why(Shape{.q_len = int64_t{1} << 30,
                        .kv_len = int64_t{1} << 30,
                        .num_q_heads = 1024,
                        .device = kCuda})
                  .c_str());
  std::printf("\nWorkspace for 32 / 8 heads of 128:\n\n");
  std::printf("| n | Dense | Crisp | FlexPrefill |\n|---|---|---|---|\n");
  for (const int64_t n : {8192, 131072, 524288, 1048576}) {
    const Probe probe(Shape{.q_len = n, .kv_len = n, .device = kCuda});
    std::printf("| %" PRId64 " |", n);
    for (const auto& [name, policy] : kPolicies) {
      std::printf(
          " %s |",
          size(crisp::workspace_bytes(probe.attention, policy, probe.mask, probe.context)).c_str());
    }
    std::printf("\n");
  }
}

}  // namespace

int main() {
  std::printf("# Limits\n\n");
  std::printf(
      "Made by `tools/limits.cc` from `why_unsupported`, the function that refuses; a test holds ");
  std::printf(
      "this page to it.\nWhatever is not accepted here is refused before anything is written, ");
  std::printf("with the sentence shown.\n\n");
  print_types();
  print_policies();
  print_lengths();
  if (accepts(Shape{.device = crisp::Device::kCuda})) print_cuda();
  return 0;
}
