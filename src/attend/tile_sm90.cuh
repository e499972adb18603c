// tile_sm90.cuh - the arithmetic of one 64 x 128 tile of scores, and of writing its output.
//
// Accumulator layout of a warpgroup: s[4 g + 2 h + e] of a thread is row lane / 4 + 8 h, column
// 8 g + 2 (lane % 4) + e of its warp's 16 rows.
#pragma once

#include "attend/attend_cuda.h"
#include "core/sm90.cuh"

namespace crisp::attend_sm90 {

using namespace sm90;

// kFixed   Exponentials are taken relative to the row maxima of the block visited first, usually
//          the diagonal. Later blocks then need no maximum, no shuffle, and O no rescaling. P and O
//          hold what lies above that reference as long as a row's sum stays below kLargestSum;
//          tiles with a row that does not are listed, and a second launch, normally empty, redoes
//          them with
// kOnline  running maxima and rescaling. Safe for any input.
enum class Softmax { kFixed, kOnline };

// bfloat16 has float's exponent: P and O lose nothing while the sum stays far from overflow.
// float16 ends at 65504: probabilities are held 2^-4 lower, and a row's sum bounds each of them.
template <class Element>
constexpr bool kIsHalf = std::is_same_v<Element, __half>;
template <class Element>
constexpr float kReferenceBias = kIsHalf<Element> ? 4.f : 0.f;  // log2 units
template <class Element>
constexpr float kLargestSum = kIsHalf<Element> ? 0x1p15f : 0x1p64f;

// Row `row` + 8 h sees columns [0, limit[h]) of the block.
CRISP_DEVICE void hide_columns(float (&s)[64], const int (&limit)[2], int column) {
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (column + (i >> 2) * 8 + (i & 1) >= limit[(i >> 1) & 1]) s[i] = -INFINITY;
}

CRISP_DEVICE void row_maxima(const float (&s)[64], float (&top)[2]) {
  float t[4] = {s[0], s[2], s[1], s[3]};
#pragma unroll
  for (int i = 4; i < 64; ++i) {
    float& x = t[((i >> 1) & 1) + 2 * (i & 1)];
    x = fmaxf(x, s[i]);
  }
  top[0] = quad_max(fmaxf(t[0], t[2]));
  top[1] = quad_max(fmaxf(t[1], t[3]));
}

// s becomes exp2(scale_log2 s - shift); returns this thread's share of the row sums.
CRISP_DEVICE void exponentiate(float (&s)[64], const float (&shift)[2], float scale_log2,
                               float (&sum)[2]) {
  float t[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] = exp2_fast(fmaf(s[i], scale_log2, -shift[(i >> 1) & 1]));
    t[((i >> 1) & 1) + 2 * (i & 1)] += s[i];
  }
  sum[0] = t[0] + t[2];
  sum[1] = t[1] + t[3];
}

// NOTE: ptxas is free to hoist "wait for P V" above arithmetic that does not touch O, which would
// undo the overlap of softmax with P V. A store that never happens (a sum of exponentials is not
// negative) but depends on every exponential keeps the wait below them: memory operations do not
// cross it. `witness` must involve a loop-carried sum, or ptxas proves the store dead.
CRISP_DEVICE void finish_before_wait(float witness, const void* scratch) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.lt.f32 p, %0, 0f00000000;\n\t@p st.shared.f32 [%1], %0;\n\t}" ::
          "f"(witness),
      "r"(shared_address(scratch))
      : "memory");
}

template <class Element>
CRISP_DEVICE void pack_probabilities(uint32_t (&p)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
}

// One row of O, spread over the four lanes of a quad, leaves as 16-byte stores: lane l of the quad
// collects column groups l, l + 4, ... by a 4 x 4 transpose of words. `o` is at this thread's half.
template <class Element, int kColumns>
CRISP_DEVICE void store_row(const float* o, float inverse, Element* out, int quad, bool wanted) {
#pragma unroll
  for (int g = 0; g < kColumns / 8; g += 4) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = pack<Element>(o[4 * (g + i)] * inverse, o[4 * (g + i) + 1] * inverse);
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool upper = quad & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const uint32_t got = __shfl_xor_sync(~0u, upper ? w[i] : w[i | bit], bit);
        if (upper)
          w[i] = got;
        else
          w[i | bit] = got;
      }
    }
    if (wanted)
      *reinterpret_cast<uint4*>(out + 8 * (g + quad)) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

}  // namespace crisp::attend_sm90
