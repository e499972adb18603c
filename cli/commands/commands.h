// commands.h - the subcommands of `crisp`. Each file of this folder adds one to the app; its
// callback runs inside parse(), sets exit_code (0 ok, 1 the run failed) and throws on bad use or
// bad input. main.cc is the only catch: UsageError, FileError and crisp::Error end with exit code
// 2, everything else with 1.
#pragma once

#include <CLI/CLI.hpp>
#include <stdexcept>

namespace crisp::cli {

// Bad use: the message names the option, its value and what was expected.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void add_prefill_command(CLI::App& app, int& exit_code);
void add_inspect_command(CLI::App& app, int& exit_code);
void add_synth_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);
void add_check_command(CLI::App& app, int& exit_code);
void add_doctor_command(CLI::App& app, int& exit_code);
void add_explain_command(CLI::App& app, int& exit_code);

// `exit_code` outlives the app's parse().
using AddCommand = void (*)(CLI::App& app, int& exit_code);

}  // namespace crisp::cli
