// call.cc - the numbers of a case laid out in memory.
#include <algorithm>
#include <numeric>

#include "case.h"
#include "device.h"

namespace crisp::test {
namespace {

constexpr int64_t kSparePages = 2;  // pages of the pool that no segment uses

ConstTensor describe(const Values& values, DType dtype, const Strides& strides,
                     std::byte* storage) {
  return {storage + strides.first * element_bytes(dtype),
          dtype,
          values.tokens,
          values.heads,
          values.dim,
          strides.token,
          strides.head};
}

void write(const Values& values, DType dtype, const Strides& strides, std::byte* storage) {
  for (int64_t token = 0; token < values.tokens; ++token) {
    for (int64_t head = 0; head < values.heads; ++head) {
      const int64_t at = strides.first + token * strides.token + head * strides.head;
      for (int64_t c = 0; c < values.dim; ++c) {
        store(dtype, values.row(token, head)[c], storage + (at + c) * element_bytes(dtype));
      }
    }
  }
}

std::vector<std::byte> nan_bytes(int64_t elements, DType dtype) {
  return std::vector<std::byte>(
      static_cast<size_t>(std::max<int64_t>(elements, 1) * element_bytes(dtype)), std::byte{0xff});
}

}  // namespace

ConstTensor Call::place(const Values& values, const Case& c, std::vector<std::byte>& storage) {
  const Strides strides = strides_of(c.layout, values.tokens, values.heads, values.dim);
  storage = nan_bytes(strides.elements, c.dtype);
  write(values, c.dtype, strides, storage.data());
  return describe(values, c.dtype, strides, storage.data());
}

void Call::pack(const Inputs& inputs) {
  const Values &q = inputs.q, &k = inputs.k;
  const DType dtype = inputs.config.dtype;
  const int64_t row = (q.heads + 2 * k.heads) * q.dim;
  q_ = nan_bytes(std::max(q.tokens, k.tokens) * row, dtype);
  ConstTensor* tensors[] = {&attention.q, &attention.k, &attention.v};
  const Values* values[] = {&inputs.q, &inputs.k, &inputs.v};
  Strides strides{row, q.dim, 0, 0};
  for (int i = 0; i < 3; ++i) {
    write(*values[i], dtype, strides, q_.data());
    *tensors[i] = describe(*values[i], dtype, strides, q_.data());
    strides.first += values[i]->heads * q.dim;
  }
}

// Segment s owns row num_segments - 1 - s of the table. A row starts with the padding, and the
// pages of all rows lie shuffled in the pool, among spare ones. Entries past a row's end are
// garbage.
void Call::make_pages(const Inputs& inputs) {
  const Case& c = inputs.config;
  const auto pages = [&](int64_t kv_len) {
    return (c.padding + kv_len + c.page_size - 1) / c.page_size;
  };
  for (const Segment& segment : inputs.segments) {
    pages_per_row_ = std::max(pages_per_row_, pages(segment.kv_len) + 1);
    num_pages_ += pages(segment.kv_len);
  }
  num_pages_ += kSparePages;
  std::vector<int32_t> order(static_cast<size_t>(num_pages_));
  std::iota(order.begin(), order.end(), 0);
  Random random(c.seed + 99);
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
  const int64_t rows = static_cast<int64_t>(inputs.segments.size());
  block_table_.assign(static_cast<size_t>(rows * pages_per_row_), INT32_MIN);
  size_t next = 0;
  for (int64_t s = 0; s < rows; ++s) {
    Segment& segment = segments_[static_cast<size_t>(s)];
    segment.page_row = rows - 1 - s;
    segment.kv_start = c.padding;
    for (int64_t page = 0; page < pages(segment.kv_len); ++page) {
      block_table_[static_cast<size_t>(segment.page_row * pages_per_row_ + page)] = order[next++];
    }
  }
  attention.pages = {block_table_.data(), rows, pages_per_row_, c.page_size};
}

ConstTensor Call::place_in_pages(const Values& values, const Inputs& inputs,
                                 std::vector<std::byte>& storage) const {
  const Case& c = inputs.config;
  const Strides page = strides_of(c.layout, c.page_size, values.heads, values.dim);
  const int64_t page_stride = page.elements + (c.layout == Layout::kOddStrides ? 7 : 0);
  storage = nan_bytes((num_pages_ - 1) * page_stride + page.elements, c.dtype);
  for (size_t s = 0; s < segments_.size(); ++s) {
    const Segment &logical = inputs.segments[s], &paged = segments_[s];
    for (int64_t token = 0; token < logical.kv_len; ++token) {
      const int64_t at = paged.kv_start + token;
      const int64_t entry = paged.page_row * pages_per_row_ + at / c.page_size;
      for (int64_t head = 0; head < values.heads; ++head) {
        const int64_t element = page.first +
                                block_table_[static_cast<size_t>(entry)] * page_stride +
                                at % c.page_size * page.token + head * page.head;
        for (int64_t i = 0; i < values.dim; ++i) {
          store(c.dtype, values.row(logical.kv_start + token, head)[i],
                storage.data() + (element + i) * element_bytes(c.dtype));
        }
      }
    }
  }
  ConstTensor tensor = describe(values, c.dtype, page, storage.data());
  tensor.num_tokens = num_pages_ * c.page_size;
  tensor.page_stride = page_stride;
  return tensor;
}

Call::Call(const Inputs& inputs) : segments_(inputs.segments) {
  const Case& c = inputs.config;
  const bool is_packed = c.layout == Layout::kPackedQkv && c.page_size == 0;
  if (c.page_size > 0) make_pages(inputs);
  if (is_packed) {
    pack(inputs);
  } else {
    attention.q = place(inputs.q, c, q_);
    attention.k = c.page_size > 0 ? place_in_pages(inputs.k, inputs, k_) : place(inputs.k, c, k_);
    attention.v = c.page_size > 0 ? place_in_pages(inputs.v, inputs, v_) : place(inputs.v, c, v_);
  }
  attention.softmax_scale = inputs.softmax_scale;
  attention.causal = c.causal;
  // One segment over everything is also what an empty list means.
  const bool is_whole = segments_.size() == 1 && c.padding == 0 && c.page_size == 0;
  if (!is_whole) attention.segments = segments_;
  if (c.device == Device::kCuda) move_to_device();
}

Call::~Call() = default;

void Call::move_to_device() {
  const auto move = [this](std::span<const std::byte> host) {
    on_device_.push_back({host, std::make_unique<DeviceCopy>(host)});
    return on_device_.back().copy->data();
  };
  // A packed buffer holds all three.
  for (const std::vector<std::byte>* storage : {&q_, &k_, &v_}) {
    if (storage->empty()) continue;
    std::byte* const device = move(*storage);
    for (ConstTensor* tensor : {&attention.q, &attention.k, &attention.v}) {
      const auto* data = static_cast<const std::byte*>(tensor->data);
      const bool is_inside = data >= storage->data() && data <= storage->data() + storage->size();
      if (is_inside) tensor->data = device + (data - storage->data());
    }
  }
  if (block_table_.empty()) return;
  attention.pages.block_table =
      reinterpret_cast<const int32_t*>(move(std::as_bytes(std::span(block_table_))));
}

void Call::take_values(const Call& other) {
  for (size_t i = 0; i < on_device_.size(); ++i) {
    on_device_[i].copy->take(*other.on_device_.at(i).copy);
  }
}

bool Call::untouched() const {
  return std::all_of(on_device_.begin(), on_device_.end(),
                     [](const OnDevice& part) { return part.copy->equals(part.host); });
}

}  // namespace crisp::test
