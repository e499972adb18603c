// main.cc - the command line `crisp`: parses, dispatches, and turns every error into a message on
// stderr and an exit code.
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>

#include "commands/commands.h"
#include "crisp/crisp.h"
#include "files/error.h"

namespace {

using crisp::cli::AddCommand;

// The order of the list in --help; one entry per file of commands/.
constexpr std::initializer_list<AddCommand> kCommands = {
    crisp::cli::add_prefill_command, crisp::cli::add_inspect_command,
    crisp::cli::add_synth_command,   crisp::cli::add_bench_command,
    crisp::cli::add_check_command,   crisp::cli::add_doctor_command,
    crisp::cli::add_explain_command,
};

constexpr const char* kFooter =
    "Exit codes: 0 ok, 1 the run failed, 2 bad use or bad input (message on stderr).\n"
    "`crisp COMMAND --help` explains every option of a command.";

int run(int argc, char** argv) {
  int exit_code = 0;
  CLI::App app{"CRISP: training-free block-sparse attention for long prompts", "crisp"};
  app.set_version_flag("--version", std::string("crisp ") + crisp::version(),
                       "Print the version and exit");
  app.require_subcommand(1);
  app.footer(kFooter);
  for (const auto add : kCommands) add(app, exit_code);
  try {
    app.parse(argc, argv);
    return exit_code;
  } catch (const CLI::ParseError& error) {
    // CLI11 prints help and version on stdout, mistakes on stderr.
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const crisp::cli::UsageError& error) {
    spdlog::error("{}", error.what());
    return 2;
  } catch (const crisp::files::FileError& error) {
    spdlog::error("{}", error.what());
    return 2;
  } catch (const crisp::Error& error) {
    spdlog::error("{}", error.what());
    return 2;
  } catch (const std::exception& error) {
    spdlog::error("{}", error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    spdlog::set_default_logger(spdlog::stderr_color_st("crisp"));
    spdlog::set_pattern("%n: %^%l%$: %v");
    const int exit_code = run(argc, argv);
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
    spdlog::error("standard output cannot be written: {}", std::strerror(errno));
    return exit_code == 0 ? 1 : exit_code;
  } catch (...) {  // not even the logger can be set up
    return 1;
  }
}
