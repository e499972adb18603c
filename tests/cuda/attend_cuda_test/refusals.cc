// refusals.cc - what CUDA refuses: by shape, which needs no GPU to be told, and by where memory
// lies. Nothing is written.
#include <functional>
#include <optional>

#include "backend.h"
#include "run.h"

namespace crisp::test {
namespace {

constexpr size_t kReportBytes = 8 * sizeof(HeadReport);

// A call that is accepted, with all that a refusal must leave alone.
struct Bench {
  Inputs inputs;
  Call call;
  Attention attention;
  OwnedMask owned_mask, user_mask;
  Guarded out_memory, lse_memory, report_memory, workspace_memory;
  Placed mask_words, user_words, out, lse, report, workspace;
  // What the call is given.
  BlockMask mask;
  Tensor to;
  std::span<float> to_lse;
  std::span<HeadReport> to_report;
  Policy policy = Dense{};
  Context context;
  // Host memory to point at, aligned to 256 bytes.
  Guarded host{1 << 20};

  explicit Bench(int64_t page_size)
      : inputs(make_inputs({.num_q_heads = 4,
                            .num_kv_heads = 2,
                            .head_dim = 64,
                            .segments = {{100, 200}, {150, 150}},
                            .padding = 4,
                            .dtype = DType::kBFloat16,
                            .page_size = page_size,
                            .device = Device::kCuda})),
        call(inputs),
        attention(call.attention),
        owned_mask(attention, 128),
        user_mask(attention, 128),
        out_memory(static_cast<size_t>(inputs.q.data.size()) * 2 + 256),
        lse_memory(static_cast<size_t>(inputs.q.tokens) * 4 * sizeof(float)),
        report_memory(kReportBytes),
        workspace_memory(needed() + 256),
        mask_words(Device::kCuda, full(owned_mask)),
        user_words(Device::kCuda, user_mask.memory()),
        out(Device::kCuda, out_memory),
        lse(Device::kCuda, lse_memory),
        report(Device::kCuda, report_memory),
        workspace(Device::kCuda, workspace_memory),
        mask(owned_mask.mask),
        to{out.data(), DType::kBFloat16, inputs.q.tokens, 4, 64, 256, 64},
        to_lse(lse.as<float>()),
        to_report(report.as<HeadReport>()) {
    mask.words = mask_words.as<uint32_t>().data();
    context.device = Device::kCuda;
    context.workspace = workspace.bytes().first(needed());
  }
  static Guarded& full(OwnedMask& owned) {
    owned.memory().refill();
    return owned.memory();
  }
  size_t needed() const {
    Context on_cuda;
    on_cuda.device = Device::kCuda;
    return workspace_bytes(attention, Dense{}, owned_mask.mask, on_cuda);
  }
  bool untouched() {
    for (Placed* placed : {&mask_words, &out, &lse, &report, &workspace}) placed->fetch();
    return owned_mask.memory().untouched() && out_memory.untouched() && lse_memory.untouched() &&
           report_memory.untouched() && workspace_memory.untouched() && call.untouched();
  }
  template <class T>
  T* on_host() {
    return reinterpret_cast<T*>(host.data());
  }
};

struct Refusal {
  const char* what;
  bool by_shape;  // why_unsupported says so
  std::function<void(Bench&)> spoil;
  std::vector<const char*> says;
};

void expect_says(const std::string& message, const Refusal& refusal) {
  for (const char* part : refusal.says)
    EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
  EXPECT_NE(message.find("must"), std::string::npos) << "no expectation in: " << message;
}

void check(const Refusal& refusal, int64_t page_size = 0) {
  SCOPED_TRACE(refusal.what);
  Bench bench(page_size);
  refusal.spoil(bench);
  const char* why = why_unsupported(bench.attention, bench.policy, bench.mask, bench.context);
  EXPECT_EQ(why != nullptr, refusal.by_shape);
  if (why != nullptr) expect_says(why, refusal);
  try {
    prefill(bench.attention, bench.policy, bench.mask, bench.to, bench.to_lse, bench.context,
            bench.to_report);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    expect_says(error.what(), refusal);
  }
  EXPECT_TRUE(bench.untouched()) << "something was written";
}

TEST(CudaRefusals, TheUnspoiltCallsAreAccepted) {
  for (const int64_t page_size : {0, 16}) {
    Bench bench(page_size);
    prefill(bench.attention, bench.policy, bench.mask, bench.to, bench.to_lse, bench.context,
            bench.to_report);
    synchronize(Device::kCuda);
    EXPECT_FALSE(bench.untouched());
  }
}

TEST(CudaRefusals, Shapes) {
  const Refusal refusals[] = {
      {"float32",
       true,
       [](Bench& b) {
         for (ConstTensor* t : {&b.attention.q, &b.attention.k, &b.attention.v})
           t->dtype = DType::kFloat32;
       },
       {"q.dtype", "float32", "float16 or bfloat16"}},
      {"head_dim above 256",
       true,
       [](Bench& b) {
         for (ConstTensor* t : {&b.attention.q, &b.attention.k, &b.attention.v}) t->head_dim = 264;
       },
       {"q.head_dim", "264", "256"}},
  };
  for (const Refusal& refusal : refusals) check(refusal);
}

TEST(CudaRefusals, HostMemory) {
  const Refusal refusals[] = {
      {"q", false, [](Bench& b) { b.attention.q.data = b.host.data(); }, {"q.data", "host memory"}},
      {"k", false, [](Bench& b) { b.attention.k.data = b.host.data(); }, {"k.data", "host memory"}},
      {"v", false, [](Bench& b) { b.attention.v.data = b.host.data(); }, {"v.data", "host memory"}},
      {"out", false, [](Bench& b) { b.to.data = b.host.data(); }, {"out.data", "host memory"}},
      {"lse",
       false,
       [](Bench& b) {
         b.to_lse = {b.on_host<float>(), b.to_lse.size()};
       },
       {"lse", "host memory"}},
      {"mask",
       false,
       [](Bench& b) { b.mask.words = b.on_host<uint32_t>(); },
       {"mask.words", "host memory"}},
      {"policy.mask",
       false,
       [](Bench& b) { b.policy = UserMask{b.user_mask.mask}; },
       {"policy.mask.words", "host memory"}},
      {"report",
       false,
       [](Bench& b) {
         b.to_report = {b.on_host<HeadReport>(), b.to_report.size()};
       },
       {"report", "host memory"}},
      {"workspace",
       false,
       [](Bench& b) {
         b.context.workspace = {b.host.data(), b.context.workspace.size()};
       },
       {"context.workspace", "host memory"}},
  };
  for (const Refusal& refusal : refusals) check(refusal);
  check({"block_table",
         false,
         [](Bench& b) { b.attention.pages.block_table = b.on_host<int32_t>(); },
         {"pages.block_table", "host memory"}},
        16);
}

TEST(CudaRefusals, AlignmentAndSize) {
  const Refusal refusals[] = {
      {"q misaligned",
       false,
       [](Bench& b) { b.attention.q.data = static_cast<const std::byte*>(b.attention.q.data) + 1; },
       {"q.data", "aligned to 2"}},
      {"mask misaligned",
       false,
       [](Bench& b) { b.mask.words += 1; },
       {"mask.words", "aligned to 8"}},
      {"workspace misaligned",
       false,
       [](Bench& b) { b.context.workspace = b.workspace.bytes().subspan(64, b.needed()); },
       {"context.workspace", "aligned to 256"}},
      {"workspace one byte short",
       false,
       [](Bench& b) { b.context.workspace = b.workspace.bytes().first(b.needed() - 1); },
       {"context.workspace", "workspace_bytes"}},
      {"out over the workspace",
       false,
       [](Bench& b) { b.to.data = b.workspace.data(); },
       {"out", "overlaps", "workspace"}},
      {"out null", false, [](Bench& b) { b.to.data = nullptr; }, {"out.data", "null"}},
  };
  for (const Refusal& refusal : refusals) check(refusal);
}

TEST(CudaRefusals, Merge) {
  Guarded a(4 * 2 * 8 * 4), lse(8 * 4), out(4 * 2 * 8 * 4), host(4 * 2 * 8 * 4);
  Placed at_a(Device::kCuda, a), at_lse(Device::kCuda, lse), at_out(Device::kCuda, out);
  const auto tensor = [](void* data) { return Tensor{data, DType::kFloat32, 4, 2, 8, 16, 8, 0}; };
  const auto input = [](void* data) {
    return ConstTensor{data, DType::kFloat32, 4, 2, 8, 16, 8, 0};
  };
  Context context;
  context.device = Device::kCuda;
  try {
    merge_states(input(at_a.data()), at_lse.as<float>(), input(host.data()), at_lse.as<float>(),
                 tensor(at_out.data()), {}, context);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("out_b.data"), std::string::npos) << error.what();
  }
  at_out.fetch();
  EXPECT_TRUE(out.untouched());
}

// What can be told without a GPU is told without one, and for any stream.
TEST(CudaRefusals, ShapesAskNoDevice) {
  Bench bench(0);
  Attention shapes = bench.attention;
  shapes.q.data = shapes.k.data = shapes.v.data = nullptr;
  BlockMask mask = bench.mask;
  mask.words = nullptr;
  EXPECT_EQ(why_unsupported(shapes, Dense{}, mask, bench.context), nullptr);
  EXPECT_EQ(workspace_bytes(shapes, Dense{}, mask, bench.context), bench.needed());
}

}  // namespace
}  // namespace crisp::test
