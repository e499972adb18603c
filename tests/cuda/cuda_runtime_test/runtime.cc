// runtime.cc - how a call behaves on a stream: captured, beside another, failing, on another
// device.
#include "runtime.h"

#include <vector>

#include "backend.h"
#include "compare.h"
#include "run.h"

namespace crisp::test {
namespace {

class Runtime : public OnBackend {
 protected:
  // Several segments, two dtypes' worth of shapes, a random mask.
  Case case_of(uint64_t seed) const {
    return on({.num_q_heads = 8,
               .num_kv_heads = 2,
               .head_dim = 128,
               .segments = {{700, 900}, {0, 0}, {128, 128}, {65, 300}},
               .dtype = DType::kBFloat16,
               .density = 0.6f,
               .seed = seed});
  }
};

// Recorded once, replayed on other numbers: the graph holds addresses, and nothing of the host.
TEST_P(Runtime, GraphReplaysOnNewNumbers) {
  const Inputs first = make_inputs(case_of(1));
  Call call(first);
  const OwnedMask mask = mask_of(first, call.attention);
  PreparedAttend prepared(first, call, mask);
  Stream stream;
  Graph graph(stream, [&] { prepared.enqueue(stream); });
  prepared.scribble_segments();
  for (const uint64_t seed : {1, 2, 3}) {
    const Inputs next = make_inputs(case_of(seed));
    const Call next_call(next);
    call.take_values(next_call);
    prepared.refill();
    synchronize(Device::kCuda);
    graph.launch(stream);
    stream.synchronize();
    EXPECT_TRUE(same_bits(prepared.read(), run_attend(next, next_call, mask))) << seed;
  }
}

// The tiles that are computed again are found on the device, in every replay.
TEST_P(Runtime, GraphRedoesTilesOfItsOwnNumbers) {
  const Inputs tame = make_inputs(case_of(1));
  Inputs wild = tame;
  for (int64_t head = 0; head < 8; ++head) wild.q.row(300, head)[0] = 16;
  wild.k.row(3, 0)[0] = wild.k.row(3, 1)[0] = 100;
  Call call(tame);
  const OwnedMask mask = mask_of(tame, call.attention);
  PreparedAttend prepared(tame, call, mask);
  Stream stream;
  Graph graph(stream, [&] { prepared.enqueue(stream); });
  for (const Inputs* inputs : std::initializer_list<const Inputs*>{&tame, &wild, &tame}) {
    const Call values(*inputs);
    call.take_values(values);
    prepared.refill();
    synchronize(Device::kCuda);
    graph.launch(stream);
    stream.synchronize();
    EXPECT_TRUE(matches(prepared.read(), truth_of(*inputs, mask)));
  }
}

TEST_P(Runtime, TwoStreamsDoNotDisturbOneAnother) {
  constexpr int kRounds = 8;
  const Inputs inputs[] = {make_inputs(case_of(4)), make_inputs(case_of(5))};
  const Call a(inputs[0]), b(inputs[1]);
  const OwnedMask masks[] = {mask_of(inputs[0], a.attention), mask_of(inputs[1], b.attention)};
  const Outcome expected[] = {run_attend(inputs[0], a, masks[0]),
                              run_attend(inputs[1], b, masks[1])};
  PreparedAttend prepared_a(inputs[0], a, masks[0]), prepared_b(inputs[1], b, masks[1]);
  Stream stream_a, stream_b;
  synchronize(Device::kCuda);
  for (int round = 0; round < kRounds; ++round) {
    prepared_a.enqueue(stream_a);
    prepared_b.enqueue(stream_b);
  }
  stream_a.synchronize();
  stream_b.synchronize();
  EXPECT_TRUE(same_bits(prepared_a.read(), expected[0]));
  EXPECT_TRUE(same_bits(prepared_b.read(), expected[1]));
}

// A call that the device does not take is a DeviceError that says what failed. The stream here is
// one whose capture has been spoilt; nothing is left broken.
TEST_P(Runtime, AFailingLaunchIsReported) {
  const Inputs inputs = make_inputs(case_of(6));
  const Call call(inputs);
  const OwnedMask mask = mask_of(inputs, call.attention);
  PreparedAttend prepared(inputs, call, mask);
  Stream stream;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_NE(cudaStreamSynchronize(stream), cudaSuccess);  // not allowed: spoils the capture
  try {
    prepared.enqueue(stream);
    ADD_FAILURE() << "not reported";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("cudaError"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(".cu:"), std::string::npos) << error.what();
  }
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  (void)cudaGetLastError();
  EXPECT_TRUE(same_bits(run_attend(inputs, call, mask), run_attend(inputs, call, mask)));
}

// An error that the caller has left unread is his.
TEST_P(Runtime, AnErrorLeftUnreadIsNotTakenForOurs) {
  const Inputs inputs = make_inputs(case_of(7));
  const Call call(inputs);
  const OwnedMask mask = mask_of(inputs, call.attention);
  PreparedAttend prepared(inputs, call, mask);
  EXPECT_NE(cudaSetDevice(12345), cudaSuccess);
  EXPECT_NO_THROW(prepared.enqueue());
  synchronize(Device::kCuda);
  EXPECT_TRUE(matches(prepared.read(), truth_of(inputs, mask)));
}

// The stages are reported once they are enqueued, in order.
TEST_P(Runtime, StagesAreReported) {
  const Inputs inputs = make_inputs(case_of(8));
  const Call call(inputs);
  DeviceMemory words(mask_for(call.attention).bytes()), out(inputs.q.tokens * 8 * 128 * 2);
  BlockMask mask = mask_for(call.attention);
  mask.words = reinterpret_cast<uint32_t*>(words.data());
  Context context;
  context.device = Device::kCuda;
  DeviceMemory workspace(
      static_cast<int64_t>(workspace_bytes(call.attention, Dense{}, mask, context)));
  context.workspace = {workspace.data(), workspace.size()};
  std::vector<Stage> stages;
  context.on_stage = [](Stage stage, void* user) {
    static_cast<std::vector<Stage>*>(user)->push_back(stage);
  };
  context.on_stage_user = &stages;
  prefill(call.attention, Dense{}, mask,
          {out.data(), DType::kBFloat16, inputs.q.tokens, 8, 128, 8 * 128, 128, 0}, {}, context);
  synchronize(Device::kCuda);
  ASSERT_EQ(stages.size(), inputs.segments.size() + 1);
  EXPECT_EQ(stages.front(), Stage::kMask);
  EXPECT_EQ(stages.back(), Stage::kAttend);
}

// P2: memory of a device that is not the current one.
TEST_P(Runtime, MemoryOfAnotherDevice) {
  int count = 0;
  CHECK_CUDA(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one device only";
  const Inputs inputs = make_inputs(case_of(9));
  const Call here(inputs);
  const OwnedMask mask = mask_of(inputs, here.attention);
  const Outcome expected = run_attend(inputs, here, mask);
  CHECK_CUDA(cudaSetDevice(1));
  {
    const Call there(inputs);
    PreparedAttend prepared(inputs, there, mask);
    CHECK_CUDA(cudaSetDevice(0));
    prepared.enqueue();
    int current = -1;
    CHECK_CUDA(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
    CHECK_CUDA(cudaSetDevice(1));
    synchronize(Device::kCuda);
    EXPECT_TRUE(same_bits(prepared.read(), expected));
    EXPECT_THROW(run_attend(inputs, here, mask), Error);  // two devices in one call
  }
  CHECK_CUDA(cudaSetDevice(0));
}

CRISP_ON_CUDA(Runtime);

}  // namespace
}  // namespace crisp::test
