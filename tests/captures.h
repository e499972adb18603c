// captures.h - the captured heads of data/ and the figures of data/expected.json.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "reference/types.h"

namespace crisp::reference {

// The q, k, v of one captured layer or kv group, decoded.
class Capture {
 public:
  // `file` is a name under data/.
  explicit Capture(const std::string& file) {
    std::ifstream in(std::string(CRISP_DATA_DIR "/") + file, std::ios::binary);
    if (!in) throw std::runtime_error("cannot open data/" + file);
    uint64_t header_bytes = 0;
    in.read(reinterpret_cast<char*>(&header_bytes), 8);
    std::string header(header_bytes, '\0');
    in.read(header.data(), static_cast<std::streamsize>(header_bytes));
    header_ = nlohmann::json::parse(header);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
    scale_ = std::stod(header_.at("__metadata__").at("scale").get<std::string>());
  }

  int64_t num_q_heads() const { return size("q", 0); }
  int64_t num_kv_heads() const { return size("k", 0); }

  Head head(int64_t q_head) const {
    const int64_t kv_head = q_head / (num_q_heads() / num_kv_heads());
    return {decode("q", q_head), decode("k", kv_head), decode("v", kv_head), scale_, true};
  }

 private:
  int64_t size(const char* tensor, size_t axis) const {
    return header_.at(tensor).at("shape").at(axis).get<int64_t>();
  }

  // One head of a bfloat16 tensor [heads, tokens, head_dim].
  Matrix decode(const char* tensor, int64_t head) const {
    Matrix matrix(size(tensor, 1), size(tensor, 2));
    const size_t first = header_.at(tensor).at("data_offsets").at(0).get<size_t>() +
                         2 * static_cast<size_t>(head) * matrix.values.size();
    for (size_t e = 0; e < matrix.values.size(); ++e) {
      uint16_t upper = 0;
      std::memcpy(&upper, bytes_.data() + first + 2 * e, 2);
      const uint32_t bits = static_cast<uint32_t>(upper) << 16;
      float value = 0;
      std::memcpy(&value, &bits, 4);
      matrix.values[e] = static_cast<double>(value);
    }
    return matrix;
  }

  nlohmann::json header_;
  std::vector<char> bytes_;
  double scale_ = 0;
};

// data/expected.json, keyed by capture file.
inline nlohmann::json expected_figures() {
  std::ifstream in(CRISP_DATA_DIR "/expected.json");
  return nlohmann::json::parse(in);
}

}  // namespace crisp::reference
