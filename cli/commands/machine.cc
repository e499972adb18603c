#include "commands/machine.h"

#include <sys/utsname.h>

#include <fstream>

namespace crisp::cli {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  utsname name{};
  return uname(&name) == 0 ? name.machine : "unknown";
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string word, line = "crisp";
  std::getline(file, word, '\0');  // the path of the program
  while (std::getline(file, word, '\0')) line += " " + word;
  return line;
}

}  // namespace crisp::cli
