// captures.h - the captured heads of data/ and the figures of data/expected.json.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "crisp/crisp.h"
#include "files/qkv.h"
#include "reference/types.h"

namespace crisp::reference {

// Head `head` of a bfloat16 tensor, in double precision.
inline Matrix to_matrix(const ConstTensor& tensor, int64_t head) {
  if (tensor.dtype != DType::kBFloat16) throw std::runtime_error("captures are bfloat16");
  Matrix matrix(tensor.num_tokens, tensor.head_dim);
  const auto* data = static_cast<const uint16_t*>(tensor.data);
  for (int64_t t = 0; t < matrix.rows; ++t) {
    for (int64_t c = 0; c < matrix.cols; ++c) {
      const uint32_t upper = data[head * tensor.head_stride + t * tensor.token_stride + c];
      matrix(t, c) = static_cast<double>(std::bit_cast<float>(upper << 16));
    }
  }
  return matrix;
}

// A file of data/, or, where tests run on another machine than the one that built them, of
// $CRISP_TEST_DATA.
inline std::string data_file(const std::string& name) {
  const char* moved = std::getenv("CRISP_TEST_DATA");
  return std::string(moved != nullptr ? moved : CRISP_DATA_DIR) + "/" + name;
}

// The q, k, v of one captured layer or kv group.
class Capture {
 public:
  // `file` is a name under data/.
  explicit Capture(const std::string& file)
      : qkv_(files::load_qkv(std::vector<std::string>{data_file(file)})) {}

  int64_t num_q_heads() const { return qkv_.q.num_heads; }

  Head head(int64_t q_head) const {
    const int64_t kv_head = q_head / (qkv_.q.num_heads / qkv_.k.num_heads);
    return {to_matrix(qkv_.q, q_head), to_matrix(qkv_.k, kv_head), to_matrix(qkv_.v, kv_head),
            static_cast<double>(qkv_.softmax_scale), true};
  }

 private:
  files::QkvFile qkv_;
};

// data/expected.json, keyed by capture file.
inline nlohmann::json expected_figures() {
  std::ifstream in(data_file("expected.json"));
  if (!in) throw std::runtime_error("cannot open data/expected.json");
  return nlohmann::json::parse(in);
}

}  // namespace crisp::reference
