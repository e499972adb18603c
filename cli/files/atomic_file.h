// atomic_file.h - writes a file, or several, as a whole or not at all.
#pragma once

#include <cstddef>
#include <list>
#include <span>
#include <string>

namespace crisp::files {

// Refuses, with a FileError, a path that commit() could not replace: its folder is missing or not
// writable, or it names something other than a regular file. For use before a long computation.
void check_writable(const std::string& path);

// Bytes go to a temporary file beside `path`; commit() flushes it to disk and renames it over
// `path`. Without commit(), also when an error is thrown, the temporary file is removed and `path`
// keeps what it held. Every member throws FileError (full disk, no permission, ...).
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const { return path_; }
  void write(std::span<const std::byte> bytes);
  void commit();
  // commit() of all. Every file is on disk before the first takes its name: what fails before then
  // leaves all names as they were.
  static void commit_all(std::list<AtomicFile>& files);

 private:
  void flush();
  void replace();
  std::string path_, target_, temporary_;  // target_: path_ with a symbolic link followed
  int fd_ = -1;
};

}  // namespace crisp::files
