#include "proto/codec/index.h"

#include <iterator>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"

namespace pqcached::codec {
namespace {

using kvstore::IndexDescriptor;
using kvstore::IndexParameter;
using kvstore::IndexType;
using kvstore::Refusal;
using kvstore::StatusCode;

// The names of the parameters of plug-ins.
constexpr const char* kParameterNumbers[] = {"#0", "#1", "#2", "#3"};
static_assert(std::size(kParameterNumbers) == kvstore::kMaxPluginParameters);

Refusal RefuseValue(std::string field, std::string text) {
  return {.code = StatusCode::kInvalidArgument, .field = std::move(field), .text = std::move(text)};
}

Refusal DecodeTyped(const v1::TypedIndex& message, const std::string& field,
                    IndexDescriptor* index) {
  std::vector<kvstore::IndexArgument> arguments;
  for (const auto& [name, value] : message.parameters()) {
    kvstore::IndexArgument argument{.name = name, .value_name = {}, .number = value.number()};
    if (value.kind_case() == v1::IndexValue::kName) argument.value_name = value.name();
    if (value.kind_case() == v1::IndexValue::KIND_NOT_SET) {
      std::string path = field + ".parameters[";
      path += name;
      return RefuseValue(path += "]", "missing: number or name");
    }
    arguments.push_back(argument);
  }
  return kvstore::MakeIndex(message.type(), arguments, field, index);
}

void EncodeValue(const IndexParameter& parameter, uint32_t value, v1::IndexValue* message) {
  if (parameter.names.empty()) {
    message->set_number(value);
  } else {
    message->set_name(std::string(parameter.names[value]));
  }
}

// The reader may not have the plug-in; the sender may have it, and then knows the parameters.
void EncodePlugin(const IndexDescriptor& index, v1::TypedIndex* message) {
  const IndexType* const type = kvstore::FindIndexType(index);
  const size_t count =
      type != nullptr ? type->info().parameters.size() : kvstore::kMaxPluginParameters;
  message->set_type(kvstore::PluginNameOf(index));
  for (size_t i = 0; i < count; ++i) {
    v1::IndexValue& value = (*message->mutable_parameters())[kParameterNumbers[i]];
    value.set_number(kvstore::PluginValueOf(index, i));
  }
}

void EncodeParameter(const IndexParameter& parameter, v1::IndexParameterDescription* message) {
  message->set_name(std::string(parameter.name));
  message->set_text(std::string(parameter.text));
  message->set_least(parameter.least);
  message->set_most(parameter.most);
  message->set_power_of_two(parameter.power_of_two);
  for (const std::string_view name : parameter.names) message->add_names(std::string(name));
  EncodeValue(parameter, parameter.default_value, message->mutable_default_value());
}

}  // namespace

// pq and flat have messages of their own, which sidecars and clients of all versions know.
void Encode(const IndexDescriptor& index, v1::IndexSpec* message) {
  if (index.kind == kvstore::IndexKind::kPq) {
    message->mutable_pq()->set_subspaces(index.subspace_count);
    message->mutable_pq()->set_bits(index.bits);
    message->mutable_pq()->set_layout(static_cast<v1::PqIndex::Layout>(index.layout));
    return;
  }
  if (index.kind == kvstore::IndexKind::kFlat) {
    message->mutable_flat();
    return;
  }
  if (IsPlugin(index)) return EncodePlugin(index, message->mutable_typed());
  const IndexType& type = TypeOf(index);
  const std::span<const IndexParameter> parameters = type.info().parameters;
  message->mutable_typed()->set_type(std::string(type.info().name));
  for (size_t i = 0; i < parameters.size(); ++i) {
    v1::IndexValue& value =
        (*message->mutable_typed()->mutable_parameters())[std::string(parameters[i].name)];
    EncodeValue(parameters[i], type.ValueOf(index, i), &value);
  }
}

Refusal Decode(const v1::IndexSpec& message, const std::string& field, IndexDescriptor* index) {
  switch (message.kind_case()) {
    case v1::IndexSpec::kPq:
      if (!v1::PqIndex::Layout_IsValid(message.pq().layout())) {
        return RefuseValue(field + ".pq.layout",
                           std::to_string(message.pq().layout()) +
                               ", must be 0 (pairs), 1 (contiguous) or 2 (weighted)");
      }
      *index = {kvstore::IndexKind::kPq, message.pq().subspaces(), message.pq().bits(),
                static_cast<kvstore::SubspaceLayout>(message.pq().layout())};
      return {};
    case v1::IndexSpec::kFlat:
      *index = {};
      return {};
    case v1::IndexSpec::kTyped:
      return DecodeTyped(message.typed(), field + ".typed", index);
    case v1::IndexSpec::KIND_NOT_SET:
      break;
  }
  return RefuseValue(field + ".kind", "missing: pq, flat or typed");
}

bool DecodePlugin(const v1::IndexSpec& message, IndexDescriptor* index) {
  if (!kvstore::IsPluginName(message.typed().type())) return false;
  *index = kvstore::PluginIndexOf(message.typed().type());
  for (size_t i = 0; i < kvstore::kMaxPluginParameters; ++i) {
    const auto value = message.typed().parameters().find(kParameterNumbers[i]);
    if (value == message.typed().parameters().end()) continue;
    if (value->second.number() > kvstore::kMaxPluginValue) return false;
    kvstore::SetPluginValue(index, i, static_cast<uint32_t>(value->second.number()));
  }
  return true;
}

void Encode(const IndexType& type, v1::IndexTypeDescription* message) {
  message->set_name(std::string(type.info().name));
  message->set_text(std::string(type.info().text));
  message->set_needs_build(type.built() != nullptr);
  for (const IndexParameter& parameter : type.info().parameters) {
    EncodeParameter(parameter, message->add_parameters());
  }
}

}  // namespace pqcached::codec
