// header_reader.h - the JSON header of a safetensors file, read event by event: no tree is built,
// so a hostile header of the largest size costs memory only for what is kept, and duplicate keys,
// which a tree would hide, are seen.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace crisp::files {

struct HeaderEntry {
  std::string dtype;
  std::vector<uint64_t> shape, data_offsets;
};

struct Header {
  std::map<std::string, HeaderEntry, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;
};

// Throws FileError unless `json` is {name: {"dtype": string, "shape": [counts], "data_offsets":
// [begin, end]}, ..., "__metadata__": {string: string}}, the last one optional.
Header read_header(std::string_view json, std::string_view file);

}  // namespace crisp::files
