// attend_test.cc - attend() on the CPU against the oracle, and the case that reruns a failure.
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>

#include "attend_suite.h"

namespace crisp::test {
namespace {

// Reruns what a failure printed; without CRISP_CASE, a case that uses every word.
TEST(Rerun, CaseFromEnvironment) {
  const char* text = std::getenv("CRISP_CASE");
  const Case c =
      parse_case(text ? text
                      : "hq=6 hkv=2 d=40 segments=100:130,1:300 padding=3 dtype=bfloat16 "
                        "layout=odd-strides page=16 causal=1 block=128 density=0.5 "
                        "threads=2 device=cpu seed=5");
  std::ostringstream first, second;
  first << c;
  second << parse_case(first.str());
  EXPECT_EQ(first.str(), second.str()) << "a case must print as what reruns it";
  expect_exact(c);
}

TEST(Rerun, RefusesUnknownWords) {
  for (const char* text :
       {"heads=3", "layout=round", "dtype=int8", "policy=best", "device=tpu", "hq"}) {
    EXPECT_THROW(parse_case(text), std::invalid_argument) << text;
  }
}

CRISP_ON_CPU(Attend);

}  // namespace
}  // namespace crisp::test
