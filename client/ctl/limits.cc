#include "client/ctl/limits.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

namespace pqcached::ctl {
namespace {

struct Limit {
  std::string_view name;
  const char* field;  // of TenantLimits in the proto
};
constexpr std::array kLimits = {
    Limit{"sessions", "sessions"},     Limit{"caches", "caches"},
    Limit{"staging", "staging_bytes"}, Limit{"builds", "builds"},
    Limit{"calls", "calls"},           Limit{"weight", "weight"},
    Limit{"pool", "pool_bytes"},       Limit{"guaranteed", "guaranteed_bytes"},
};

struct Unit {
  std::string_view name;
  uint32_t shift;
};
constexpr std::array kUnits = {Unit{"kib", 10}, Unit{"mib", 20}, Unit{"gib", 30}, Unit{"tib", 40}};

// Returns 0 when the text is no number above 0.
uint64_t NumberOf(std::string_view text) {
  uint32_t shift = 0;
  for (const Unit& unit : kUnits) {
    if (!text.ends_with(unit.name)) continue;
    text.remove_suffix(unit.name.size());
    shift = unit.shift;
    break;
  }
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return 0;
  return number > std::numeric_limits<uint64_t>::max() >> shift ? 0 : number << shift;
}

const char* FieldOf(std::string_view name) {
  for (const Limit& limit : kLimits) {
    if (limit.name == name) return limit.field;
  }
  return nullptr;
}

}  // namespace

Result<Json> ParseLimits(const std::vector<std::string>& texts) {
  if (texts.empty()) return Status(PQC_INVALID_ARGUMENT, "limits: none, for example sessions=20");
  Json limits = Json::object();
  for (const std::string& text : texts) {
    const size_t equals = text.find('=');
    const char* const field = FieldOf(std::string_view(text).substr(0, equals));
    const uint64_t number =
        equals == std::string::npos ? 0 : NumberOf(std::string_view(text).substr(equals + 1));
    if (field == nullptr || number == 0) {
      return Status(PQC_INVALID_ARGUMENT,
                    "limits: '" + text +
                        "' must be LIMIT=N with a limit of sessions, caches, staging, builds, "
                        "calls, weight, pool or guaranteed, and a number above 0");
    }
    limits[field] = std::to_string(number);
  }
  return limits;
}

}  // namespace pqcached::ctl
