// main.cc - says why and ends with 77 where there is no GPU to test on.
#include <gtest/gtest.h>

#include <cstdio>

#include "device.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const char* why = crisp::test::why_no_cuda();
  if (why != nullptr && !::testing::GTEST_FLAG(list_tests)) {
    std::printf("SKIPPED: %s\n", why);
    return 77;
  }
  return RUN_ALL_TESTS();
}
