// cli.h - runs the built command line in a folder of the test's own.
#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/half.h"
#include "files/qkv.h"
#include "files/safetensors.h"
#include "sanitized.h"

namespace crisp {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

struct Outcome {
  int exit_code = -1;
  std::string out, err;
  long peak_kib = 0;
};

inline std::string content_of(const std::string& path) {
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

  // `max_file_bytes`: a write that would make a file larger fails, as on a full disk.
  Outcome run(const Words& arguments, rlim_t max_file_bytes = RLIM_INFINITY) const {
    const std::string out = file("stdout"), err = file("stderr");
    const pid_t child = fork();
    if (child == 0) {
      const auto redirect = [](const std::string& path, int fd) {
        dup2(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), fd);
      };
      redirect(out, STDOUT_FILENO);
      redirect(err, STDERR_FILENO);
      const rlimit limit{max_file_bytes, max_file_bytes};
      if (max_file_bytes != RLIM_INFINITY) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
      }
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

}  // namespace crisp
