// The command line as a user meets it: the built binary is run, its exit code, output and files are
// looked at.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/half.h"
#include "files/npy.h"
#include "files/qkv.h"
#include "files/safetensors.h"

namespace crisp {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
constexpr bool kIsSanitized = __has_feature(address_sanitizer);
#else
constexpr bool kIsSanitized = false;
#endif

struct Outcome {
  int exit_code = -1;
  std::string out, err;
  long peak_kib = 0;
};

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Cli : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "crisp-cli-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string file(const std::string& name) const { return (folder_ / name).string(); }

  Outcome run(const Words& arguments) const {
    const std::string out = file("stdout"), err = file("stderr");
    const pid_t child = fork();
    if (child == 0) {
      const auto redirect = [](const std::string& path, int fd) {
        dup2(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), fd);
      };
      redirect(out, STDOUT_FILENO);
      redirect(err, STDERR_FILENO);
      std::vector<char*> argv = {const_cast<char*>(CRISP_BINARY)};
      for (const std::string& word : arguments) argv.push_back(const_cast<char*>(word.c_str()));
      argv.push_back(nullptr);
      execv(CRISP_BINARY, argv.data());
      _exit(127);
    }
    int status = 0;
    rusage usage{};
    wait4(child, &status, 0, &usage);
    Outcome outcome;
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.out = content_of(out);
    outcome.err = content_of(err);
    outcome.peak_kib = usage.ru_maxrss;
    fs::remove(out);
    fs::remove(err);
    return outcome;
  }

  Json run_json(Words arguments) const {
    arguments.push_back("--json");
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return Json::parse(outcome.out, nullptr, false);
  }

  // Bad use or bad input: code 2, a message on stderr, nothing on stdout.
  void expect_refused(const Words& arguments, const std::string& message) const {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << ::testing::PrintToString(arguments);
    EXPECT_THAT(outcome.err, HasSubstr(message)) << ::testing::PrintToString(arguments);
    EXPECT_EQ(outcome.out, "");
  }

  // q, k, v of 4 query and 2 kv heads; kv head 0 has a sink, so that its heads are Vertical-Slash.
  std::string make_input(const std::string& name, int64_t num_tokens, DType dtype,
                         float poison = 0) const {
    constexpr int64_t kDim = 64;
    uint64_t state = 7;
    const auto draw = [&] {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      return static_cast<float>(static_cast<int64_t>(state >> 33) % 2001 - 1000) / 500.f;
    };
    const auto fill = [&](int64_t heads, int64_t sink_heads, int64_t sink_tokens) {
      std::vector<std::byte> data(
          static_cast<size_t>(heads * num_tokens * kDim * element_bytes(dtype)));
      for (int64_t i = 0; i < heads * num_tokens * kDim; ++i) {
        const bool sink = i / (num_tokens * kDim) < sink_heads &&
                          i / kDim % num_tokens < sink_tokens && i % kDim < 4;
        store_float(data.data(), dtype, i, draw() + (sink ? 4.f : 0.f));
      }
      return data;
    };
    const auto q = fill(4, 2, num_tokens), k = fill(2, 1, 4);
    auto v = fill(2, 0, 0);
    if (poison != 0) store_float(v.data(), dtype, kDim * num_tokens + 3 * kDim + 5, poison);
    constexpr files::ElementType kTypes[] = {files::ElementType::kF32, files::ElementType::kF16,
                                             files::ElementType::kBF16};
    const auto type = kTypes[static_cast<size_t>(dtype)];
    const files::NamedTensor tensors[] = {{"q", {type, {4, num_tokens, kDim}, q}},
                                          {"k", {type, {2, num_tokens, kDim}, k}},
                                          {"v", {type, {2, num_tokens, kDim}, v}}};
    files::write_safetensors(file(name), tensors);
    return file(name);
  }

  fs::path folder_;
};

std::vector<uint32_t> words_of(const std::string& path) {
  const files::SafetensorsFile file(path);
  const auto& data = file.tensor("mask").data;
  std::vector<uint32_t> words(data.size() / 4);
  std::memcpy(words.data(), data.data(), data.size());
  return words;
}

TEST_F(Cli, HelpTeaches) {
  const Outcome all = run({"--help"});
  EXPECT_EQ(all.exit_code, 0);
  for (const char* command : {"prefill", "inspect", "bench", "check", "doctor", "explain"}) {
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

TEST_F(Cli, BadUseIsRefused) {
  const std::string input = make_input("a.safetensors", 256, DType::kFloat32);
  const std::pair<Words, const char*> cases[] = {
      {{}, "subcommand is required"},
      {{"prefil"}, ""},
      {{"prefill"}, "FILE is required"},
      {{"prefill", input, "--polcy", "dense"}, "--polcy"},
      {{"prefill", input, "--policy", "sparse"}, "expected crisp|flexprefill|dense|mask"},
      {{"prefill", input, "--policy", "mask"}, "--policy mask needs --mask FILE"},
      {{"prefill", input, "--device", "cuda"}, "no CUDA backend"},
      {{"prefill", input, "--device", "tpu"}, "--device 'tpu' is unknown"},
      {{"prefill", input, "--threads", "-1"}, "--threads is -1, expected 0 to 1024"},
      {{"prefill", input, "--threads", "1025"}, "--threads is 1025"},
      {{"prefill", input, "--alpha", "0"}, "policy.alpha is 0, must be finite and > 0"},
      {{"prefill", input, "--alpha", "nan"}, "policy.alpha is nan"},
      {{"prefill", input, "--alpha", "x"}, "alpha"},
      {{"prefill", input, "--gamma", "1.5"}, "policy.gamma is 1.5, must be in (0, 1]"},
      {{"prefill", input, "--sink-tokens", "0"}, "policy.sink_tokens is 0"},
      {{"prefill", input, "--min-budget-tokens", "99999999999"}, "min-budget-tokens"},
      {{"prefill", input, "--scale", "0"}, "softmax_scale"},
      {{"prefill", input, "--chunk", "-5"}, "--chunk is -5"},
      {{"prefill", input, "--repeat", "0"}, "--repeat is 0, expected at least 1"},
      {{"prefill", input, "--policy", "dense", "--alpha", "2"}, "--alpha has no effect here"},
      {{"prefill", input, "--variant", "paper"}, "--variant has no effect here"},
      {{"prefill", input, "--tau-js", "0.2"}, "--tau-js has no effect here"},
      {{"prefill", input, "--mask", input}, "--mask has no effect here"},
      {{"prefill", input, input, "--out", file("o")}, "take one input, got 2"},
      {{"prefill", input, "--out", input}, "would replace the input"},
      {{"prefill", input, "--out", file("o"), "--mask-out", file("o")}, "name the same file"},
      {{"prefill", input, "--out", file("no/such/o")}, "No such file or directory"},
      {{"inspect", input, "--head", "4"}, "--head is 4, expected 0 to 3"},
      {{"inspect", input, input}, "inspect takes one input, got 2"},
      {{"explain"}, "--n is required"},
      {{"explain", "--n", "1024", "--head-dim", "7"}, "q.head_dim is 7"},
      {{"explain", "--n", "1024", "--dtype", "int8"}, "--dtype is 'int8'"},
      {{"explain", "--n", "4", "--q-len", "5"}, "q_len"},
  };
  for (const auto& [arguments, message] : cases) expect_refused(arguments, message);
}

TEST_F(Cli, BadInputIsRefusedAndNothingIsWritten) {
  const std::string out = file("o.safetensors"), mask = file("m.safetensors");
  std::ofstream(out) << "kept";
  const std::string nan = make_input("nan.safetensors", 256, DType::kBFloat16, std::nanf(""));
  const std::string good = make_input("good.safetensors", 256, DType::kBFloat16);
  std::ofstream(file("junk.safetensors")) << "not a tensor file at all";
  const std::pair<Words, std::string> cases[] = {
      {{nan}, "tensor 'v' holds NaN at head 1, token 3, dim 5"},
      {{file("none.safetensors")}, "cannot be opened: No such file"},
      {{file("junk.safetensors")}, "expected at most 100000000"},
      {{folder_.string()}, "is not a regular file"},
      {{file("a.npy"), file("b.npy")}, "npy files come in threes"},
      {{good, "--policy", "mask", "--mask", good}, "has no tensor 'mask'"},
  };
  for (const auto& [arguments, message] : cases) {
    Words all = {"prefill", "--out", out, "--mask-out", mask};
    all.insert(all.end(), arguments.begin(), arguments.end());
    expect_refused(all, message);
    EXPECT_EQ(content_of(out), "kept");
    EXPECT_FALSE(fs::exists(mask));
  }
  // A bad file among several is found before the first is run.
  expect_refused({"prefill", good, nan}, "holds NaN");
}

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
  const Json &dense = all["policies"][0], &crisp = all["policies"][2];
  EXPECT_EQ(dense["name"], "dense");
  EXPECT_EQ(dense["density"], 1.);
  EXPECT_EQ(dense["coverage"], 1.);
  EXPECT_EQ(dense["relative_error"], 0.);
  EXPECT_EQ(all["policies"][1]["name"], "flexprefill");
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
  const Json report = run_json({"prefill", input, "--compare"})["policies"][2];
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
  EXPECT_EQ(doctor["devices"][1]["available"], false);
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

// A report that cannot be written is a failed run.
TEST_F(Cli, FullStdoutIsAFailure) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "needs /dev/full";
  const std::string command =
      std::string("'") + CRISP_BINARY + "' doctor > /dev/full 2> '" + file("err") + "'";
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_THAT(content_of(file("err")), HasSubstr("standard output"));
}

}  // namespace
}  // namespace crisp
