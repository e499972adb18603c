#include "reference/proxy.h"

#include <algorithm>
#include <cmath>

#include "reference/pooled.h"

namespace crisp::reference {
namespace {

// x rounded to the nearest bfloat16 (8 significant bits, ties to even).
double round_to_bf16(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent = 0;
  std::frexp(x, &exponent);                           // |x| in [2^(e-1), 2^e)
  const int last_bit = std::max(exponent - 8, -133);  // subnormals below 2^-126
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -last_bit)), last_bit);
  return std::abs(rounded) < std::ldexp(1.0, 128) ? rounded : std::copysign(INFINITY, x);
}

// p ln(p / m) with 0 log 0 = 0, or as IEEE evaluates it.
double relative_entropy_term(double p, double m, bool nan_on_zero) {
  if (p == 0 && !nan_on_zero) return 0;
  return p * std::log(p / m);
}

}  // namespace

ProxyMap proxy_map(const Head& head, int64_t sink_tokens, int64_t recency_tokens,
                   bool bf16_logits) {
  ProxyMap proxy;
  proxy.map = proxy_rows(head, bf16_logits);
  proxy.a_v = column_mass(proxy.map);
  proxy.a_s = offset_mass(proxy.map);
  proxy.p_v = block_sums(proxy.a_v);
  proxy.p_s = block_sums(proxy.a_s);
  proxy.structural_mass = structural_mass(proxy.a_v, sink_tokens, recency_tokens);
  return proxy;
}

Matrix proxy_rows(const Head& head, bool bf16_logits) {
  const int64_t b = std::min(kProxyRows, head.q_len());
  Matrix map(b, head.kv_len());
  std::vector<double> query(static_cast<size_t>(head.q.cols));
  for (int64_t i = 0; i < b; ++i) {
    const int64_t row = head.q_len() - b + i;
    const int64_t position = head.first_position() + row;
    for (int64_t c = 0; c < head.q.cols; ++c) {
      const double x = head.q(row, c) * head.softmax_scale;
      query[static_cast<size_t>(c)] = bf16_logits ? round_to_bf16(x) : x;
    }
    std::vector<double> logits(static_cast<size_t>(head.kv_len()), -INFINITY);
    for (int64_t j = 0; j <= position; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < head.q.cols; ++c) dot += query[static_cast<size_t>(c)] * head.k(j, c);
      logits[static_cast<size_t>(j)] = bf16_logits ? round_to_bf16(dot) : dot;
    }
    const std::vector<double> weights = softmax(logits);
    // A key behind the diagonal has weight 0 even when the row is NaN.
    for (int64_t j = 0; j <= position; ++j) map(i, j) = weights[static_cast<size_t>(j)];
  }
  return map;
}

std::vector<double> column_mass(const Matrix& map) {
  std::vector<double> a_v(static_cast<size_t>(map.cols), 0.0);
  for (int64_t j = 0; j < map.cols; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < map.rows; ++i) sum += map(i, j);
    a_v[static_cast<size_t>(j)] = sum / static_cast<double>(map.rows);
  }
  return a_v;
}

std::vector<double> offset_mass(const Matrix& map) {
  std::vector<double> a_s(static_cast<size_t>(map.cols), 0.0);
  for (int64_t o = 0; o < map.cols; ++o) {
    double sum = 0;
    for (int64_t i = 0; i < map.rows; ++i) {
      const int64_t position = map.cols - map.rows + i;
      if (position >= o) sum += map(i, position - o);
    }
    a_s[static_cast<size_t>(o)] = sum / static_cast<double>(map.rows);
  }
  return a_s;
}

std::vector<double> block_sums(const std::vector<double>& token_mass) {
  const int64_t n = static_cast<int64_t>(token_mass.size());
  std::vector<double> sums(static_cast<size_t>(ceil_div(n, kBlockSize)), 0.0);
  for (int64_t t = 0; t < n; ++t) {
    sums[static_cast<size_t>(t / kBlockSize)] += token_mass[static_cast<size_t>(t)];
  }
  return sums;
}

std::vector<double> left_aligned_slash_sums(const std::vector<double>& a_s) {
  const int64_t n = static_cast<int64_t>(a_s.size());
  const int64_t num_blocks = ceil_div(n, kBlockSize);
  std::vector<double> sums(static_cast<size_t>(num_blocks), 0.0);
  for (int64_t o = 0; o < n; ++o) {
    const int64_t t = n - 1 - o;
    sums[static_cast<size_t>(num_blocks - 1 - t / kBlockSize)] += a_s[static_cast<size_t>(o)];
  }
  return sums;
}

double structural_mass(const std::vector<double>& a_v, int64_t sink_tokens,
                       int64_t recency_tokens) {
  const int64_t n = static_cast<int64_t>(a_v.size());
  double mass = 0;
  for (int64_t j = 0; j < n; ++j) {
    if (j < sink_tokens || j >= n - recency_tokens) mass += a_v[static_cast<size_t>(j)];
  }
  return mass;
}

std::vector<double> pooled_estimate(const Head& head) {
  const int64_t b = std::min(kProxyRows, head.q_len());
  std::vector<double> mean_query(static_cast<size_t>(head.q.cols), 0.0);
  for (int64_t c = 0; c < head.q.cols; ++c) {
    double sum = 0;
    for (int64_t i = 0; i < b; ++i) sum += head.q(head.q_len() - b + i, c);
    mean_query[static_cast<size_t>(c)] = sum / static_cast<double>(b);
  }
  const Matrix mean_keys = block_means(head.k, /*first_position=*/0);
  std::vector<double> logits(static_cast<size_t>(mean_keys.rows));
  for (int64_t j = 0; j < mean_keys.rows; ++j) {
    double dot = 0;
    for (int64_t c = 0; c < head.q.cols; ++c) {
      dot += mean_query[static_cast<size_t>(c)] * mean_keys(j, c);
    }
    logits[static_cast<size_t>(j)] = dot * head.softmax_scale;
  }
  return softmax(logits);
}

double js_distance(const std::vector<double>& p, const std::vector<double>& q, bool nan_on_zero) {
  double divergence = 0;
  for (size_t j = 0; j < p.size(); ++j) {
    const double pj = nan_on_zero ? static_cast<double>(static_cast<float>(p[j])) : p[j];
    const double qj = nan_on_zero ? static_cast<double>(static_cast<float>(q[j])) : q[j];
    const double m = (pj + qj) / 2;
    divergence += 0.5 * relative_entropy_term(pj, m, nan_on_zero);
    divergence += 0.5 * relative_entropy_term(qj, m, nan_on_zero);
  }
  // Rounding may leave equal distributions a hair below 0; a NaN stays a NaN.
  return divergence < 0 ? 0 : std::sqrt(divergence);
}

}  // namespace crisp::reference
