// merge_test.cc - merge_states() on the CPU.
#include "merge_suite.h"

namespace crisp::test {
namespace {

CRISP_ON_CPU(Merge);

}  // namespace
}  // namespace crisp::test
