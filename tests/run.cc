#include "run.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/device.h"
#include "device.h"

#ifdef CRISP_WITH_CUDA
#include "attend/attend_cuda.h"
#endif

namespace crisp::test {
namespace {

// Where the output of a case is written.
class Output {
 public:
  explicit Output(const Inputs& inputs)
      : inputs_(inputs),
        strides_(strides_of(inputs.config.layout, inputs.q.tokens, inputs.q.heads, inputs.q.dim)),
        out_(static_cast<size_t>(strides_.elements * bytes())),
        lse_(static_cast<size_t>(inputs.q.tokens * inputs.q.heads) * sizeof(float)),
        placed_out_(inputs.config.device, out_),
        placed_lse_(inputs.config.device, lse_) {}

  Tensor out() {
    return {placed_out_.data() + strides_.first * bytes(),
            inputs_.config.dtype,
            inputs_.q.tokens,
            inputs_.q.heads,
            inputs_.q.dim,
            strides_.token,
            strides_.head};
  }
  std::span<float> lse() { return placed_lse_.as<float>(); }

  void refill() {
    out_.refill();
    lse_.refill();
    placed_out_.put();
    placed_lse_.put();
  }

  Outcome read(Family family) {
    placed_out_.fetch();
    placed_lse_.fetch();
    const std::span<float> lse = lse_.as<float>();
    EXPECT_TRUE(out_.intact() && lse_.intact()) << "written outside out or lse: " << inputs_.config;
    Outcome outcome{
        Values(inputs_.q.tokens, inputs_.q.heads, inputs_.q.dim), {lse.begin(), lse.end()}, family};
    for (int64_t token = 0; token < inputs_.q.tokens; ++token) {
      for (int64_t head = 0; head < inputs_.q.heads; ++head) {
        for (int64_t i = 0; i < inputs_.q.dim; ++i) {
          outcome.out.row(token, head)[i] = load(inputs_.config.dtype, element(token, head, i));
        }
      }
    }
    erase_rows();
    EXPECT_TRUE(out_.untouched() && lse_.untouched())
        << "written between the rows or outside every segment: " << inputs_.config;
    return outcome;
  }

 private:
  int64_t bytes() const { return element_bytes(inputs_.config.dtype); }
  std::byte* element(int64_t token, int64_t head, int64_t i) {
    return out_.data() +
           (strides_.first + token * strides_.token + head * strides_.head + i) * bytes();
  }
  void erase_rows() {
    for (const Segment& segment : inputs_.segments) {
      for (int64_t head = 0; head < inputs_.q.heads; ++head) {
        for (int64_t token = segment.q_start; token < segment.q_start + segment.q_len; ++token) {
          std::fill_n(element(token, head, 0), inputs_.q.dim * bytes(), Guarded::kFill);
          lse_.as<float>()[static_cast<size_t>(head * inputs_.q.tokens + token)] =
              std::bit_cast<float>(0xffffffffu);
        }
      }
    }
  }

  const Inputs& inputs_;
  Strides strides_;
  Guarded out_, lse_;
  Placed placed_out_, placed_lse_;
};

Context context_of(const Case& c) {
  Context context;
  context.device = c.device;
  context.num_threads = c.num_threads;
  return context;
}

// Before and after a call that attends.
void choose_family([[maybe_unused]] const Case& c) {
#ifdef CRISP_WITH_CUDA
  if (c.device == Device::kCuda) force_sm80_for_tests(c.only_sm80);
#endif
}
Family family_that_ran(const Case& c) {
  if (c.device == Device::kCpu) return Family::kCpu;
#ifdef CRISP_WITH_CUDA
  if (last_ran_sm90_for_tests()) return Family::kSm90;
#endif
  return Family::kSm80;
}

// A mask where the device of the case sees it.
struct PlacedMask {
  PlacedMask(Device device, const OwnedMask& owned)
      : placed(device, owned.memory()), mask(owned.mask) {
    mask.words = placed.as<uint32_t>().data();
  }
  Placed placed;
  BlockMask mask;
};

// The policy with its mask, if it has one, at `user`.
Policy on_device(const Policy& policy, std::optional<PlacedMask>& user, Device device,
                 const OwnedMask* user_mask) {
  if (user_mask == nullptr) return policy;
  user.emplace(device, *user_mask);
  return UserMask{user->mask};
}

}  // namespace

int64_t MaskRows::limit(int64_t row, bool causal) const {
  return causal ? std::min(first_q_block + row + 1, num_kv_blocks) : num_kv_blocks;
}

std::vector<MaskRows> mask_rows(const Inputs& inputs, int64_t block_size) {
  std::vector<MaskRows> all;
  int64_t first_row = 0;
  for (const Segment& segment : inputs.segments) {
    const int64_t offset = std::max<int64_t>(segment.kv_len - segment.q_len, 0);
    MaskRows rows{first_row, 0, offset / block_size,
                  (segment.kv_len + block_size - 1) / block_size};
    if (segment.q_len > 0) {
      rows.num_rows = (offset + segment.q_len - 1) / block_size - rows.first_q_block + 1;
    }
    first_row += rows.num_rows;
    all.push_back(rows);
  }
  return all;
}

OwnedMask::OwnedMask(const Attention& attention, int64_t block_size)
    : mask(mask_for(attention, block_size)), memory_(static_cast<size_t>(mask.bytes())) {
  std::fill_n(memory_.data(), memory_.size(), std::byte{0});
  mask.words = reinterpret_cast<uint32_t*>(memory_.data());
}

uint32_t& OwnedMask::word(int64_t head, int64_t row, int64_t kv_block) const {
  return mask.words[(head * mask.num_q_blocks + row) * mask.words_per_row() + kv_block / 32];
}

bool OwnedMask::at(int64_t head, int64_t row, int64_t kv_block) const {
  return word(head, row, kv_block) >> (kv_block % 32) & 1;
}

void OwnedMask::set(int64_t head, int64_t row, int64_t kv_block, bool kept) {
  const uint32_t bit = uint32_t{1} << (kv_block % 32);
  uint32_t& w = word(head, row, kv_block);
  w = kept ? w | bit : w & ~bit;
}

int64_t OwnedMask::count(int64_t head, int64_t first_row, int64_t num_rows) const {
  const uint32_t* begin =
      mask.words + (head * mask.num_q_blocks + first_row) * mask.words_per_row();
  return std::accumulate(begin, begin + num_rows * mask.words_per_row(), int64_t{0},
                         [](int64_t sum, uint32_t w) { return sum + std::popcount(w); });
}

bool OwnedMask::operator==(const OwnedMask& other) const {
  return mask.num_heads == other.mask.num_heads && mask.num_q_blocks == other.mask.num_q_blocks &&
         mask.num_kv_blocks == other.mask.num_kv_blocks &&
         std::equal(memory_.data(), memory_.data() + memory_.size(), other.memory_.data());
}

void keep_random(OwnedMask& mask, const Inputs& inputs, double density, uint64_t seed) {
  Random random(seed);
  const std::vector<MaskRows> all = mask_rows(inputs, mask.mask.block_size);
  for (int64_t head = 0; head < mask.mask.num_heads; ++head) {
    for (const MaskRows& rows : all) {
      for (int64_t row = 0; row < rows.num_rows; ++row) {
        for (int64_t block = 0; block < rows.limit(row, inputs.config.causal); ++block) {
          mask.set(head, rows.first_row + row, block, random.uniform() < density);
        }
      }
    }
  }
}

OwnedMask mask_of(const Inputs& inputs, const Attention& attention) {
  OwnedMask mask(attention, inputs.config.block_size);
  keep_random(mask, inputs, inputs.config.density, inputs.config.seed + 7);
  return mask;
}

struct PreparedAttend::Parts {
  Parts(const Inputs& inputs_, const Attention& attention_, const OwnedMask& mask_)
      : inputs(inputs_),
        attention(attention_),
        segments(attention_.segments.begin(), attention_.segments.end()),
        owned_mask(mask_),
        context(context_of(inputs_.config)),
        output(inputs_),
        mask(inputs_.config.device, mask_),
        workspace(workspace_bytes(attention_, Dense{}, mask_.mask, context)),
        scratch(inputs_.config.device, workspace) {
    attention.segments = segments;
    context.workspace = scratch.bytes();
  }
  const Inputs& inputs;
  Attention attention;
  std::vector<Segment> segments;
  const OwnedMask& owned_mask;
  Context context;
  Output output;
  PlacedMask mask;
  Guarded workspace;
  Placed scratch;
  Family family = Family::kCpu;
};

PreparedAttend::PreparedAttend(const Inputs& inputs, const Call& call, const OwnedMask& mask)
    : parts_(std::make_unique<Parts>(inputs, call.attention, mask)) {}
PreparedAttend::~PreparedAttend() = default;

void PreparedAttend::enqueue(CUstream_st* stream) {
  Parts& p = *parts_;
  p.context.stream = stream;
  choose_family(p.inputs.config);
  attend(p.attention, p.mask.mask, p.output.out(), p.output.lse(), p.context);
  p.family = family_that_ran(p.inputs.config);
}

Outcome PreparedAttend::read() {
  Parts& p = *parts_;
  p.scratch.fetch();
  p.mask.placed.fetch();
  EXPECT_TRUE(p.workspace.intact()) << "written outside the workspace: " << p.inputs.config;
  EXPECT_TRUE(p.owned_mask.memory().intact()) << "written outside the mask: " << p.inputs.config;
  return p.output.read(p.family);
}

void PreparedAttend::refill() {
  parts_->output.refill();
  parts_->workspace.refill();
  parts_->scratch.put();
}

void PreparedAttend::scribble_segments() {
  for (Segment& segment : parts_->segments) segment = {-1, -1, -1, -1, -1};
}

Outcome run_attend(const Inputs& inputs, const Call& call, const OwnedMask& mask) {
  PreparedAttend prepared(inputs, call, mask);
  prepared.enqueue();
  synchronize(inputs.config.device);
  EXPECT_TRUE(call.untouched()) << "an input was written: " << inputs.config;
  return prepared.read();
}

Selected run_select(const Inputs& inputs, const OwnedMask* user_mask) {
  const Case& c = inputs.config;
  const Call call(inputs);
  Selected selected(call.attention, c.block_size);
  selected.mask.memory().refill();
  Guarded report(inputs.segments.size() * static_cast<size_t>(inputs.q.heads) * sizeof(HeadReport));
  Placed placed_report(c.device, report);
  PlacedMask placed(c.device, selected.mask);
  std::optional<PlacedMask> user;
  const Policy policy = on_device(c.policy, user, c.device, user_mask);
  Context context = context_of(c);
  Guarded workspace(workspace_bytes(call.attention, policy, placed.mask, context));
  Placed scratch(c.device, workspace);
  context.workspace = scratch.bytes();
  select_blocks(call.attention, policy, placed.mask, context, placed_report.as<HeadReport>());
  synchronize(c.device);
  scratch.fetch();
  placed.placed.fetch();
  placed_report.fetch();
  EXPECT_TRUE(workspace.intact() && selected.mask.memory().intact() && report.intact())
      << "written outside the mask, the report or the workspace: " << c;
  EXPECT_TRUE(call.untouched()) << "an input was written: " << c;
  const std::span<HeadReport> entries = report.as<HeadReport>();
  selected.report.assign(entries.begin(), entries.end());
  return selected;
}

Outcome run_prefill(const Inputs& inputs, const OwnedMask* user_mask) {
  const Case& c = inputs.config;
  const Call call(inputs);
  Output output(inputs);
  OwnedMask mask(call.attention, c.block_size);
  mask.memory().refill();
  PlacedMask placed(c.device, mask);
  std::optional<PlacedMask> user;
  const Policy policy = on_device(c.policy, user, c.device, user_mask);
  Context context = context_of(c);
  Guarded workspace(workspace_bytes(call.attention, policy, placed.mask, context));
  Placed scratch(c.device, workspace);
  context.workspace = scratch.bytes();
  choose_family(c);
  prefill(call.attention, policy, placed.mask, output.out(), output.lse(), context);
  const Family family = family_that_ran(c);
  synchronize(c.device);
  scratch.fetch();
  placed.placed.fetch();
  EXPECT_TRUE(workspace.intact() && mask.memory().intact())
      << "written outside the mask or the workspace: " << c;
  return output.read(family);
}

::testing::AssertionResult same_bits(const std::vector<float>& a, const std::vector<float>& b,
                                     const char* what) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << what << " has " << a.size() << " and " << b.size();
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) {
      return ::testing::AssertionFailure()
             << what << " differs first at element " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_bits(const Outcome& a, const Outcome& b) {
  const ::testing::AssertionResult out =
      same_bits(a.out.data, b.out.data, "out [token, head, dim]");
  return out ? same_bits(a.lse, b.lse, "lse [head, token]") : out;
}

Outcome cut(const Outcome& whole, int64_t begin, int64_t end, const std::vector<int64_t>& heads) {
  Outcome part{
      Values(end - begin, static_cast<int64_t>(heads.size()), whole.out.dim), {}, whole.family};
  for (size_t h = 0; h < heads.size(); ++h) {
    for (int64_t token = begin; token < end; ++token) {
      std::copy_n(whole.out.row(token, heads[h]), whole.out.dim,
                  part.out.row(token - begin, static_cast<int64_t>(h)));
      part.lse.push_back(whole.lse[static_cast<size_t>(heads[h] * whole.out.tokens + token)]);
    }
  }
  return part;
}

Outcome cut(const Outcome& whole, const Segment& segment) {
  std::vector<int64_t> heads(static_cast<size_t>(whole.out.heads));
  std::iota(heads.begin(), heads.end(), int64_t{0});
  return cut(whole, segment.q_start, segment.q_start + segment.q_len, heads);
}

}  // namespace crisp::test
