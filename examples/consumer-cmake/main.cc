// Prefill attention of one prompt with the library's own mask, and what it chose per head.
#include <crisp/crisp.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int64_t kTokens = 4096, kQHeads = 4, kKvHeads = 2, kHeadDim = 64;

// Any numbers will do here: a small generator, the same on every machine.
std::vector<float> noise(int64_t count, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(seed >> 8) / 8388608.f - 1.f;
  }
  return values;
}

crisp::ConstTensor view(const std::vector<float>& values, int64_t heads) {
  return {values.data(), crisp::DType::kFloat32, kTokens,  heads,
          kHeadDim,      heads * kHeadDim,       kHeadDim, 0};
}

int run() {
  const std::vector<float> q = noise(kTokens * kQHeads * kHeadDim, 1);
  const std::vector<float> k = noise(kTokens * kKvHeads * kHeadDim, 2);
  const std::vector<float> v = noise(kTokens * kKvHeads * kHeadDim, 3);
  std::vector<float> out(q.size());

  crisp::Attention attention{view(q, kQHeads), view(k, kKvHeads), view(v, kKvHeads)};
  attention.softmax_scale = 1.f / std::sqrt(static_cast<float>(kHeadDim));
  const crisp::Policy policy = crisp::Crisp{.alpha = 1.25f};
  crisp::BlockMask mask = crisp::mask_for(attention);
  crisp::Context context;
  if (const char* why = crisp::why_unsupported(attention, policy, mask, context)) {
    std::fprintf(stderr, "unsupported: %s\n", why);
    return 1;
  }
  std::vector<uint64_t> words(static_cast<size_t>(mask.bytes() / 8));
  mask.words = reinterpret_cast<uint32_t*>(words.data());
  const size_t bytes = crisp::workspace_bytes(attention, policy, mask, context);
  void* const workspace = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  context.workspace = {static_cast<std::byte*>(workspace), bytes};

  std::vector<crisp::HeadReport> report(kQHeads);
  const crisp::Tensor result{out.data(), crisp::DType::kFloat32, kTokens,  kQHeads,
                             kHeadDim,   kQHeads * kHeadDim,     kHeadDim, 0};
  crisp::prefill(attention, policy, mask, result, {}, context, report);
  std::free(workspace);

  std::printf("crisp %s on %s\n", crisp::version(), crisp::cpu_target());
  const auto causal = static_cast<double>(crisp::num_causal_blocks(attention));
  for (size_t head = 0; head < report.size(); ++head) {
    const double density = static_cast<double>(report[head].num_blocks) / causal;
    std::printf("head %zu: density %.2f\n", head, density);
    if (!(density > 0 && density <= 1) || !std::isfinite(out[head * kHeadDim])) return 1;
  }
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (
      const crisp::Error& error) {  // what() names the argument, its value and what was expected
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
