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
constexpr int64_t kSparePages = 2;  // pages of the pool that no segment uses

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
  } else if (key != "device" || value != "cpu") {
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

ConstTensor describe(const Values& values, DType dtype, const Strides& strides,
                     std::byte* storage) {
  return {storage + strides.first * element_bytes(dtype),
          dtype,
          values.tokens,
          values.heads,
          values.dim,
          strides.token,
          strides.head};
}

void write(const Values& values, DType dtype, const Strides& strides, std::byte* storage) {
  for (int64_t token = 0; token < values.tokens; ++token) {
    for (int64_t head = 0; head < values.heads; ++head) {
      const int64_t at = strides.first + token * strides.token + head * strides.head;
      for (int64_t c = 0; c < values.dim; ++c) {
        store(dtype, values.row(token, head)[c], storage + (at + c) * element_bytes(dtype));
      }
    }
  }
}

std::vector<std::byte> nan_bytes(int64_t elements, DType dtype) {
  return std::vector<std::byte>(
      static_cast<size_t>(std::max<int64_t>(elements, 1) * element_bytes(dtype)), std::byte{0xff});
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
         << " threads=" << c.num_threads << " device=cpu seed=" << c.seed;
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

ConstTensor Call::place(const Values& values, const Case& c, std::vector<std::byte>& storage) {
  const Strides strides = strides_of(c.layout, values.tokens, values.heads, values.dim);
  storage = nan_bytes(strides.elements, c.dtype);
  write(values, c.dtype, strides, storage.data());
  return describe(values, c.dtype, strides, storage.data());
}

void Call::pack(const Inputs& inputs) {
  const Values &q = inputs.q, &k = inputs.k;
  const DType dtype = inputs.config.dtype;
  const int64_t row = (q.heads + 2 * k.heads) * q.dim;
  q_ = nan_bytes(std::max(q.tokens, k.tokens) * row, dtype);
  ConstTensor* tensors[] = {&attention.q, &attention.k, &attention.v};
  const Values* values[] = {&inputs.q, &inputs.k, &inputs.v};
  Strides strides{row, q.dim, 0, 0};
  for (int i = 0; i < 3; ++i) {
    write(*values[i], dtype, strides, q_.data());
    *tensors[i] = describe(*values[i], dtype, strides, q_.data());
    strides.first += values[i]->heads * q.dim;
  }
}

// Segment s owns row num_segments - 1 - s of the table. A row starts with the padding, and the
// pages of all rows lie shuffled in the pool, among spare ones. Entries past a row's end are
// garbage.
void Call::make_pages(const Inputs& inputs) {
  const Case& c = inputs.config;
  const auto pages = [&](int64_t kv_len) {
    return (c.padding + kv_len + c.page_size - 1) / c.page_size;
  };
  for (const Segment& segment : inputs.segments) {
    pages_per_row_ = std::max(pages_per_row_, pages(segment.kv_len) + 1);
    num_pages_ += pages(segment.kv_len);
  }
  num_pages_ += kSparePages;
  std::vector<int32_t> order(static_cast<size_t>(num_pages_));
  std::iota(order.begin(), order.end(), 0);
  Random random(c.seed + 99);
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
  const int64_t rows = static_cast<int64_t>(inputs.segments.size());
  block_table_.assign(static_cast<size_t>(rows * pages_per_row_), INT32_MIN);
  size_t next = 0;
  for (int64_t s = 0; s < rows; ++s) {
    Segment& segment = segments_[static_cast<size_t>(s)];
    segment.page_row = rows - 1 - s;
    segment.kv_start = c.padding;
    for (int64_t page = 0; page < pages(segment.kv_len); ++page) {
      block_table_[static_cast<size_t>(segment.page_row * pages_per_row_ + page)] = order[next++];
    }
  }
  attention.pages = {block_table_.data(), rows, pages_per_row_, c.page_size};
}

ConstTensor Call::place_in_pages(const Values& values, const Inputs& inputs,
                                 std::vector<std::byte>& storage) const {
  const Case& c = inputs.config;
  const Strides page = strides_of(c.layout, c.page_size, values.heads, values.dim);
  const int64_t page_stride = page.elements + (c.layout == Layout::kOddStrides ? 7 : 0);
  storage = nan_bytes((num_pages_ - 1) * page_stride + page.elements, c.dtype);
  for (size_t s = 0; s < segments_.size(); ++s) {
    const Segment &logical = inputs.segments[s], &paged = segments_[s];
    for (int64_t token = 0; token < logical.kv_len; ++token) {
      const int64_t at = paged.kv_start + token;
      const int64_t entry = paged.page_row * pages_per_row_ + at / c.page_size;
      for (int64_t head = 0; head < values.heads; ++head) {
        const int64_t element = page.first +
                                block_table_[static_cast<size_t>(entry)] * page_stride +
                                at % c.page_size * page.token + head * page.head;
        for (int64_t i = 0; i < values.dim; ++i) {
          store(c.dtype, values.row(logical.kv_start + token, head)[i],
                storage.data() + (element + i) * element_bytes(c.dtype));
        }
      }
    }
  }
  ConstTensor tensor = describe(values, c.dtype, page, storage.data());
  tensor.num_tokens = num_pages_ * c.page_size;
  tensor.page_stride = page_stride;
  return tensor;
}

Call::Call(const Inputs& inputs) : segments_(inputs.segments) {
  const Case& c = inputs.config;
  const bool is_packed = c.layout == Layout::kPackedQkv && c.page_size == 0;
  if (c.page_size > 0) make_pages(inputs);
  if (is_packed) {
    pack(inputs);
  } else {
    attention.q = place(inputs.q, c, q_);
    attention.k = c.page_size > 0 ? place_in_pages(inputs.k, inputs, k_) : place(inputs.k, c, k_);
    attention.v = c.page_size > 0 ? place_in_pages(inputs.v, inputs, v_) : place(inputs.v, c, v_);
  }
  attention.softmax_scale = inputs.softmax_scale;
  attention.causal = c.causal;
  // One segment over everything is also what an empty list means.
  const bool is_whole = segments_.size() == 1 && c.padding == 0 && c.page_size == 0;
  if (!is_whole) attention.segments = segments_;
}

}  // namespace crisp::test
