#include "core/check.h"

#include <cstdio>
#include <cstdlib>

namespace crisp {

// Reached only in builds with CRISP_ENABLE_ASSERT (Debug and tests), where a loud stop is wanted.
void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: assertion failed: %s\n", file, line, condition);
  std::abort();
}

}  // namespace crisp
