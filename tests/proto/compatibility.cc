#include "tests/proto/compatibility.h"

#include <map>

namespace pqcached::tests {
namespace {

using google::protobuf::DescriptorProto;
using google::protobuf::EnumDescriptorProto;
using google::protobuf::FieldDescriptorProto;
using google::protobuf::FileDescriptorSet;
using google::protobuf::MethodDescriptorProto;
using google::protobuf::ServiceDescriptorProto;

struct Catalogue {
  std::map<std::string, const DescriptorProto*> messages;
  std::map<std::string, const EnumDescriptorProto*> enums;
  std::map<std::string, const ServiceDescriptorProto*> services;
};

void AddMessage(const std::string& scope, const DescriptorProto& message, Catalogue& catalogue) {
  const std::string name = scope + "." + message.name();
  catalogue.messages[name] = &message;
  for (const EnumDescriptorProto& nested : message.enum_type()) {
    catalogue.enums[name + "." + nested.name()] = &nested;
  }
  for (const DescriptorProto& nested : message.nested_type()) AddMessage(name, nested, catalogue);
}

Catalogue CatalogueOf(const FileDescriptorSet& set) {
  Catalogue catalogue;
  for (const auto& file : set.file()) {
    for (const auto& message : file.message_type()) AddMessage(file.package(), message, catalogue);
    for (const auto& entry : file.enum_type()) {
      catalogue.enums[file.package() + "." + entry.name()] = &entry;
    }
    for (const auto& service : file.service()) {
      catalogue.services[file.package() + "." + service.name()] = &service;
    }
  }
  return catalogue;
}

std::string OneofOf(const DescriptorProto& message, const FieldDescriptorProto& field) {
  return field.has_oneof_index() ? message.oneof_decl(field.oneof_index()).name() : "";
}

void CompareMessages(const std::string& name, const DescriptorProto& previous,
                     const DescriptorProto& current, std::vector<std::string>& breaks) {
  std::map<int, const FieldDescriptorProto*> fields;
  for (const FieldDescriptorProto& field : current.field()) fields[field.number()] = &field;
  for (const FieldDescriptorProto& old : previous.field()) {
    const std::string path = name + "." + old.name();
    const auto found = fields.find(old.number());
    if (found == fields.end()) {
      breaks.push_back(path + ": field number " + std::to_string(old.number()) + " is gone");
      continue;
    }
    const FieldDescriptorProto& now = *found->second;
    if (now.name() != old.name()) breaks.push_back(path + ": renamed to " + now.name());
    if (now.type() != old.type() || now.type_name() != old.type_name()) {
      breaks.push_back(path + ": type changed");
    }
    if (now.label() != old.label()) breaks.push_back(path + ": label changed");
    if (OneofOf(current, now) != OneofOf(previous, old)) {
      breaks.push_back(path + ": oneof changed from '" + OneofOf(previous, old) + "' to '" +
                       OneofOf(current, now) + "'");
    }
    if (now.options().packed() != old.options().packed() ||
        now.options().has_packed() != old.options().has_packed()) {
      breaks.push_back(path + ": packing changed");
    }
  }
}

void CompareEnums(const std::string& name, const EnumDescriptorProto& previous,
                  const EnumDescriptorProto& current, std::vector<std::string>& breaks) {
  std::map<int, std::string> values;
  for (const auto& value : current.value()) values[value.number()] = value.name();
  for (const auto& old : previous.value()) {
    const auto found = values.find(old.number());
    if (found == values.end()) {
      breaks.push_back(name + "." + old.name() + ": enum value is gone");
    } else if (found->second != old.name()) {
      breaks.push_back(name + "." + old.name() + ": renamed to " + found->second);
    }
  }
}

void CompareServices(const std::string& name, const ServiceDescriptorProto& previous,
                     const ServiceDescriptorProto& current, std::vector<std::string>& breaks) {
  std::map<std::string, const MethodDescriptorProto*> methods;
  for (const auto& method : current.method()) methods[method.name()] = &method;
  for (const auto& old : previous.method()) {
    const std::string path = name + "." + old.name();
    const auto found = methods.find(old.name());
    if (found == methods.end()) {
      breaks.push_back(path + ": rpc is gone");
      continue;
    }
    const MethodDescriptorProto& now = *found->second;
    if (now.input_type() != old.input_type()) breaks.push_back(path + ": request type changed");
    if (now.output_type() != old.output_type()) breaks.push_back(path + ": response type changed");
    if (now.client_streaming() != old.client_streaming() ||
        now.server_streaming() != old.server_streaming()) {
      breaks.push_back(path + ": streaming changed");
    }
  }
}

// Calls `compare` for what both have, and reports what only `previous` has.
template <class Map, class Compare>
void CompareAll(const Map& previous, const Map& current, const std::string& kind, Compare compare,
                std::vector<std::string>& breaks) {
  for (const auto& [name, old] : previous) {
    const auto found = current.find(name);
    if (found == current.end()) {
      breaks.push_back(name + ": " + kind + " is gone");
    } else {
      compare(name, *old, *found->second, breaks);
    }
  }
}

}  // namespace

std::vector<std::string> FindBreaks(const FileDescriptorSet& previous,
                                    const FileDescriptorSet& current) {
  const Catalogue before = CatalogueOf(previous);
  const Catalogue after = CatalogueOf(current);
  std::vector<std::string> breaks;
  CompareAll(before.messages, after.messages, "message", CompareMessages, breaks);
  CompareAll(before.enums, after.enums, "enum", CompareEnums, breaks);
  CompareAll(before.services, after.services, "service", CompareServices, breaks);
  return breaks;
}

}  // namespace pqcached::tests
