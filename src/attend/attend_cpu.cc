// attend_cpu.cc - one q_block of one head: online softmax over its kept key blocks, a panel of
// queries at a time. Compiled once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attend/attend_cpu.cc"
#include "hwy/foreach_target.h"
// Highway wants its own include first.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "attend/attend.h"
#include "attend/tile_task.h"
#include "core/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace crisp {
namespace HWY_NAMESPACE {
namespace {

static_assert(kPanel <= kMaxPanel, "TileScratch::scores is sized for the widest panel");

// Key rows as float32, where they lie or widened into scratch.
struct Block {
  const float* rows = nullptr;
  int64_t stride = 0;
};

// Contiguous float32 rows are read in place; everything else is widened and packed. Rows with a
// larger stride would do in place as well, but their lines fall into few cache sets.
bool readable_in_place(const HeadRows& rows) {
  return rows.dtype == DType::kFloat32 && rows.pages == nullptr &&
         rows.token_stride == rows.head_dim;
}

Block load_block(const HeadRows& rows, int64_t first, int64_t count, float* scratch) {
  if (readable_in_place(rows)) {
    return {reinterpret_cast<const float*>(row_address(rows, first)), rows.head_dim};
  }
  LoadRows(rows, first, count, scratch);
  return {scratch, rows.head_dim};
}

// Asks for share `part` of `num_parts` of the rows of the next block, so that the panels of this
// one hide the way from memory to L2. Pages are not followed.
void prefetch_block(const HeadRows& rows, int64_t first, int64_t count, int64_t part,
                    int64_t num_parts) {
  if (rows.pages != nullptr) return;
  constexpr int64_t kLine = 64;  // bytes
  const int64_t row_bytes = rows.head_dim * element_bytes(rows.dtype);
  for (int64_t t = count * part / num_parts; t < count * (part + 1) / num_parts; ++t) {
    const std::byte* row = row_address(rows, first + t);
    for (int64_t at = 0; at < row_bytes; at += kLine) __builtin_prefetch(row + at, 0, 2);
  }
}

// ---- query panels

// Panels that hold queries [begin, end) of the block, given by their place in the block. Lanes
// before begin and after end are zero: they cost nothing and are never written out.
void pack_queries(const TileTask& task, int64_t begin, int64_t end, float scale, float* panels) {
  const int64_t head_dim = task.q.head_dim;
  const int64_t block_start = (task.segment.first_q_block + task.row) * task.block_size;
  const int64_t first_panel = begin / kPanel, end_panel = ceil_div(end, kPanel);
  float* const base = panels + first_panel * head_dim * kPanel;
  std::fill(base, base + (end_panel - first_panel) * head_dim * kPanel, 0.0f);
  HWY_ALIGN float row[kMaxHeadDim];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t query = block_start + i - task.segment.q_offset;
    WidenRow(row_address(task.q, query), task.q.dtype, head_dim, row);
    float* const column = panels + i / kPanel * head_dim * kPanel + i % kPanel;
    for (int64_t d = 0; d < head_dim; ++d) column[d * kPanel] = row[d] * scale;
  }
}

// The running state of one panel.
struct Panel {
  const float* q;  // [head_dim][kPanel], times softmax_scale * log2(e)
  float* o;        // [head_dim][kPanel], unnormalised
  float* max;      // [kPanel], log2 units
  float* sum;      // [kPanel]
};

// Lanes at or past `key`, a key index relative to the panel's first query: those that may see it.
HWY_INLINE MF LanesFrom(int64_t key, int64_t half) {
  const F32 f;
  const VF lane = hn::Iota(f, static_cast<float>(half * kLanes));
  return hn::Ge(lane, hn::Set(f, static_cast<float>(key)));
}

// Scores -> probabilities, in place, for keys [0, count). Keys from `diagonal` on are seen only by
// the lanes at or after them. Updates max and sum and rescales o where the maximum moved.
void softmax_panel(const Panel& panel, int64_t head_dim, int64_t count, int64_t diagonal,
                   float* s) {
  const F32 f;
  const VF minus_infinity = hn::Set(f, -std::numeric_limits<float>::infinity());
  for (int64_t c = diagonal; c < count; ++c) {
    for (int64_t half = 0; half < 2; ++half) {
      float* const at = s + c * kPanel + half * kLanes;
      hn::Store(hn::IfThenElse(LanesFrom(c - diagonal, half), hn::Load(f, at), minus_infinity), f,
                at);
    }
  }

  const VF old0 = hn::Load(f, panel.max), old1 = hn::Load(f, panel.max + kLanes);
  VF max0 = old0, max1 = old1;
  for (int64_t c = 0; c < count; ++c) {
    max0 = hn::Max(max0, hn::Load(f, s + c * kPanel));
    max1 = hn::Max(max1, hn::Load(f, s + c * kPanel + kLanes));
  }
  hn::Store(max0, f, panel.max);
  hn::Store(max1, f, panel.max + kLanes);
  // A lane that has seen nothing but scores of -inf: they weigh exp2(-inf - 0) = 0, not NaN.
  max0 = hn::IfThenElse(hn::Eq(max0, minus_infinity), hn::Zero(f), max0);
  max1 = hn::IfThenElse(hn::Eq(max1, minus_infinity), hn::Zero(f), max1);

  VF sum0 = hn::Zero(f), sum1 = hn::Zero(f);
  for (int64_t c = 0; c < count; ++c) {
    const VF p0 = Exp2(hn::Sub(hn::Load(f, s + c * kPanel), max0));
    const VF p1 = Exp2(hn::Sub(hn::Load(f, s + c * kPanel + kLanes), max1));
    hn::Store(p0, f, s + c * kPanel);
    hn::Store(p1, f, s + c * kPanel + kLanes);
    sum0 = hn::Add(sum0, p0);
    sum1 = hn::Add(sum1, p1);
  }

  const bool moved = !(hn::AllTrue(f, hn::Eq(old0, max0)) && hn::AllTrue(f, hn::Eq(old1, max1)));
  if (moved) {
    const VF shrink0 = Exp2(hn::Sub(old0, max0)), shrink1 = Exp2(hn::Sub(old1, max1));
    sum0 = hn::MulAdd(hn::Load(f, panel.sum), shrink0, sum0);
    sum1 = hn::MulAdd(hn::Load(f, panel.sum + kLanes), shrink1, sum1);
    for (int64_t d = 0; d < head_dim; ++d) {
      float* const o = panel.o + d * kPanel;
      hn::Store(hn::Mul(hn::Load(f, o), shrink0), f, o);
      hn::Store(hn::Mul(hn::Load(f, o + kLanes), shrink1), f, o + kLanes);
    }
  } else {
    sum0 = hn::Add(hn::Load(f, panel.sum), sum0);
    sum1 = hn::Add(hn::Load(f, panel.sum + kLanes), sum1);
  }
  hn::Store(sum0, f, panel.sum);
  hn::Store(sum1, f, panel.sum + kLanes);
}

// o[d][lane] += v[c][d] * p[c][lane] for the keys of the diagonal, by lanes at or after the key
// only: a probability of exactly 0 would still let a NaN or an infinity of an unseen value through.
void add_diagonal_values(const Block& v, int64_t first, int64_t count, int64_t head_dim,
                         const float* p, float* o) {
  const F32 f;
  constexpr int64_t kRows = 4;  // divides head_dim
  for (int64_t d = 0; d < head_dim; d += kRows) {
    VF sum[kRows][2];
    for (int64_t r = 0; r < kRows; ++r) {
      sum[r][0] = hn::Load(f, o + (d + r) * kPanel);
      sum[r][1] = hn::Load(f, o + (d + r) * kPanel + kLanes);
    }
    for (int64_t c = first; c < count; ++c) {
      const float* const value = v.rows + c * v.stride + d;
      for (int64_t half = 0; half < 2; ++half) {
        const MF seen = LanesFrom(c - first, half);
        const VF weight = hn::Load(f, p + c * kPanel + half * kLanes);
        for (int64_t r = 0; r < kRows; ++r) {
          const VF added = hn::MulAdd(hn::Set(f, value[r]), weight, sum[r][half]);
          sum[r][half] = hn::IfThenElse(seen, added, sum[r][half]);
        }
      }
    }
    for (int64_t r = 0; r < kRows; ++r) {
      hn::Store(sum[r][0], f, o + (d + r) * kPanel);
      hn::Store(sum[r][1], f, o + (d + r) * kPanel + kLanes);
    }
  }
}

// ---- results

uint16_t to_bfloat16(float value) {  // round to nearest even, NaN stays NaN
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void store_row(const float* row, DType dtype, int64_t head_dim, std::byte* out) {
  if (dtype == DType::kFloat32) {
    std::memcpy(out, row, static_cast<size_t>(head_dim) * sizeof(float));
  } else if (dtype == DType::kBFloat16) {
    auto* const to = reinterpret_cast<uint16_t*>(out);
    for (int64_t d = 0; d < head_dim; ++d) to[d] = to_bfloat16(row[d]);
  } else {
    const hn::CappedTag<float, 8> f;
    const hn::Rebind<hwy::float16_t, decltype(f)> half;
    auto* const to = reinterpret_cast<hwy::float16_t*>(out);
    for (int64_t d = 0; d < head_dim; d += static_cast<int64_t>(hn::Lanes(f))) {
      hn::StoreU(hn::DemoteTo(half, hn::LoadU(f, row + d)), half, to + d);
    }
  }
}

// Queries [begin, end) of the block. A row without a kept block is output 0, lse -inf.
void write_rows(const TileTask& task, const TileScratch& scratch, int64_t begin, int64_t end,
                bool empty) {
  constexpr float kLn2 = 0.6931471805599453f;
  const int64_t head_dim = task.q.head_dim;
  const int64_t block_start = (task.segment.first_q_block + task.row) * task.block_size;
  HWY_ALIGN float row[kMaxHeadDim];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t query = block_start + i - task.segment.q_offset;
    const float sum = scratch.row_sum[i];
    const float* const column = scratch.o_panels + i / kPanel * head_dim * kPanel + i % kPanel;
    for (int64_t d = 0; d < head_dim; ++d) row[d] = empty ? 0.0f : column[d * kPanel] / sum;
    store_row(row, task.q.dtype, head_dim,
              task.out + query * task.out_token_stride * element_bytes(task.q.dtype));
    if (task.lse != nullptr) {
      task.lse[query] = empty ? -std::numeric_limits<float>::infinity()
                              : kLn2 * (scratch.row_max[i] + std::log2(sum));
    }
  }
}

// The next kept block at or after `block`, or `limit`.
int64_t next_kept(const uint32_t* words, int64_t block, int64_t limit) {
  while (block < limit) {
    const uint32_t rest = words[block / 32] >> (block % 32);
    if (rest != 0) return std::min<int64_t>(block + std::countr_zero(rest), limit);
    block = (block / 32 + 1) * 32;
  }
  return limit;
}

HWY_NOINLINE void AttendOneTile(const TileTask& task, const TileScratch& scratch) {
  constexpr float kLog2E = 1.4426950408889634f;
  const SegmentShape& segment = task.segment;
  const int64_t head_dim = task.q.head_dim, block_size = task.block_size;
  const int64_t q_block = segment.first_q_block + task.row;
  // The queries of this tile, by their place in the q_block.
  const int64_t begin = std::max(segment.q_offset - q_block * block_size, int64_t{0});
  const int64_t end = std::min(segment.q_offset + segment.q_len - q_block * block_size, block_size);
  const int64_t first_panel = begin / kPanel, end_panel = ceil_div(end, kPanel);

  pack_queries(task, begin, end, task.softmax_scale * kLog2E, scratch.q_panels);
  std::fill(scratch.o_panels + first_panel * head_dim * kPanel,
            scratch.o_panels + end_panel * head_dim * kPanel, 0.0f);
  std::fill_n(scratch.row_max, block_size, -std::numeric_limits<float>::infinity());
  std::fill_n(scratch.row_sum, block_size, 0.0f);

  const int64_t limit = kv_block_limit(segment, task.row, task.causal);
  int64_t block = next_kept(task.words, 0, limit);
  const bool empty = block == limit;
  while (block < limit) {
    const int64_t next = next_kept(task.words, block + 1, limit);
    const int64_t first_key = block * block_size;
    const int64_t num_keys = std::min(block_size, segment.kv_len - first_key);
    const Block k = load_block(task.k, first_key, num_keys, scratch.k_block);
    const Block v = load_block(task.v, first_key, num_keys, scratch.v_block);
    const bool on_diagonal = task.causal && block == q_block;
    for (int64_t j = first_panel; j < end_panel; ++j) {
      if (next < limit) {
        const int64_t next_keys = std::min(block_size, segment.kv_len - next * block_size);
        const int64_t part = j - first_panel, num_parts = end_panel - first_panel;
        prefetch_block(task.k, next * block_size, next_keys, part, num_parts);
        prefetch_block(task.v, next * block_size, next_keys, part, num_parts);
      }
      const Panel panel{scratch.q_panels + j * head_dim * kPanel,
                        scratch.o_panels + j * head_dim * kPanel, scratch.row_max + j * kPanel,
                        scratch.row_sum + j * kPanel};
      const int64_t count = on_diagonal ? std::min((j + 1) * kPanel, num_keys) : num_keys;
      const int64_t diagonal = on_diagonal ? j * kPanel : num_keys;
      ScorePanel(k.rows, k.stride, count, panel.q, head_dim, scratch.scores);
      softmax_panel(panel, head_dim, count, diagonal, scratch.scores);
      AddValuesPanel(v.rows, v.stride, diagonal, scratch.scores, head_dim, panel.o);
      if (on_diagonal) {
        add_diagonal_values(v, diagonal, count, head_dim, scratch.scores, panel.o);
      }
    }
    block = next;
  }
  write_rows(task, scratch, begin, end, empty);
}

}  // namespace

AttendTile AttendTileOfTarget() { return AttendOneTile; }
const char* TargetOfTarget() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace crisp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace crisp {

HWY_EXPORT(AttendTileOfTarget);
HWY_EXPORT(TargetOfTarget);

AttendTile attend_tile_for_this_machine() { return HWY_DYNAMIC_DISPATCH(AttendTileOfTarget)(); }
const char* attend_target() noexcept { return HWY_DYNAMIC_DISPATCH(TargetOfTarget)(); }

}  // namespace crisp
#endif  // HWY_ONCE
