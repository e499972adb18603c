// check.h - the only error macros.
//   CRISP_CHECK(cond, "q.head_dim is ", d, ", must be ...")  refuses a call at the door.
//   CRISP_ASSERT(cond)  guards an internal invariant; on in Debug and in all tests.
#pragma once

#include <sstream>

#include "crisp/crisp.h"

namespace crisp {

template <class... Parts>
[[noreturn]] void throw_error(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line);

}  // namespace crisp

#define CRISP_CHECK(condition, ...)                      \
  do {                                                   \
    if (!(condition)) ::crisp::throw_error(__VA_ARGS__); \
  } while (false)

#ifdef CRISP_ENABLE_ASSERT
#define CRISP_ASSERT(condition)                                                  \
  do {                                                                           \
    if (!(condition)) ::crisp::assertion_failed(#condition, __FILE__, __LINE__); \
  } while (false)
#else
#define CRISP_ASSERT(condition) \
  do {                          \
  } while (false)
#endif
