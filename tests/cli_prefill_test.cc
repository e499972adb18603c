// `crisp prefill` as a user meets it: the binary is run, its report and files are looked at.
#include "cli.h"
#include "files/npy.h"

namespace crisp {
namespace {

TEST_F(Cli, ReportHasTheDocumentedFields) {
  const std::string input = make_input("a.safetensors", 2048, DType::kFloat32);
  const Json all = run_json({"prefill", input, "--threads", "2"});
  EXPECT_EQ(all["input"], input);
  EXPECT_EQ(all["device"], "cpu");
  EXPECT_EQ(all["threads"], 2);
  EXPECT_TRUE(all["dense_ms"].is_null());
  const Json shape = {{"num_q_heads", 4}, {"num_kv_heads", 2}, {"q_len", 2048},
                      {"kv_len", 2048},   {"head_dim", 64},    {"dtype", "float32"}};
  EXPECT_EQ(all["shape"], shape);
  ASSERT_EQ(all["policies"].size(), 1u);
  const Json& policy = all["policies"][0];
  EXPECT_EQ(policy["name"], "crisp");
  EXPECT_EQ(policy["parameters"]["tau_proxy"], 0.2);
  EXPECT_TRUE(policy["coverage"].is_null());
  EXPECT_TRUE(policy["relative_error"].is_null());
  for (const char* stage : {"proxy", "route", "select", "mask", "attend"}) {
    EXPECT_GE(policy["ms"].at(stage).get<double>(), 0.) << stage;
  }
  ASSERT_EQ(policy["heads"].size(), 4u);
  int64_t blocks = 0;
  for (const Json& head : policy["heads"]) {
    EXPECT_TRUE(head["js_distance"].is_null());
    EXPECT_TRUE(head["coverage"].is_null());
    EXPECT_TRUE(head["relative_error"].is_null());
    blocks += head["num_blocks"].get<int64_t>();
  }
  // kv head 0 has the sink.
  EXPECT_EQ(policy["heads"][1]["pattern"], "vertical_slash");
  EXPECT_GT(policy["heads"][1]["structural_mass"], 0.3);
  EXPECT_GE(policy["heads"][1]["num_vertical"], 8);
  EXPECT_EQ(policy["heads"][2]["pattern"], "pooled");
  EXPECT_NEAR(policy["density"].get<double>(), static_cast<double>(blocks) / (4 * 136), 1e-12);
}

TEST_F(Cli, CompareMeasuresAgainstDense) {
  const std::string input = make_input("a.safetensors", 2048, DType::kFloat32);
  const Json all = run_json({"prefill", input, "--compare", "--alpha", "1.25"});
  ASSERT_EQ(all["policies"].size(), 3u);
  EXPECT_GT(all["dense_ms"].get<double>(), 0.);
  const Json &dense = all["policies"][0], &crisp = all["policies"][1];
  EXPECT_EQ(dense["name"], "dense");
  EXPECT_EQ(dense["density"], 1.);
  EXPECT_EQ(dense["coverage"], 1.);
  EXPECT_EQ(dense["relative_error"], 0.);
  EXPECT_EQ(crisp["name"], "crisp");
  EXPECT_EQ(all["policies"][2]["name"], "flexprefill");
  EXPECT_EQ(crisp["parameters"]["alpha"], 1.25);
  EXPECT_LT(crisp["density"], 1.);
  for (const Json& head : crisp["heads"]) {
    EXPECT_GT(head["coverage"], 0.2);
    EXPECT_LT(head["coverage"], 1.);
    EXPECT_GT(head["relative_error"], 0.);
    EXPECT_GT(head["js_distance"], 0.);
  }
  const Outcome text = run({"prefill", input, "--compare"});
  EXPECT_EQ(text.exit_code, 0);
  for (const char* word : {"policy", "density", "coverage", "speed-up", "flexprefill", "2 VS"}) {
    EXPECT_THAT(text.out, HasSubstr(word));
  }
}

TEST_F(Cli, ReferenceAgreesWithTheKernels) {
  const std::string input = make_input("a.safetensors", 1100, DType::kFloat32);
  const Words flags = {
      "prefill", input, "--compare", "--dense-below-tokens", "0", "--min-budget-tokens", "128"};
  const Json fast = run_json(flags);
  Words slow_flags = flags;
  slow_flags.push_back("--reference");
  const Json slow = run_json(slow_flags);
  EXPECT_EQ(slow["executor"], "reference");
  EXPECT_TRUE(slow["dense_ms"].is_null());
  for (size_t p = 0; p < 3; ++p) {
    for (size_t h = 0; h < 4; ++h) {
      const Json &a = fast["policies"][p]["heads"][h], &b = slow["policies"][p]["heads"][h];
      EXPECT_EQ(a["pattern"], b["pattern"]);
      EXPECT_EQ(a["num_blocks"], b["num_blocks"]);
      EXPECT_EQ(a["num_vertical"], b["num_vertical"]);
      EXPECT_NEAR(a["coverage"].get<double>(), b["coverage"].get<double>(), 1e-5);
      EXPECT_NEAR(a["relative_error"].get<double>(), b["relative_error"].get<double>(), 1e-4);
    }
  }
}

TEST_F(Cli, MaskWrittenIsTheMaskUsed) {
  const std::string input = make_input("a.safetensors", 1500, DType::kBFloat16);
  const std::string first = file("first"), second = file("second"), mask = file("mask");
  EXPECT_EQ(run({"prefill", input, "--out", first, "--mask-out", mask}).exit_code, 0);
  EXPECT_EQ(run({"prefill", input, "--policy", "mask", "--mask", mask, "--out", second,
                 "--mask-out", file("again")})
                .exit_code,
            0);
  EXPECT_EQ(content_of(first), content_of(second));
  EXPECT_EQ(content_of(mask), content_of(file("again")));
  const files::SafetensorsFile out(first);
  EXPECT_EQ(out.tensor("out").shape, (std::vector<int64_t>{4, 1500, 64}));
  EXPECT_EQ(out.tensor("out").type, files::ElementType::kBF16);
  EXPECT_EQ(out.tensor("lse").shape, (std::vector<int64_t>{4, 1500}));
  // A mask of another shape is refused.
  const std::string other = make_input("b.safetensors", 1700, DType::kBFloat16);
  expect_refused({"prefill", other, "--policy", "mask", "--mask", mask},
                 "tensor 'mask': shape is [4, 12, 2], expected [4, 14, 2]");
}

// The mask would fit, the output does not.
TEST_F(Cli, OutputsAreWrittenTogetherOrNotAtAll) {
  const std::string input = make_input("a.safetensors", 1500, DType::kBFloat16);
  std::ofstream(file("mask")) << "old";
  const Outcome full =
      run({"prefill", input, "--out", file("out"), "--mask-out", file("mask")}, 4096);
  EXPECT_EQ(full.exit_code, 2);
  EXPECT_THAT(full.err, HasSubstr("out: cannot be written: File too large"));
  EXPECT_EQ(content_of(file("mask")), "old");
  EXPECT_FALSE(fs::exists(file("out")));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 2);  // no temporary file either
  // A name that no rename could give is refused before anything is computed or written.
  expect_refused(
      {"prefill", input, "--out", file("out"), "--mask-out", file(std::string(300, 'm'))},
      "cannot be written: File name too long");
  EXPECT_FALSE(fs::exists(file("out")));
}

TEST_F(Cli, ThreadsDoNotChangeTheOutput) {
  const std::string input = make_input("a.safetensors", 1500, DType::kFloat16);
  EXPECT_EQ(run({"prefill", input, "--threads", "1", "--out", file("one")}).exit_code, 0);
  EXPECT_EQ(run({"prefill", input, "--threads", "3", "--out", file("three")}).exit_code, 0);
  EXPECT_EQ(content_of(file("one")), content_of(file("three")));
}

TEST_F(Cli, NpyTripleGivesTheSameOutput) {
  const std::string input = make_input("a.safetensors", 300, DType::kFloat32);
  const files::SafetensorsFile tensors(input);
  for (const char* name : {"q", "k", "v"}) {
    files::write_npy(file(std::string(name) + ".npy"), tensors.tensor(name));
  }
  EXPECT_EQ(run({"prefill", input, "--out", file("o1")}).exit_code, 0);
  EXPECT_EQ(
      run({"prefill", file("q.npy"), file("k.npy"), file("v.npy"), "--out", file("o2")}).exit_code,
      0);
  EXPECT_EQ(content_of(file("o1")), content_of(file("o2")));
}

TEST_F(Cli, ChunksOfAFixedMaskGiveTheOneShotOutput) {
  const std::string input = make_input("a.safetensors", 1024, DType::kFloat32);
  EXPECT_EQ(run({"prefill", input, "--policy", "dense", "--out", file("o1")}).exit_code, 0);
  EXPECT_EQ(
      run({"prefill", input, "--policy", "dense", "--chunk", "256", "--out", file("o2")}).exit_code,
      0);
  EXPECT_EQ(content_of(file("o1")), content_of(file("o2")));
  const Json all = run_json({"prefill", input, "--chunk", "300", "--dense-below-tokens", "0"});
  const Json& chunks = all["policies"][0]["chunks"];
  ASSERT_EQ(chunks.size(), 4u);
  EXPECT_EQ(chunks[3]["q_len"], 124);
  EXPECT_EQ(chunks[1]["kv_len"], 600);
  EXPECT_FALSE(chunks[1]["heads"][0]["structural_mass"].is_null());
  EXPECT_TRUE(all["policies"][0]["heads"][0]["structural_mass"].is_null());
}

TEST_F(Cli, SeveralInputsGiveAList) {
  const std::string a = make_input("a.safetensors", 256, DType::kFloat32);
  const std::string b = make_input("b.safetensors", 300, DType::kFloat16);
  const Json all = run_json({"prefill", a, b});
  ASSERT_TRUE(all.is_array());
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1]["shape"]["dtype"], "float16");
}

// Without --compare: inputs + output + mask + 64 MiB.
TEST_F(Cli, PeakMemoryIsBounded) {
  if (kIsSanitized) GTEST_SKIP() << "shadow memory of the sanitizers counts as the program's";
  const std::string input = make_input("a.safetensors", 40000, DType::kFloat32);
  const Outcome outcome = run({"prefill", input, "--out", file("o"), "--mask-out", file("m"),
                               "--alpha", "4", "--min-budget-tokens", "0", "--tau-proxy", "0"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto bytes =
      fs::file_size(input) + fs::file_size(file("o")) + fs::file_size(file("m")) + (64u << 20);
  EXPECT_LE(static_cast<uintmax_t>(outcome.peak_kib) * 1024, bytes);
}

}  // namespace
}  // namespace crisp
