#include "case.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <ostream>
#include <sstream>
#include <stdexcept>

namespace crisp::test {
namespace {

constexpr std::array<const char*, 4> kLayoutNames{"contiguous", "head-major", "packed-qkv",
                                                  "odd-strides"};
constexpr std::array<DType, 3> kDTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

[[noreturn]] void refuse(const std::string& word) {
  throw std::invalid_argument("CRISP_CASE: unknown word '" + word + "'");
}

void print_policy(std::ostream& stream, const Policy& policy) {
  if (const auto* crisp = std::get_if<Crisp>(&policy)) {
    stream << " policy=crisp tau=" << crisp->tau_proxy << " alpha=" << crisp->alpha
           << " gamma=" << crisp->gamma << " min_budget=" << crisp->min_budget_tokens
           << " dense_below=" << crisp->dense_below_tokens;
  } else if (const auto* flex = std::get_if<FlexPrefill>(&policy)) {
    stream << " policy=flexprefill tau=" << flex->tau << " gamma=" << flex->gamma
           << " min_budget=" << flex->min_budget_tokens
           << " dense_below=" << flex->dense_below_tokens;
  }
}

void parse_policy_word(Policy& policy, const std::string& key, const std::string& value) {
  if (key == "policy") {
    if (value == "crisp") {
      policy = Crisp{};
    } else if (value == "flexprefill") {
      policy = FlexPrefill{};
    } else {
      refuse(key + "=" + value);
    }
    return;
  }
  const auto set = [&](auto& p, float& tau) {
    if (key == "tau") {
      tau = std::stof(value);
    } else if (key == "gamma") {
      p.gamma = std::stof(value);
    } else if (key == "min_budget") {
      p.min_budget_tokens = std::stoi(value);
    } else if (key == "dense_below") {
      p.dense_below_tokens = std::stoi(value);
    } else {
      refuse(key);
    }
  };
  if (auto* crisp = std::get_if<Crisp>(&policy)) {
    if (key == "alpha") {
      crisp->alpha = std::stof(value);
    } else {
      set(*crisp, crisp->tau_proxy);
    }
  } else if (auto* flex = std::get_if<FlexPrefill>(&policy)) {
    set(*flex, flex->tau);
  } else {
    refuse(key);
  }
}

std::vector<Lengths> parse_segments(const std::string& text) {
  std::vector<Lengths> segments;
  std::istringstream stream(text);
  for (std::string pair; std::getline(stream, pair, ',');) {
    const size_t colon = pair.find(':');
    if (colon == std::string::npos) refuse("segments=" + text);
    segments.push_back({std::stoll(pair), std::stoll(pair.substr(colon + 1))});
  }
  return segments;
}

void parse_word(Case& c, const std::string& key, const std::string& value) {
  const auto is_name = [&](const char* name) { return value == name; };
  if (key == "hq") {
    c.num_q_heads = std::stoll(value);
  } else if (key == "hkv") {
    c.num_kv_heads = std::stoll(value);
  } else if (key == "d") {
    c.head_dim = std::stoll(value);
  } else if (key == "segments") {
    c.segments = parse_segments(value);
  } else if (key == "padding") {
    c.padding = std::stoll(value);
  } else if (key == "dtype") {
    const auto dtype =
        std::find_if(kDTypes.begin(), kDTypes.end(), [&](DType d) { return is_name(name(d)); });
    if (dtype == kDTypes.end()) refuse(key + "=" + value);
    c.dtype = *dtype;
  } else if (key == "layout") {
    const auto layout = std::find_if(kLayoutNames.begin(), kLayoutNames.end(), is_name);
    if (layout == kLayoutNames.end()) refuse(key + "=" + value);
    c.layout = static_cast<Layout>(layout - kLayoutNames.begin());
  } else if (key == "page") {
    c.page_size = std::stoll(value);
  } else if (key == "causal") {
    c.causal = value != "0";
  } else if (key == "block") {
    c.block_size = std::stoll(value);
  } else if (key == "density") {
    c.density = std::stof(value);
  } else if (key == "threads") {
    c.num_threads = std::stoi(value);
  } else if (key == "seed") {
    c.seed = std::stoull(value);
  } else if (key == "device") {
    if (value != "cpu" && value != "cuda" && value != "cuda-sm80") refuse(key + "=" + value);
    c.device = value == "cpu" ? Device::kCpu : Device::kCuda;
    c.only_sm80 = value == "cuda-sm80";
  } else {
    parse_policy_word(c.policy, key, value);
  }
}

// Rows [begin, end) of `heads`, in that order.
Values take(const Values& from, int64_t begin, int64_t end, const std::vector<int64_t>& heads) {
  Values taken(end - begin, static_cast<int64_t>(heads.size()), from.dim);
  for (int64_t token = begin; token < end; ++token) {
    for (size_t h = 0; h < heads.size(); ++h) {
      std::copy_n(from.row(token, heads[h]), from.dim,
                  taken.row(token - begin, static_cast<int64_t>(h)));
    }
  }
  return taken;
}

std::vector<int64_t> all_heads(const Values& values) {
  std::vector<int64_t> heads(static_cast<size_t>(values.heads));
  std::iota(heads.begin(), heads.end(), int64_t{0});
  return heads;
}

void erase_rows(Values& values, int64_t begin, int64_t end) {
  std::fill(values.row(begin, 0), values.row(end, 0), std::numeric_limits<float>::quiet_NaN());
}

// Rows that belong to no segment become NaN: read, they would show.
void erase_padding(Inputs& inputs) {
  int64_t q_end = 0, kv_end = 0;
  for (const Segment& segment : inputs.segments) {
    erase_rows(inputs.q, q_end, segment.q_start);
    for (Values* values : {&inputs.k, &inputs.v}) erase_rows(*values, kv_end, segment.kv_start);
    q_end = segment.q_start + segment.q_len;
    kv_end = segment.kv_start + segment.kv_len;
  }
  erase_rows(inputs.q, q_end, inputs.q.tokens);
  for (Values* values : {&inputs.k, &inputs.v}) erase_rows(*values, kv_end, values->tokens);
}

reference::Matrix matrix(const Values& values, int64_t begin, int64_t rows, int64_t head) {
  reference::Matrix result(rows, values.dim);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < values.dim; ++c) result(r, c) = values.row(begin + r, head)[c];
  }
  return result;
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, const Case& c) {
  stream << "hq=" << c.num_q_heads << " hkv=" << c.num_kv_heads << " d=" << c.head_dim
         << " segments=";
  for (size_t i = 0; i < c.segments.size(); ++i) {
    stream << (i ? "," : "") << c.segments[i].q_len << ':' << c.segments[i].kv_len;
  }
  stream << " padding=" << c.padding << " dtype=" << name(c.dtype)
         << " layout=" << kLayoutNames[static_cast<size_t>(c.layout)] << " page=" << c.page_size
         << " causal=" << c.causal << " block=" << c.block_size << " density=" << c.density
         << " threads=" << c.num_threads << " device="
         << (c.device == Device::kCpu ? "cpu"
             : c.only_sm80            ? "cuda-sm80"
                                      : "cuda")
         << " seed=" << c.seed;
  print_policy(stream, c.policy);
  return stream;
}

Case parse_case(const std::string& text) {
  Case c;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) refuse(word);
    parse_word(c, word.substr(0, equals), word.substr(equals + 1));
  }
  return c;
}

Inputs make_inputs(const Case& c) {
  Inputs inputs;
  inputs.config = c;
  int64_t q_tokens = c.padding, kv_tokens = c.padding;
  for (const Lengths& lengths : c.segments) {
    inputs.segments.push_back({q_tokens, lengths.q_len, kv_tokens, lengths.kv_len, 0});
    q_tokens += lengths.q_len + c.padding;
    kv_tokens += lengths.kv_len + c.padding;
  }
  inputs.q = normal_values(q_tokens, c.num_q_heads, c.head_dim, c.seed * 3);
  inputs.k = normal_values(kv_tokens, c.num_kv_heads, c.head_dim, c.seed * 3 + 1);
  inputs.v = normal_values(kv_tokens, c.num_kv_heads, c.head_dim, c.seed * 3 + 2);
  for (Values* values : {&inputs.q, &inputs.k, &inputs.v}) values->round(c.dtype);
  erase_padding(inputs);
  inputs.softmax_scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  return inputs;
}

Inputs slice(const Inputs& inputs, int64_t index, Lengths begin, Lengths end) {
  const Segment& from = inputs.segments[static_cast<size_t>(index)];
  Inputs part;
  part.config = inputs.config;
  part.config.segments = {{end.q_len - begin.q_len, end.kv_len - begin.kv_len}};
  part.config.padding = part.config.page_size = 0;
  part.segments = {{0, end.q_len - begin.q_len, 0, end.kv_len - begin.kv_len, 0}};
  part.q =
      take(inputs.q, from.q_start + begin.q_len, from.q_start + end.q_len, all_heads(inputs.q));
  part.k =
      take(inputs.k, from.kv_start + begin.kv_len, from.kv_start + end.kv_len, all_heads(inputs.k));
  part.v =
      take(inputs.v, from.kv_start + begin.kv_len, from.kv_start + end.kv_len, all_heads(inputs.v));
  part.softmax_scale = inputs.softmax_scale;
  return part;
}

Inputs take_heads(const Inputs& inputs, const std::vector<int64_t>& q_heads,
                  const std::vector<int64_t>& kv_heads) {
  Inputs taken = inputs;
  taken.config.num_q_heads = static_cast<int64_t>(q_heads.size());
  taken.config.num_kv_heads = static_cast<int64_t>(kv_heads.size());
  taken.q = take(inputs.q, 0, inputs.q.tokens, q_heads);
  taken.k = take(inputs.k, 0, inputs.k.tokens, kv_heads);
  taken.v = take(inputs.v, 0, inputs.v.tokens, kv_heads);
  return taken;
}

reference::Head reference_head(const Inputs& inputs, const Segment& segment, int64_t q_head) {
  const int64_t kv_head = q_head / (inputs.q.heads / inputs.k.heads);
  reference::Head head;
  head.q = matrix(inputs.q, segment.q_start, segment.q_len, q_head);
  head.k = matrix(inputs.k, segment.kv_start, segment.kv_len, kv_head);
  head.v = matrix(inputs.v, segment.kv_start, segment.kv_len, kv_head);
  head.softmax_scale = inputs.softmax_scale;
  head.causal = inputs.config.causal;
  return head;
}

Strides strides_of(Layout layout, int64_t tokens, int64_t heads, int64_t dim) {
  Strides strides;
  switch (layout) {
    case Layout::kContiguous:
    case Layout::kPackedQkv:
      strides = {heads * dim, dim, 0, 0};
      break;
    case Layout::kHeadMajor:
      strides = {dim, tokens * dim, 0, 0};
      break;
    case Layout::kOddStrides:
      strides = {heads * (dim + 3) + 5, dim + 3, 1, 0};
      break;
  }
  if (tokens > 0 && heads > 0) {
    strides.elements =
        strides.first + (tokens - 1) * strides.token + (heads - 1) * strides.head + dim;
  }
  return strides;
}

}  // namespace crisp::test
