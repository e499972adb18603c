// suites.cc - the suites of the CPU on both kernel families.
#include <cstdlib>

#include "attend_suite.h"
#include "faults_suite.h"
#include "merge_suite.h"

namespace crisp::test {

CRISP_ON_CUDA(Attend);
CRISP_ON_CUDA(Faults);
CRISP_ON_CUDA(Merge);

namespace {

// What a failure printed.
TEST(Rerun, CaseFromEnvironment) {
  const char* text = std::getenv("CRISP_CASE");
  if (text == nullptr) GTEST_SKIP() << "CRISP_CASE holds no case";
  expect_exact(parse_case(text));
}

class RandomCases : public OnBackend {
 protected:
  // Any accepted case, small; half of them of the sizes that Hopper's own kernels take.
  Case draw(Random& random) const {
    const auto one_of = [&](std::initializer_list<int64_t> values) {
      return values.begin()[random.below(static_cast<int64_t>(values.size()))];
    };
    Case c;
    c.num_kv_heads = 1 + random.below(3);
    c.num_q_heads = c.num_kv_heads * one_of({1, 2, 3, 4, 5, 7, 8});
    c.head_dim = one_of({64, 128, 64, 128, 8, 24, 40, 72, 96, 120, 192, 256});
    c.causal = random.below(3) > 0;
    c.segments.clear();
    for (int64_t left = 1 + random.below(4); left > 0; --left) {
      const int64_t q_len = random.below(200);
      const int64_t ahead = one_of({0, 0, 1, 64, 130, 300});
      c.segments.push_back({q_len, random.below(10) == 0 ? 0 : q_len + ahead});
    }
    c.padding = one_of({0, 0, 1, 16, 50});
    c.dtype = dtypes()[static_cast<size_t>(random.below(2))];
    c.layout = static_cast<Layout>(random.below(4));
    c.page_size = one_of({0, 0, 1, 5, 16, 64, 100, 128});
    c.block_size = one_of({128, 128, 64});
    c.density = static_cast<float>(one_of({10, 8, 4, 1, 0})) / 10;
    c.seed = random.bits() % 1000000;
    return exactly(c);
  }
};

TEST_P(RandomCases, EqualTheOracle) {
  Random random(2609);
  for (int i = 0; i < 200; ++i) expect_exact(draw(random));
}

// Strides, pages and padding are not in the numbers.
TEST_P(RandomCases, LayoutChangesNothing) {
  Random random(2610);
  for (int i = 0; i < 60; ++i) {
    const Case c = draw(random);
    Case plain = c;
    plain.layout = Layout::kContiguous;
    plain.page_size = 0;
    const Inputs inputs = make_inputs(c), plain_inputs = make_inputs(plain);
    const OwnedMask mask = mask_of(inputs, Call(inputs).attention);
    EXPECT_TRUE(same_or_true(run_attend(inputs, mask), run_attend(plain_inputs, mask),
                             truth_of(inputs, mask)))
        << c;
  }
}
CRISP_ON_CUDA(RandomCases);

}  // namespace
}  // namespace crisp::test
