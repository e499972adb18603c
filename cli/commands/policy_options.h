// policy_options.h - the policy flags every command shares, and policies as text and JSON.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/dtype.h"  // name(DType)
#include "crisp/crisp.h"

namespace crisp::cli {

enum class PolicyKind : uint8_t { kDense, kCrisp, kFlexPrefill, kMask };
const char* name(PolicyKind kind);  // as typed after --policy
PolicyKind kind_of(const Policy& policy);

// What the flags say. Ranges are checked by the library, which names field, value and range.
struct PolicyOptions {
  PolicyKind kind = PolicyKind::kCrisp;
  Crisp crisp;
  FlexPrefill flex_prefill;
  std::string mask_file;  // --mask

  // Adds --policy and its flags. `with_mask`: also --policy mask and --mask.
  void add_to(CLI::App& command, bool with_mask);
  // After parsing: carries shared flags over, and refuses (UsageError) a flag that none of the
  // policies `used` reads, so that nothing typed is ignored in silence.
  void finish(const std::vector<PolicyKind>& used);
  // kMask is not made here: its words come from a file. A gate that was measured on the device of
  // `context` takes the place of the default one, but not of a typed one.
  Policy policy(PolicyKind wanted, const Context& context = {}) const;
  // Where the gate of such a policy comes from: "typed", "measured" or "default"; nullptr: it has
  // none.
  const char* gate_source(PolicyKind wanted, const Context& context) const;

 private:
  void add_variants(CLI::App& command);
  struct Flag {
    CLI::Option* option;
    std::vector<PolicyKind> readers;
  };
  void add(CLI::Option* option, std::vector<PolicyKind> readers);
  std::vector<Flag> flags_;
  const CLI::Option* dense_below_ = nullptr;
  bool no_pooled_budget_ = false;
};

// Tokens below which the policy keeps every block; 0 for dense and a user mask.
int32_t gate_of(const Policy& policy);

// {"alpha": 1.0, ...} of the policy; {} for Dense; {"file": mask_file} for a user mask.
nlohmann::ordered_json parameters_json(const Policy& policy, const std::string& mask_file);

// A float as the shortest decimal that reads back to it (0.2, not 0.20000000298); null if it is not
// finite.
nlohmann::ordered_json json_number(float value);
nlohmann::ordered_json json_number(double value);

// --dtype float32|float16|bfloat16; dtype_from reads one and throws UsageError on any other word.
void add_dtype_option(CLI::App& command, std::string& dtype);
DType dtype_from(const std::string& text);
const char* name(Pattern pattern);  // "vertical_slash"

}  // namespace crisp::cli
