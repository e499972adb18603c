// mapped_file.h - a whole file as read-only memory. Pages are read when touched, so a file larger
// than memory can be used; a file shortened by another program while mapped ends this one (SIGBUS).
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace crisp::files {

class MappedFile {
 public:
  // Throws FileError if `path` is missing, unreadable, not a regular file, or empty.
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace crisp::files
