// case.h - one case of any test: what is computed, on which numbers, laid out how. Its printed form
// reruns it:  CRISP_CASE='hq=4 hkv=2 d=64 ...' attend_test --gtest_filter=Rerun.*
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "crisp/crisp.h"
#include "reference/reference.h"
#include "values.h"

namespace crisp::test {

struct Lengths {
  int64_t q_len = 0, kv_len = 0;
  bool operator==(const Lengths&) const = default;
};

enum class Layout : uint8_t {
  kContiguous,  // [token, head, dim]
  kHeadMajor,   // [head, token, dim]: a transposed view
  kPackedQkv,   // slices of one [token, q heads | k heads | v heads, dim]
  kOddStrides,  // gaps between heads and tokens, aligned to the element only
};

struct Case {
  int64_t num_q_heads = 1, num_kv_heads = 1, head_dim = 64;
  std::vector<Lengths> segments = std::vector<Lengths>(1, Lengths{256, 256});
  int64_t padding = 0;  // tokens before every segment and after the last, of no segment
  DType dtype = DType::kFloat32;
  Layout layout = Layout::kContiguous;
  int64_t page_size = 0;  // tokens; 0: contiguous k and v
  bool causal = true;
  int64_t block_size = 128;
  float density = 1;  // of a random mask; 1 keeps every causal block
  Policy policy = Dense{};
  int num_threads = 1;
  Device device = Device::kCpu;
  bool only_sm80 = false;  // CUDA: the mma.sync kernels even where the wgmma ones would run
  uint64_t seed = 1;
};

std::ostream& operator<<(std::ostream& stream, const Case& c);
// Inverse of operator<<; throws std::invalid_argument naming the word it does not know.
Case parse_case(const std::string& text);

// The numbers of a case, rounded to its dtype. Token order is that of the segments with their
// padding, which is NaN; k and v have the same numbers whether paged or not.
struct Inputs {
  Case config;
  std::vector<Segment> segments;  // kv_start counts rows of `k` and `v` below
  Values q, k, v;
  float softmax_scale = 0;
};
Inputs make_inputs(const Case& c);  // standard normal

// The same as segments of their own: chunk of queries [q_begin, q_end) of segment `index`, with the
// keys [kv_begin, kv_end) of that segment.
Inputs slice(const Inputs& inputs, int64_t index, Lengths begin, Lengths end);
inline Inputs slice(const Inputs& inputs, int64_t index) {
  const Segment& whole = inputs.segments[static_cast<size_t>(index)];
  return slice(inputs, index, {0, 0}, {whole.q_len, whole.kv_len});
}
// Only the listed heads; query head i of the result reads kv head i / (heads / kv_heads).
Inputs take_heads(const Inputs& inputs, const std::vector<int64_t>& q_heads,
                  const std::vector<int64_t>& kv_heads);

// One query head of one segment for the oracle.
reference::Head reference_head(const Inputs& inputs, const Segment& segment, int64_t q_head);

class DeviceCopy;

// Owns a laid-out copy of the numbers, NaN in every gap, and the borrowing Attention. On CUDA all
// but the list of segments lies on the device.
class Call {
 public:
  explicit Call(const Inputs& inputs);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // What lies on a device is as it was put there, and so is what surrounds it.
  bool untouched() const;
  // On CUDA: the numbers of another call of the same shape, at the same addresses.
  void take_values(const Call& other);

  Attention attention;

 private:
  void move_to_device();
  ConstTensor place(const Values& values, const Case& c, std::vector<std::byte>& storage);
  void pack(const Inputs& inputs);
  ConstTensor place_in_pages(const Values& values, const Inputs& inputs,
                             std::vector<std::byte>& storage) const;
  void make_pages(const Inputs& inputs);

  std::vector<std::byte> q_, k_, v_;
  std::vector<Segment> segments_;
  std::vector<int32_t> block_table_;
  int64_t num_pages_ = 0, pages_per_row_ = 0;
  struct OnDevice {
    std::span<const std::byte> host;
    std::unique_ptr<DeviceCopy> copy;
  };
  std::vector<OnDevice> on_device_;
};

// Strides of a tensor of its own in that layout; kPackedQkv as kContiguous.
struct Strides {
  int64_t token = 0, head = 0, first = 0;  // elements
  int64_t elements = 0;                    // of storage, ending with the last row
};
Strides strides_of(Layout layout, int64_t tokens, int64_t heads, int64_t dim);

}  // namespace crisp::test
