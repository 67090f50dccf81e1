#include "kvstore/read/indexes/index_types.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/clusters.h"
#include "kvstore/read/indexes/flat.h"
#include "kvstore/read/indexes/graph.h"
#include "kvstore/read/indexes/pq.h"

namespace pqcached::kvstore {
namespace {

const FlatIndex kFlatIndex;
const PqIndex kPqIndex;
const GraphIndex kGraphIndex;
const ClustersIndex kClustersIndex;

// A new type is registered here.
constexpr size_t kBuiltInTypes = 4;
const IndexType* types[kBuiltInTypes + kMaxPlugins] = {&kPqIndex, &kFlatIndex, &kGraphIndex,
                                                       &kClustersIndex};
IndexDescriptor plugins[kMaxPlugins];  // their names
size_t plugin_count = 0;

Refusal RefuseValue(std::string field, std::string text) {
  return {.code = StatusCode::kInvalidArgument, .field = std::move(field), .text = std::move(text)};
}

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  quoted.append(text);
  quoted += '"';
  return quoted;
}

std::string NamesOf(std::span<const IndexParameter> parameters) {
  std::string names;
  for (const IndexParameter& parameter : parameters) {
    names += (names.empty() ? "" : ", ") + std::string(parameter.name);
  }
  return names.empty() ? "none" : names;
}

bool IsNamed(const IndexParameter& parameter, size_t number, std::string_view name) {
  if (name.starts_with('#')) return name.substr(1) == std::to_string(number);
  return parameter.name == name;
}

// Returns whether an argument sets no parameter, as far as a sender knows that has no description.
bool IsUnused(const IndexArgument& argument) {
  return argument.name.starts_with('#') && argument.number == 0 && !argument.value_name.has_value();
}

// Finds the value of an argument, or refuses it.
Refusal ReadValue(const IndexParameter& parameter, const IndexArgument& argument,
                  const std::string& field, uint32_t* value) {
  const auto refuse = [&](std::string given) {
    return RefuseValue(field, std::move(given) + ", must " + ValuesOf(parameter));
  };
  if (argument.value_name.has_value()) {
    const auto found =
        std::find(parameter.names.begin(), parameter.names.end(), *argument.value_name);
    if (found == parameter.names.end()) {
      return refuse(Quoted(*argument.value_name));
    }
    *value = static_cast<uint32_t>(found - parameter.names.begin());
    return {};
  }
  if (!parameter.names.empty()) return refuse("a number");
  *value = static_cast<uint32_t>(argument.number);
  if (*value == argument.number && Allows(parameter, *value)) return {};
  return refuse(std::to_string(argument.number));
}

}  // namespace

std::span<const IndexType* const> IndexTypes() { return {types, kBuiltInTypes + plugin_count}; }

void SetPluginTypes(std::span<const IndexType* const> plugin_types) {
  PQC_CHECK(plugin_types.size() <= kMaxPlugins);
  plugin_count = 0;
  for (const IndexType* type : plugin_types) {
    plugins[plugin_count] = PluginIndexOf(type->info().name);
    types[kBuiltInTypes + plugin_count++] = type;
  }
}

const IndexType* FindIndexType(const IndexDescriptor& index) {
  switch (index.kind) {
    case IndexKind::kFlat:
      return &kFlatIndex;
    case IndexKind::kPq:
      return &kPqIndex;
    case IndexKind::kGraph:
      return &kGraphIndex;
    case IndexKind::kClusters:
      return &kClustersIndex;
  }
  for (size_t i = 0; i < plugin_count; ++i) {
    if (IsSamePlugin(plugins[i], index)) return types[kBuiltInTypes + i];
  }
  return nullptr;
}

const IndexType* FindIndexType(std::string_view name) {
  for (const IndexType* type : IndexTypes()) {
    if (type->info().name == name) return type;
  }
  return nullptr;
}

const IndexType& TypeOf(const IndexDescriptor& index) {
  const IndexType* const type = FindIndexType(index);
  PQC_CHECK(type != nullptr);
  return *type;
}

bool IsBuilt(const IndexDescriptor& index) {
  const IndexType* const type = FindIndexType(index);
  return type != nullptr && type->built() != nullptr;
}

const BuiltIndexType& BuiltTypeOf(const IndexDescriptor& index) {
  const BuiltIndexType* const type = TypeOf(index).built();
  PQC_CHECK(type != nullptr);
  return *type;
}

bool NeedsBuild(const IndexDescriptor& index) {
  const IndexType* const type = FindIndexType(index);
  return type != nullptr ? type->built() != nullptr : IsPlugin(index);
}

std::string_view WhyNotBuilt(const IndexType& type) {
  return type.info().switched_off.empty() ? "needs no build" : type.info().switched_off;
}

IndexDescriptor DefaultIndex(const IndexType& type) {
  IndexDescriptor index{.kind = type.info().kind};
  if (IsPlugin(index)) index = PluginIndexOf(type.info().name);
  const std::span<const IndexParameter> parameters = type.info().parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    type.SetValue(&index, i, parameters[i].default_value);
  }
  return index;
}

Refusal MakeIndex(std::string_view type_name, std::span<const IndexArgument> arguments,
                  std::string_view field, IndexDescriptor* index) {
  const IndexType* const type = FindIndexType(type_name);
  if (type == nullptr) {
    return RefuseValue(JoinFields(field, "type"), Quoted(type_name) + ", no such index type");
  }
  *index = DefaultIndex(*type);
  const std::span<const IndexParameter> parameters = type->info().parameters;
  std::vector<bool> given(parameters.size());
  for (const IndexArgument& argument : arguments) {
    const std::string path = JoinFields(field, "parameters[" + std::string(argument.name) + "]");
    size_t i = 0;
    while (i < parameters.size() && !IsNamed(parameters[i], i, argument.name)) ++i;
    if (i == parameters.size() && IsUnused(argument)) continue;
    if (i == parameters.size()) {
      return RefuseValue(path, "no parameter of " + std::string(type_name) +
                                   ", which has: " + NamesOf(parameters));
    }
    if (given[i]) return RefuseValue(path, "given twice");
    given[i] = true;
    uint32_t value = 0;
    RETURN_IF_ERROR(ReadValue(parameters[i], argument, path, &value));
    type->SetValue(index, i, value);
  }
  return {};
}

std::string NameOf(const IndexDescriptor& index) {
  const IndexType* const type = FindIndexType(index);
  if (type == nullptr && IsPlugin(index)) return PluginNameOf(index);
  return TypeOf(index).NameOf(index);
}

bool HasAllowedValues(const IndexType& type, const IndexDescriptor& index) {
  const std::span<const IndexParameter> parameters = type.info().parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!Allows(parameters[i], type.ValueOf(index, i))) return false;
  }
  return true;
}

bool Allows(const IndexParameter& parameter, uint32_t value) {
  return value >= parameter.least && value <= parameter.most &&
         (!parameter.power_of_two || (value & (value - 1)) == 0);
}

std::string ValuesOf(const IndexParameter& parameter) {
  std::string text;
  if (!parameter.names.empty()) {
    for (size_t i = 0; i < parameter.names.size(); ++i) {
      text += (i == 0 ? "be " : " or ") + std::to_string(i);
      text += " (" + std::string(parameter.names[i]) + ")";
    }
    return text;
  }
  if (!parameter.power_of_two) {
    return "lie in [" + std::to_string(parameter.least) + ", " + std::to_string(parameter.most) +
           "]";
  }
  for (uint64_t value = parameter.least; value <= parameter.most; value *= 2) {
    text += value == parameter.least ? "be " : value == parameter.most ? " or " : ", ";
    text += std::to_string(value);
  }
  return text;
}

Refusal CheckIndex(const IndexDescriptor& index, uint32_t key_dim, const char* field) {
  const IndexType* const type = FindIndexType(index);
  if (type == nullptr && IsPlugin(index)) {
    return RefuseValue(std::string(field) + ".type",
                       Quoted(PluginNameOf(index)) + ", a plug-in that is not loaded");
  }
  if (type == nullptr) {
    return {StatusCode::kInvalidArgument, std::string(field) + ".kind", "unknown"};
  }
  const IndexTypeInfo& info = type->info();
  for (size_t i = 0; i < info.parameters.size(); ++i) {
    const IndexParameter& parameter = info.parameters[i];
    const uint32_t value = type->ValueOf(index, i);
    if (Allows(parameter, value)) continue;
    const auto path = JoinFields(JoinFields(field, info.name), parameter.name);
    return {StatusCode::kInvalidArgument, path,
            std::to_string(value) + ", must " + ValuesOf(parameter)};
  }
  return type->CheckFit(index, key_dim, field);
}

}  // namespace pqcached::kvstore
