// workspace.h - carves the caller's scratch. The same code counts and carves: a Workspace made by
// counting() hands out null pointers and only adds up, so that workspace_bytes can never disagree
// with what a stage takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/check.h"

namespace crisp {

class Workspace {
 public:
  static constexpr size_t kAlignment = 256;  // bytes; whole cache lines, any vector type

  static Workspace counting() { return Workspace(); }
  explicit Workspace(std::span<std::byte> memory) : memory_(memory), counting_(false) {}

  // `count` elements, uninitialised, aligned to kAlignment. Null when counting.
  template <class T>
  T* take(int64_t count) {
    const size_t begin = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    peak_ = std::max(peak_, used_);
    if (counting_) return nullptr;
    CRISP_CHECK(used_ <= memory_.size(), "workspace holds ", memory_.size(),
                " bytes, needs at least ", used_);
    return reinterpret_cast<T*>(memory_.data() + begin);
  }

  // Scratch of one phase is given back by rewinding to a mark taken before it.
  size_t mark() const { return used_; }
  void rewind(size_t mark) { used_ = mark; }

  bool is_counting() const { return counting_; }
  size_t peak_bytes() const { return peak_; }

 private:
  Workspace() = default;
  std::span<std::byte> memory_;
  bool counting_ = true;
  size_t used_ = 0, peak_ = 0;
};

}  // namespace crisp
