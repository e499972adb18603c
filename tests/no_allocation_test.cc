// no_allocation_test.cc - the library allocates no data buffer: while a call runs, nobody asks the
// C library for more than 64 KiB at once. (Threads and their queues are smaller.)
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "run.h"

namespace {

std::atomic<bool> watching{false};
std::atomic<size_t> largest{0};

void saw(size_t bytes) {
  if (!watching.load(std::memory_order_relaxed)) return;
  size_t before = largest.load();
  while (bytes > before && !largest.compare_exchange_weak(before, bytes)) {
  }
}

}  // namespace

// glibc's documented way to replace malloc is to define it; the sanitizers define it themselves and
// offer a hook instead.
extern "C" {
#if defined(__SANITIZE_ADDRESS__)
int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*, size_t),
                                              void (*free_hook)(const volatile void*));
#else
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  saw(bytes);
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  saw(count * bytes);
  return __libc_calloc(count, bytes);
}
void* realloc(void* block, size_t bytes) {
  saw(bytes);
  return __libc_realloc(block, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  saw(bytes);
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  saw(bytes);
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** block, size_t alignment, size_t bytes) {
  saw(bytes);
  *block = __libc_memalign(alignment, bytes);
  return *block == nullptr;
}
#endif
}

namespace crisp::test {
namespace {

class NoAllocation : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_install_malloc_and_free_hooks(
        [](const volatile void*, size_t bytes) { saw(bytes); }, [](const volatile void*){});
#endif
  }
  template <class Body>
  static size_t largest_while(const Body& body) {
    largest = 0;
    watching = true;
    body();
    watching = false;
    return largest;
  }
};

constexpr size_t kAllowed = 64 * 1024;  // bytes

TEST_F(NoAllocation, TheWatchSeesAllocations) {
  // Through a pointer the compiler cannot see through: clang drops an allocation nobody reads.
  void* (*volatile allocate)(size_t) = std::malloc;
  void* kept = nullptr;
  EXPECT_GE(largest_while([&] { kept = allocate(1000000); }), 1000000u);
  std::free(kept);
}

TEST_F(NoAllocation, PrefillOfEveryPolicy) {
  for (const Policy& policy :
       {Policy(Dense{}), Policy(Crisp{}), Policy(FlexPrefill{}), Policy(Crisp{.tau_proxy = 0})}) {
    const Inputs inputs = make_inputs({.num_q_heads = 4,
                                       .num_kv_heads = 2,
                                       .head_dim = 64,
                                       .segments = {{2048, 2048}},
                                       .dtype = DType::kBFloat16,
                                       .policy = policy,
                                       .num_threads = 2});
    const Call call(inputs);
    OwnedMask mask(call.attention, 128);
    Context context;
    context.num_threads = 2;
    Guarded workspace(workspace_bytes(call.attention, policy, mask.mask, context));
    context.workspace = workspace.bytes();
    Guarded out(2048 * 4 * 64 * 2), lse(2048 * 4 * 4);
    std::vector<HeadReport> report(4);
    const Tensor result{out.data(), DType::kBFloat16, 2048, 4, 64, 256, 64};
    const size_t bytes = largest_while([&] {
      prefill(call.attention, policy, mask.mask, result, lse.as<float>(), context, report);
      attend(call.attention, mask.mask, result, lse.as<float>(), context);
    });
    EXPECT_LE(bytes, kAllowed) << inputs.config;
  }
}

TEST_F(NoAllocation, Merge) {
  Guarded a(4096 * 64 * 4), b(4096 * 64 * 4);
  std::vector<float> lse_a(4096), lse_b(4096);
  const Tensor out{a.data(), DType::kFloat32, 4096, 1, 64, 64, 64};
  const ConstTensor first{a.data(), DType::kFloat32, 4096, 1, 64, 64, 64},
      second{b.data(), DType::kFloat32, 4096, 1, 64, 64, 64};
  Context context;
  context.num_threads = 2;
  EXPECT_LE(largest_while([&] { merge_states(first, lse_a, second, lse_b, out, lse_a, context); }),
            kAllowed);
}

// K1, K2: at 512k tokens of 32 heads the scratch stays below 256 MiB and a mask has one bit a
// block. Shapes only: nothing is run, and no pointer is looked at.
TEST_F(NoAllocation, WorkspaceAt512k) {
  constexpr int64_t kTokens = 524288;
  Attention attention;
  attention.q = {nullptr, DType::kBFloat16, kTokens, 32, 128, 32 * 128, 128};
  attention.k = attention.v = {nullptr, DType::kBFloat16, kTokens, 8, 128, 8 * 128, 128};
  attention.softmax_scale = 0.1f;
  const BlockMask mask = mask_for(attention);
  EXPECT_EQ(mask.bytes(), int64_t{64} << 20);
  Context context;
  context.num_threads = 16;
  for (const Policy& policy : {Policy(Dense{}), Policy(Crisp{}), Policy(FlexPrefill{})}) {
    EXPECT_LE(workspace_bytes(attention, policy, mask, context), size_t{256} << 20)
        << policy.index();
    EXPECT_EQ(why_unsupported(attention, policy, mask, context), nullptr);
  }
}

}  // namespace
}  // namespace crisp::test
