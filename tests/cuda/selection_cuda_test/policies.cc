// policies.cc - the suite of whole selections on CUDA.
#include "policy_suite.h"

namespace crisp::test {

CRISP_ON_CUDA(Policies);

}  // namespace crisp::test
