#include "files/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "files/error.h"

namespace crisp::files {

namespace fs = std::filesystem;

namespace {

fs::path folder_of(const fs::path& path) {
  const fs::path folder = path.parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

// The file a rename must replace: `path`, or what the symbolic link `path` leads to.
fs::path target_of(const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  fs::path target = fs::canonical(path, error);
  if (error) fail(path, "is a symbolic link that leads nowhere: ", error.message());
  return target;
}

}  // namespace

void check_writable(const std::string& path) {
  if (path.empty()) throw FileError("the name of the file to write is empty");
  const fs::path target = target_of(path);
  struct stat info {};
  if (stat(target.c_str(), &info) == 0) {
    if (!S_ISREG(info.st_mode)) {
      fail(path, "cannot be written: exists and is not a regular file");
    }
  } else if (errno != ENOENT) {  // a name that is too long, ...
    fail(path, "cannot be written: ", std::strerror(errno));
  }
  const fs::path folder = folder_of(target);
  if (stat(folder.c_str(), &info) != 0) {
    fail(path, "cannot be written: folder ", printable(folder.string()), ": ",
         std::strerror(errno));
  }
  if (!S_ISDIR(info.st_mode)) {
    fail(path, "cannot be written: ", printable(folder.string()), " is not a folder");
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    fail(path, "cannot be written: folder ", printable(folder.string()), ": ",
         std::strerror(errno));
  }
}

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  check_writable(path);
  target_ = target_of(path).string();
  temporary_ = (folder_of(target_) / ".crisp-XXXXXX").string();
  fd_ = mkstemp(temporary_.data());
  if (fd_ < 0) {
    fail(path_, "cannot be written: no temporary file beside it: ", std::strerror(errno));
  }
  // mkstemp gives 0600; the result gets what a plain create would have given.
  const mode_t mask = umask(0);
  umask(mask);
  fchmod(fd_, 0666 & ~mask);
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  constexpr size_t kMaxChunk = size_t{1} << 30;  // some systems refuse 2 GiB and more at once
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), kMaxChunk));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "cannot be written: ", std::strerror(errno));
    if (written == 0) fail(path_, "cannot be written: the disk took 0 bytes");
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::commit() {
  flush();
  replace();
}

void AtomicFile::commit_all(std::list<AtomicFile>& files) {
  for (AtomicFile& file : files) file.flush();
  for (AtomicFile& file : files) file.replace();
}

// Before the rename, or a crash could leave the new name with no content.
void AtomicFile::flush() {
  if (fsync(fd_) != 0) fail(path_, "cannot be written: ", std::strerror(errno));
}

void AtomicFile::replace() {
  if (rename(temporary_.c_str(), target_.c_str()) != 0) {
    fail(path_, "cannot be replaced: ", std::strerror(errno));
  }
  close(fd_);
  fd_ = -1;
}

}  // namespace crisp::files
