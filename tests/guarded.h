// guarded.h - memory of exactly the size promised to the library, with sentinels on both sides and
// every byte of it 0xff, which reads as NaN in every dtype: what was not written shows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

namespace crisp::test {

class Guarded {
 public:
  static constexpr size_t kAlignment = 256, kGuard = 512;
  static constexpr std::byte kFill{0xff}, kSentinel{0xa5};

  // `misalign` moves the payload off its 256-byte boundary.
  explicit Guarded(size_t bytes, size_t misalign = 0)
      : size_(bytes), storage_(bytes + 2 * kGuard + kAlignment + misalign, kSentinel) {
    const size_t address = reinterpret_cast<size_t>(storage_.data()) + kGuard;
    begin_ = kGuard + (kAlignment - address % kAlignment) % kAlignment + misalign;
    refill();
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  Guarded(Guarded&&) = default;

  std::byte* data() { return storage_.data() + begin_; }
  const std::byte* data() const { return storage_.data() + begin_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() { return {data(), size_}; }
  template <class T>
  std::span<T> as() {
    return {reinterpret_cast<T*>(data()), size_ / sizeof(T)};
  }
  void refill() { std::fill_n(data(), size_, kFill); }

  // Nothing was written outside the payload.
  bool intact() const {
    const auto is_sentinel = [](std::byte value) { return value == kSentinel; };
    return std::all_of(storage_.data(), data(), is_sentinel) &&
           std::all_of(data() + size_, storage_.data() + storage_.size(), is_sentinel);
  }
  // Nothing was written inside it either.
  bool untouched() const {
    return intact() && std::all_of(data(), data() + size_, [](std::byte v) { return v == kFill; });
  }

 private:
  size_t size_, begin_ = 0;
  std::vector<std::byte> storage_;
};

}  // namespace crisp::test
