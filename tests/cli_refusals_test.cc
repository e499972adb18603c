// Bad use, bad input, and what they must leave alone.
#include "cli.h"
#include "core/device.h"

namespace crisp {
namespace {

TEST_F(Cli, BadUseIsRefused) {
  const std::string input = make_input("a.safetensors", 256, DType::kFloat32);
  const std::pair<Words, const char*> cases[] = {
      {{}, "subcommand is required"},
      {{"prefil"}, ""},
      {{"prefill"}, "FILE is required"},
      {{"prefill", input, "--polcy", "dense"}, "--polcy"},
      {{"prefill", input, "--policy", "sparse"}, "expected crisp|flexprefill|dense|mask"},
      {{"prefill", input, "--policy", "mask"}, "--policy mask needs --mask FILE"},
      {{"prefill", input, "--device", "cuda"}, kWithCuda ? "--device cuda: " : "no CUDA backend"},
      {{"inspect", input, "--device", "cuda"}, "--device cuda: "},
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
