// tile-inl.h - the SIMD verbs that proxy and attend are made of, compiled once per instruction set.
//
// Everything works in the layout S^T [keys][queries]: a panel of kPanel queries lies across the
// lanes of two vectors, keys and head_dim run down the rows. Then
//   scores   S^T[key][lane] = sum_d K[key][d] * Q^T[d][lane]   K is read in place, element by
//   element softmax  runs down the columns: no horizontal reduction, masks are lane compares output
//   O^T[d][lane] += sum_key V[key][d] * P^T[key][lane] V is read in place as well
// and no operand is ever transposed except the query panel, once per tile.

// Include guard of Highway's per-target headers: seen once per target, not once per file.
#if defined(CRISP_CORE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CRISP_CORE_TILE_INL_H_
#undef CRISP_CORE_TILE_INL_H_
#else
#define CRISP_CORE_TILE_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "core/problem.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace crisp {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using VF = hn::Vec<F32>;
using MF = hn::Mask<F32>;

inline constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));
// Queries per panel; divides every block size (64, 128) on every target.
inline constexpr int64_t kPanel = 2 * kLanes;
// Rows of a register tile: 2 x kTileRows accumulators, two operands and one broadcast must fit.
inline constexpr int kTileRows = HWY_TARGET == HWY_AVX2 ? 6 : 12;

// ---- exp2

// 2^x for x <= ~0, relative error < 2e-7, 2^0 = 1. Below -126 exactly 0 (so -inf gives 0); NaN
// gives NaN.
HWY_INLINE VF Exp2(VF x) {
  const F32 f;
  const I32 i;
  const VF floor = hn::Set(f, -126.0f);
  const VF whole = hn::Round(hn::Max(x, floor));
  // From x itself, not the clamped value: a NaN, which Max may drop, comes back here.
  const VF frac = hn::Sub(x, whole);
  // Minimax polynomial of 2^frac on [-0.5, 0.5] (relative error, constant term fixed at 1).
  VF p = hn::Set(f, 1.3264727e-3f);
  p = hn::MulAdd(p, frac, hn::Set(f, 9.671513e-3f));
  p = hn::MulAdd(p, frac, hn::Set(f, 5.5507336e-2f));
  p = hn::MulAdd(p, frac, hn::Set(f, 2.4022242e-1f));
  p = hn::MulAdd(p, frac, hn::Set(f, 6.93147e-1f));
  p = hn::MulAdd(p, frac, hn::Set(f, 1.0f));
  const auto exponent = hn::Add(hn::ConvertTo(i, whole), hn::Set(i, 127));
  const VF scale = hn::BitCast(f, hn::ShiftLeft<23>(exponent));
  return hn::IfThenZeroElse(hn::Lt(x, floor), hn::Mul(p, scale));
}

// ---- register tile

// C[kRows][kPanel] (+)= A[kRows][depth] * B[depth][kPanel]. A is read at a[r * a_row + k *
// a_depth].
template <int kRows, bool kAccumulate>
HWY_INLINE void RegisterTile(const float* HWY_RESTRICT a, int64_t a_row, int64_t a_depth,
                             const float* HWY_RESTRICT b, int64_t depth, float* HWY_RESTRICT c) {
  const F32 f;
  VF sum[kRows][2];
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = kAccumulate ? hn::Load(f, c + r * kPanel) : hn::Zero(f);
    sum[r][1] = kAccumulate ? hn::Load(f, c + r * kPanel + kLanes) : hn::Zero(f);
  }
  HWY_UNROLL(4)
  for (int64_t k = 0; k < depth; ++k) {
    const VF b0 = hn::Load(f, b + k * kPanel);
    const VF b1 = hn::Load(f, b + k * kPanel + kLanes);
    HWY_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      const VF value = hn::Set(f, a[r * a_row + k * a_depth]);
      sum[r][0] = hn::MulAdd(value, b0, sum[r][0]);
      sum[r][1] = hn::MulAdd(value, b1, sum[r][1]);
    }
  }
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    hn::Store(sum[r][0], f, c + r * kPanel);
    hn::Store(sum[r][1], f, c + r * kPanel + kLanes);
  }
}

// All `rows` rows of C. They are cut into register tiles whose heights differ by at most one, so
// that no tile is too short to hide the latency of its multiply-adds.
template <bool kAccumulate, int kRows = kTileRows>
HWY_INLINE void RegisterTileOf(int64_t height, const float* a, int64_t a_row, int64_t a_depth,
                               const float* b, int64_t depth, float* c) {
  if (height == kRows) {
    RegisterTile<kRows, kAccumulate>(a, a_row, a_depth, b, depth, c);
  } else if constexpr (kRows > 1) {
    RegisterTileOf<kAccumulate, kRows - 1>(height, a, a_row, a_depth, b, depth, c);
  }
}

template <bool kAccumulate>
HWY_INLINE void Multiply(int64_t rows, const float* a, int64_t a_row, int64_t a_depth,
                         const float* b, int64_t depth, float* c) {
  const int64_t num_tiles = ceil_div(rows, kTileRows);
  if (num_tiles == 0) return;
  const int64_t height = rows / num_tiles, num_taller = rows % num_tiles;
  int64_t row = 0;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t tall = height + (tile < num_taller ? 1 : 0);
    RegisterTileOf<kAccumulate>(tall, a + row * a_row, a_row, a_depth, b, depth, c + row * kPanel);
    row += tall;
  }
}

// scores[key][lane] = sum_d k[key][d] * q_panel[d][lane], for num_keys keys at k + key * k_stride.
HWY_NOINLINE inline void ScorePanel(const float* k, int64_t k_stride, int64_t num_keys,
                                    const float* q_panel, int64_t head_dim, float* scores) {
  Multiply<false>(num_keys, k, k_stride, 1, q_panel, head_dim, scores);
}

// o_panel[d][lane] += sum_key v[key][d] * p[key][lane].
HWY_NOINLINE inline void AddValuesPanel(const float* v, int64_t v_stride, int64_t num_keys,
                                        const float* p, int64_t head_dim, float* o_panel) {
  Multiply<true>(head_dim, v, 1, v_stride, p, num_keys, o_panel);
}

// ---- rows of the caller's tensors as float32

template <class Half>
HWY_INLINE void WidenHalfRow(const std::byte* HWY_RESTRICT source, int64_t head_dim,
                             float* HWY_RESTRICT row) {
  const hn::CappedTag<float, 8> f;  // head_dim is a multiple of 8
  const hn::Rebind<Half, decltype(f)> half;
  const auto* from = reinterpret_cast<const Half*>(source);
  for (int64_t d = 0; d < head_dim; d += static_cast<int64_t>(hn::Lanes(f))) {
    hn::StoreU(hn::PromoteTo(f, hn::LoadU(half, from + d)), f, row + d);
  }
}

HWY_INLINE void WidenRow(const std::byte* HWY_RESTRICT source, DType dtype, int64_t head_dim,
                         float* HWY_RESTRICT row) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(row, source, static_cast<size_t>(head_dim) * sizeof(float));
      return;
    case DType::kBFloat16:
      return WidenHalfRow<hwy::bfloat16_t>(source, head_dim, row);
    case DType::kFloat16:
      return WidenHalfRow<hwy::float16_t>(source, head_dim, row);
  }
}

// Rows [first, first + count) of `rows` -> destination[count][head_dim].
HWY_NOINLINE inline void LoadRows(const HeadRows& rows, int64_t first, int64_t count,
                                  float* destination) {
  for (int64_t t = 0; t < count; ++t) {
    WidenRow(row_address(rows, first + t), rows.dtype, rows.head_dim,
             destination + t * rows.head_dim);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace crisp
HWY_AFTER_NAMESPACE();

#endif  // CRISP_CORE_TILE_INL_H_
