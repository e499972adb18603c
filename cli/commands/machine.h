// machine.h - what reports say about the machine.
#pragma once

#include <string>

namespace crisp::cli {

std::string cpu_model();     // "AMD EPYC 7763 64-Core Processor", or the architecture if unknown
std::string command_line();  // this process's, with `crisp` for the path of the program

}  // namespace crisp::cli
