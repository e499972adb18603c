// tensor_files.h - what the tests of readers and writers share: a folder of their own, files put
// together byte by byte, and the message of a refusal.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "files/error.h"
#include "files/npy.h"
#include "files/safetensors.h"

namespace crisp::files {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// A folder of the test's own, removed with its content.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "crisp-files-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  size_t num_entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(path_), {}));
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline void put(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}
inline std::string get(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

inline std::string safetensors(const std::string& json, size_t data_bytes) {
  const uint64_t length = json.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + json + std::string(data_bytes, '\x01');
}

inline std::string npy(const std::string& dict, size_t data_bytes, char version = 1) {
  std::string out("\x93NUMPY", 6);
  out += {version, '\0'};
  const auto length = static_cast<uint32_t>(dict.size());
  out.append(reinterpret_cast<const char*>(&length), version == 1 ? 2 : 4);
  return out + dict + std::string(data_bytes, '\x01');
}

template <class Read>
std::string message_of(Read read) {
  try {
    read();
  } catch (const FileError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline std::string refusal(const std::string& content) {
  return message_of(
      [&] { parse_safetensors(std::as_bytes(std::span(content)), "file.safetensors"); });
}
inline std::string npy_refusal(const std::string& content) {
  return message_of([&] { parse_npy(std::as_bytes(std::span(content)), "file.npy"); });
}

}  // namespace crisp::files
