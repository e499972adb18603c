// footprint.cc - the pointers of a call: null, alignment, overlap, page ids.
#include "core/validate.h"
#include "core/workspace.h"

namespace crisp {
namespace {

void check_pointer(const char* name, const void* data, int64_t bytes, size_t alignment) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  CRISP_CHECK(data != nullptr, name, " is null, must point to ", bytes, " bytes");
  CRISP_CHECK(address % alignment == 0, name, " is at ", data, ", must be aligned to ", alignment,
              " bytes");
  CRISP_CHECK(static_cast<uint64_t>(bytes) <= UINTPTR_MAX - address, name, " at ", data,
              " is said to have ", bytes, " bytes, which passes the end of the address space");
}

// The table comes from the caller's data, so an entry out of range must not become an address.
void check_page_ids(const Attention& attention) {
  const PagedKv& pages = attention.pages;
  const int64_t num_pages = attention.k.num_tokens / pages.page_size;
  for (int64_t index = 0; index < num_segments(attention); ++index) {
    const Segment segment = segment_at(attention, index);
    if (segment.kv_len == 0) continue;
    const int32_t* row = pages.block_table + segment.page_row * pages.row_stride;
    const int64_t end = ceil_div(segment.kv_start + segment.kv_len, pages.page_size);
    for (int64_t at = segment.kv_start / pages.page_size; at < end; ++at) {
      CRISP_CHECK(row[at] >= 0 && row[at] < num_pages, "pages.block_table[", segment.page_row, "][",
                  at, "] is ", row[at], ", must be in [0, k.num_tokens / page_size), which is [0, ",
                  num_pages, ")");
    }
  }
}

}  // namespace

void Footprint::add(const Range& range) {
  CRISP_ASSERT(num_ranges_ < kCapacity);
  ranges_[num_ranges_++] = range;
}

void Footprint::add_bytes(const char* name, const void* data, int64_t bytes, size_t alignment,
                          bool written) {
  if (bytes == 0) return;
  check_pointer(name, data, bytes, alignment);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  add({name, data, begin, begin + static_cast<uintptr_t>(bytes), 0, 0, written});
}

void Footprint::add_tensor(const char* name, const ConstTensor& tensor, bool written,
                           int64_t page_size) {
  const int64_t unit = element_bytes(tensor.dtype);
  const int64_t bytes = tensor_extent(tensor, page_size) * unit;
  if (bytes == 0) return;
  check_pointer(name, tensor.data, bytes, static_cast<size_t>(unit));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  const int64_t slice = (tensor.num_heads - 1) * tensor.head_stride + tensor.head_dim;
  const bool interleavable = page_size == 0 && slice <= tensor.token_stride;
  add({name, tensor.data, begin, begin + static_cast<uintptr_t>(bytes), tensor.token_stride * unit,
       interleavable ? slice * unit : 0, written});
}

void Footprint::add_mask(const char* name, const BlockMask& mask, bool written) {
  add_bytes(name, mask.words, mask.bytes(), 8, written);
}

void Footprint::add_attention(const Attention& attention, bool with_v) {
  const PagedKv& pages = attention.pages;
  add_tensor("q.data", attention.q, false);
  add_tensor("k.data", attention.k, false, pages.page_size);
  if (with_v) add_tensor("v.data", attention.v, false, pages.page_size);
  add_bytes("segments", attention.segments.data(),
            static_cast<int64_t>(attention.segments.size_bytes()), alignof(Segment), false);
  if (!attention.segments.empty()) ranges_[num_ranges_ - 1].of_host = true;
  if (pages.page_size == 0) return;
  add_bytes("pages.block_table", pages.block_table,
            pages.num_rows * pages.row_stride * static_cast<int64_t>(sizeof(int32_t)),
            alignof(int32_t), false);
  if (device_ == Device::kCpu) check_page_ids(attention);
}

void Footprint::add_workspace(std::span<std::byte> workspace, size_t needed) {
  CRISP_CHECK(workspace.size() >= needed, "context.workspace has ", workspace.size(),
              " bytes, must have at least ", needed, " (workspace_bytes)");
  if (needed > 0)
    add_bytes("context.workspace", workspace.data(), static_cast<int64_t>(needed),
              Workspace::kAlignment, true);
}

// Tokens of two views of one packed buffer alternate: with equal strides they meet only if their
// slices meet within one stride.
bool Footprint::overlap(const Range& a, const Range& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  if (a.slice == 0 || b.slice == 0 || a.token_stride != b.token_stride) return true;
  const auto stride = static_cast<uintptr_t>(a.token_stride);
  const Range& low = a.begin <= b.begin ? a : b;
  const Range& high = a.begin <= b.begin ? b : a;
  const uintptr_t shift = (high.begin - low.begin) % stride;
  return shift < static_cast<uintptr_t>(low.slice) ||
         shift + static_cast<uintptr_t>(high.slice) > stride;
}

void Footprint::check() const {
  for (int i = 0; i < num_ranges_; ++i) {
    for (int j = 0; j < num_ranges_; ++j) {
      if (i == j || !ranges_[i].written) continue;
      CRISP_CHECK(!overlap(ranges_[i], ranges_[j]), ranges_[i].name, " overlaps ", ranges_[j].name,
                  ", must be memory of its own: it is written");
    }
  }
}

int Footprint::cuda_device() const {
  if constexpr (kWithCuda) {
    const Range* first = nullptr;
    int device = kHostMemory;
    for (int i = 0; i < num_ranges_; ++i) {
      const Range& range = ranges_[i];
      if (range.of_host) continue;
      const int owner = device_of(range.data);
      CRISP_CHECK(owner != kHostMemory, range.name, " is at ", range.data,
                  ", which is host memory, must be memory of a CUDA device");
      CRISP_CHECK(first == nullptr || owner == device, range.name, " is memory of CUDA device ",
                  owner, ", must be of device ", device, ", which owns ", first->name);
      if (first == nullptr) first = &range, device = owner;
    }
    return first == nullptr ? current_device() : device;
  }
  return kHostMemory;
}

}  // namespace crisp
