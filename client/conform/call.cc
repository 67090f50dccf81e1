#include "client/conform/call.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

namespace pqcached::conform {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxLineBytes = size_t{1} << 20;
constexpr std::array<std::string_view, 10> kHandleKeys = {
    "client", "cache", "sequence", "parent",    "child",
    "step",   "gpu",   "decoder",  "operation", "events"};
// Keys that are not arguments.
constexpr std::array<std::string_view, 11> kFrameKeys = {
    "pid",      "forked_from", "record", "thread", "begin",   "end",
    "begin_us", "end_us",      "status", "field",  "retry_ms"};
// Results, which a repetition need not have.
constexpr std::array<std::string_view, 4> kResultKeys = {"child", "reordered", "done", "call"};

// The first thing that is wrong with a line.
struct Wrong {
  std::string text;
};

[[noreturn]] void Refuse(std::string_view key, std::string_view must) {
  throw Wrong{"\"" + std::string(key) + "\" must be " + std::string(must)};
}

bool Contains(const auto& keys, std::string_view key) {
  return std::ranges::find(keys, key) != keys.end();
}

uint64_t ToNumber(std::string_view key, const Json& value) {
  if (!value.is_number_unsigned()) Refuse(key, "a whole number below 2^64");
  return value.get<uint64_t>();
}

uint64_t ToAddress(std::string_view key, const Json& value) {
  constexpr std::string_view kWhat = "an address, such as \"0x5581\"";
  if (!value.is_string()) Refuse(key, kWhat);
  const auto& text = value.get_ref<const std::string&>();
  uint64_t address = 0;
  const char* const end = text.data() + text.size();
  if (!text.starts_with("0x")) Refuse(key, kWhat);
  const auto [last, error] = std::from_chars(text.data() + 2, end, address, 16);
  if (error != std::errc() || last != end) Refuse(key, kWhat);
  return address;
}

const Json& Member(const Json& object, std::string_view key) {
  const auto found = object.find(key);
  if (found == object.end()) throw Wrong{"\"" + std::string(key) + "\" is missing"};
  return *found;
}

const Json& ToArray(std::string_view key, const Json& value) {
  if (!value.is_array()) Refuse(key, "an array");
  return value;
}

const Json& ToObject(std::string_view key, const Json& value) {
  if (!value.is_object()) Refuse(key, "an array of objects");
  return value;
}

const std::string& ToText(std::string_view key, const Json& value) {
  if (!value.is_string()) Refuse(key, "a text");
  return value.get_ref<const std::string&>();
}

pqc_status ToStatus(const std::string& name) {
  for (int code = PQC_OK; code <= PQC_UNAUTHENTICATED; ++code) {
    const auto status = static_cast<pqc_status>(code);
    if (name == pqc_status_name(status)) return status;
  }
  return PQC_UNKNOWN;
}

// An array of addresses; the library writes an array of one as the address alone.
std::vector<uint64_t> ToAddresses(std::string_view key, const Json& value) {
  if (value.is_string()) return {ToAddress(key, value)};
  std::vector<uint64_t> addresses;
  for (const Json& each : ToArray(key, value)) addresses.push_back(ToAddress(key, each));
  return addresses;
}

void ReadItems(const Json& value, RecordedCall* call) {
  for (const Json& each : ToArray("items", value)) {
    ToObject("items", each);
    call->items.push_back({.sequence = ToAddress("sequence", Member(each, "sequence")),
                           .position = ToNumber("position", Member(each, "position")),
                           .length = ToNumber("length", Member(each, "length"))});
  }
}

void ReadLayers(const Json& value, RecordedCall* call) {
  for (const Json& each : ToArray("layers", value)) {
    ToObject("layers", each);
    LayerTokens layer{.layer = ToNumber("layer", Member(each, "layer")), .tokens = {}};
    if (each.contains("tokens")) layer.tokens = ToNumber("tokens", each.at("tokens"));
    call->layers.push_back(layer);
  }
}

void ReadArgument(const std::string& key, const Json& value, RecordedCall* call) {
  if (Contains(kHandleKeys, key)) {
    call->handles[key] = ToAddress(key, value);
  } else if (key == "items") {
    ReadItems(value, call);
  } else if (key == "layers") {
    ReadLayers(value, call);
  } else if (key == "sequences") {
    call->sequences = ToAddresses(key, value);
  } else if (key == "reordered") {
    call->reordered = ToAddresses(key, value);
  } else if (value.is_number()) {
    call->numbers[key] = ToNumber(key, value);
  }
}

void ReadEnd(const Json& json, RecordedCall* call) {
  if (!json.contains("end")) return;
  call->end = ToNumber("end", json.at("end"));
  call->end_us = ToNumber("end_us", Member(json, "end_us"));
  if (*call->end <= call->begin) Refuse("end", "above \"begin\"");
  if (call->end_us < call->begin_us) Refuse("end_us", "at least \"begin_us\"");
  call->status = ToStatus(ToText("status", Member(json, "status")));
  if (json.contains("field")) call->field = ToText("field", json.at("field"));
  if (json.contains("retry_ms")) call->retry_ms = ToNumber("retry_ms", json.at("retry_ms"));
}

void ReadObject(const Json& json, RecordedCall* call) {
  call->pid = ToNumber("pid", Member(json, "pid"));
  if (json.contains("forked_from")) {
    call->forked_from = ToNumber("forked_from", json.at("forked_from"));
  }
  if (json.contains("record")) {
    call->format = ToNumber("record", json.at("record"));
    if (*call->format != kFormat) {
      throw Wrong{"it is of version " + std::to_string(*call->format) +
                  " of the record, and this program reads version " + std::to_string(kFormat)};
    }
    return;
  }
  call->name = ToText("call", Member(json, "call"));
  call->thread = ToNumber("thread", Member(json, "thread"));
  call->begin = ToNumber("begin", Member(json, "begin"));
  call->begin_us = ToNumber("begin_us", Member(json, "begin_us"));
  ReadEnd(json, call);
  Json arguments = Json::object();
  for (const auto& [key, value] : json.items()) {
    if (Contains(kFrameKeys, key)) continue;
    if (key != "call") ReadArgument(key, value, call);
    if (!Contains(kResultKeys, key)) arguments[key] = value;
  }
  call->arguments = arguments.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::optional<uint64_t> RecordedCall::Number(std::string_view key) const {
  const auto found = numbers.find(key);
  return found == numbers.end() ? std::nullopt : std::optional(found->second);
}

std::string ReadCall(std::string_view text, RecordedCall* call) {
  if (text.size() > kMaxLineBytes) return "the line is longer than 1 MiB";
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return "it is not JSON";
  if (!json.is_object()) return "it is not a JSON object";
  try {
    ReadObject(json, call);
  } catch (const Wrong& wrong) {
    return wrong.text;
  }
  return "";
}

std::string InLine(const RecordedCall& call) { return "line " + std::to_string(call.line); }

}  // namespace pqcached::conform
