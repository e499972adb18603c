// Help, inspect, check, doctor and explain as a user meets them.
#include "cli.h"

#include "device.h"

namespace crisp {
namespace {

std::vector<uint32_t> words_of(const std::string& path) {
  const files::SafetensorsFile file(path);
  const auto& data = file.tensor("mask").data;
  std::vector<uint32_t> words(data.size() / 4);
  std::memcpy(words.data(), data.data(), data.size());
  return words;
}

// The drawing of `inspect` is, block by block, the mask that `prefill` returns.
TEST_F(Cli, InspectDrawsTheReturnedMask) {
  const std::string input = make_input("a.safetensors", 1024, DType::kFloat32);
  const Words flags = {"--dense-below-tokens", "0", "--min-budget-tokens", "128", "--alpha", "1.2"};
  Words prefill = {"prefill", input, "--mask-out", file("mask")};
  prefill.insert(prefill.end(), flags.begin(), flags.end());
  ASSERT_EQ(run(prefill).exit_code, 0);
  const std::vector<uint32_t> words = words_of(file("mask"));
  for (const size_t head : {size_t{0}, size_t{2}}) {
    Words inspect = {"inspect", input, "--head", std::to_string(head)};
    inspect.insert(inspect.end(), flags.begin(), flags.end());
    const Outcome outcome = run(inspect);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    std::string expected;
    size_t kept = 0;
    for (size_t row = 0; row < 8; row += 2) {
      expected += "|";
      for (size_t col = 0; col < 8; ++col) {
        const auto bit = [&](size_t r) { return words[(head * 8 + r) * 2] >> col & 1u; };
        const char* const marks[] = {" ", "▀", "▄", "█"};
        expected += marks[bit(row) + 2 * bit(row + 1)];
        kept += bit(row) + bit(row + 1);
      }
      expected += "|\n";
    }
    EXPECT_THAT(outcome.out, ::testing::EndsWith(expected));
    EXPECT_THAT(outcome.out, HasSubstr(std::to_string(kept) + " of 36 causal blocks"));
  }
}

TEST_F(Cli, InspectSaysWhatTheReportSays) {
  const std::string input = make_input("a.safetensors", 2048, DType::kFloat32);
  const Json report = run_json({"prefill", input, "--compare"})["policies"][1];
  for (size_t head = 0; head < 4; ++head) {
    const Json one = run_json({"inspect", input, "--head", std::to_string(head)});
    const Json& expected = report["heads"][head];
    EXPECT_EQ(one["pattern"], expected["pattern"]);
    EXPECT_EQ(one["num_blocks"], expected["num_blocks"]);
    EXPECT_NEAR(one["structural_mass"].get<double>(), expected["structural_mass"].get<double>(),
                1e-5);
    EXPECT_NEAR(one["js_distance"].get<double>(), expected["js_distance"].get<double>(), 1e-4);
    EXPECT_EQ(one["vertical"]["kept"].size(), expected["num_vertical"]);
    EXPECT_EQ(one["slash"]["kept"].size(), expected["num_slash"]);
    double sum = 0;
    for (const Json& mass : one["vertical"]["mass"]) sum += mass.get<double>();
    EXPECT_NEAR(sum, 1, 1e-9);
  }
}

TEST_F(Cli, DoctorAndExplainAgreeWithTheLibrary) {
  const Json doctor = run_json({"doctor"});
  EXPECT_EQ(doctor["version"], version());
  EXPECT_EQ(doctor["devices"][0]["instruction_set"], cpu_target());
  EXPECT_EQ(doctor["devices"][1]["available"], test::why_no_cuda() == nullptr);
  const Json explain = run_json({"explain", "--q-heads", "8", "--kv-heads", "2", "--head-dim", "64",
                                 "--n", "4096", "--q-len", "1024", "--threads", "2"});
  Attention attention;
  attention.q = {nullptr, DType::kBFloat16, 1024, 8, 64, 512, 64, 0};
  attention.k = attention.v = {nullptr, DType::kBFloat16, 4096, 2, 64, 128, 64, 0};
  attention.softmax_scale = 0.125f;
  const BlockMask mask = mask_for(attention);
  Context context;
  context.num_threads = 2;
  EXPECT_EQ(explain["bytes"]["mask"], mask.bytes());
  EXPECT_EQ(explain["bytes"]["workspace"], workspace_bytes(attention, Crisp{}, mask, context));
  EXPECT_EQ(explain["causal_blocks_per_head"], num_causal_blocks(attention));
  // 4 x 64 x 8 x (1024 x 3072 + 1024 x 1025 / 2)
  EXPECT_EQ(explain["flop"]["dense_attend"], 7517241344.0);
  EXPECT_EQ(explain["largest_n"], (int64_t{1} << 31) - 1);
}

TEST_F(Cli, CheckPasses) {
  const Outcome outcome = run({"check"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("cases agree with the reference"));
  EXPECT_THAT(outcome.out, ::testing::Not(HasSubstr("FAIL")));
}

TEST_F(Cli, HelpTeaches) {
  const Outcome all = run({"--help"});
  EXPECT_EQ(all.exit_code, 0);
  for (const char* command :
       {"prefill", "inspect", "synth", "bench", "check", "doctor", "explain"}) {
    EXPECT_THAT(all.out, HasSubstr(std::string("  ") + command));
    const Outcome one = run({command, "--help"});
    EXPECT_EQ(one.exit_code, 0) << command;
    EXPECT_EQ(one.err, "") << command;
    EXPECT_THAT(one.out, HasSubstr("Usage: crisp ")) << command;
  }
  const Outcome prefill = run({"prefill", "--help"});
  EXPECT_THAT(prefill.out, HasSubstr("Examples:"));
  EXPECT_THAT(prefill.out, HasSubstr("--alpha FLOAT=1"));
}

TEST_F(Cli, Version) {
  const Outcome outcome = run({"--version"});
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.out, std::string("crisp ") + version() + "\n");
}

}  // namespace
}  // namespace crisp
