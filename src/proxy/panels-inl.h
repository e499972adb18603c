// panels-inl.h - query rows as panels for ScorePanel. Compiled once per instruction set.

// Include guard of Highway's per-target headers: seen once per target, not once per file.
#if defined(CRISP_PROXY_PANELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CRISP_PROXY_PANELS_INL_H_
#undef CRISP_PROXY_PANELS_INL_H_
#else
#define CRISP_PROXY_PANELS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "core/tile-inl.h"
#include "proxy/proxy.h"

HWY_BEFORE_NAMESPACE();
namespace crisp {
namespace HWY_NAMESPACE {

static_assert(ProxyRows::kSlotAlignment % kPanel == 0, "a panel must not straddle the slots' ends");

inline constexpr float kLog2E = 1.44269504f;

// rows[count][head_dim], times scale, into slots [first_slot, first_slot + count) of
// panels[num_slots / kPanel][head_dim][kPanel]. The other slots are left as they are.
inline void PackPanels(const float* rows, int64_t count, int64_t head_dim, float scale,
                       int64_t first_slot, float* panels) {
  for (int64_t row = 0; row < count; ++row) {
    const int64_t slot = first_slot + row;
    float* panel = panels + slot / kPanel * kPanel * head_dim + slot % kPanel;
    for (int64_t d = 0; d < head_dim; ++d) panel[d * kPanel] = rows[row * head_dim + d] * scale;
  }
}

// mean[head_dim] of rows[count][head_dim], count >= 1; float sums in row order.
inline void MeanOfRows(const float* rows, int64_t count, int64_t head_dim, float* mean) {
  const hn::CappedTag<float, 8> f;  // head_dim is a multiple of 8
  const auto divisor = hn::Set(f, static_cast<float>(count));
  for (int64_t d = 0; d < head_dim; d += static_cast<int64_t>(hn::Lanes(f))) {
    auto sum = hn::Zero(f);
    for (int64_t row = 0; row < count; ++row) {
      sum = hn::Add(sum, hn::LoadU(f, rows + row * head_dim + d));
    }
    hn::StoreU(hn::Div(sum, divisor), f, mean + d);
  }
}

// The proxy rows of one head into panels whose scores are base-2 logits; unused slots become zero
// queries. `scratch` is [128 * head_dim] and keeps the rows, unscaled.
inline void PackProxyRows(const HeadRows& q, const SegmentShape& segment, const ProxyRows& rows,
                          float softmax_scale, float* scratch, float* panels) {
  std::fill_n(panels, rows.num_slots * q.head_dim, 0.0f);
  LoadRows(q, segment.q_len - rows.num_rows, rows.num_rows, scratch);
  PackPanels(scratch, rows.num_rows, q.head_dim, softmax_scale * kLog2E, rows.first_slot(), panels);
}

}  // namespace HWY_NAMESPACE
}  // namespace crisp
HWY_AFTER_NAMESPACE();

#endif  // CRISP_PROXY_PANELS_INL_H_
