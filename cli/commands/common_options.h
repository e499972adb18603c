// common_options.h - options that several commands share.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "crisp/crisp.h"

namespace crisp::cli {

// --device and --threads.
struct DeviceOptions {
  std::string device = "cpu";
  int num_threads = 0;

  void add_to(CLI::App& command);
  // Throws UsageError for a device this build does not have.
  void check() const;
  // The same for one this machine does not have; `check` has passed.
  void require_device() const;
  // The same for a command that runs on the CPU alone.
  void require_cpu(const char* command) const;
  bool is_cuda() const { return device == "cuda"; }
  int resolved_threads() const;  // 0 as the number of cores
  Context context() const;       // without a workspace
};

// Prints to stdout, a document on `indent` columns (-1: one line). Bytes of a file name that are
// not UTF-8 are replaced.
void print_json(const nlohmann::ordered_json& document, int indent = 2);

}  // namespace crisp::cli
