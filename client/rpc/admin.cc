// RpcRemote: Admin calls by name, and Admit, for tools.
#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "client/base/descriptor_words.h"
#include "client/rpc/refusal.h"
#include "client/rpc/rpc_remote.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/plugin_names.h"

namespace pqcached::client {
namespace {

using google::protobuf::Message;
using google::protobuf::MethodDescriptor;

std::unique_ptr<Message> NewMessage(const google::protobuf::Descriptor* descriptor) {
  google::protobuf::MessageFactory* factory = google::protobuf::MessageFactory::generated_factory();
  return std::unique_ptr<Message>(factory->GetPrototype(descriptor)->New());
}

const MethodDescriptor* FindMethod(const char* name) {
  // Using a message type registers the descriptors of its file.
  const bool is_admit = std::string_view(name) == "Admit";
  const google::protobuf::ServiceDescriptor* service =
      is_admit ? v1::AdmitRequest::descriptor()->file()->FindServiceByName("KvCache")
               : v1::StatsRequest::descriptor()->file()->FindServiceByName("Admin");
  const MethodDescriptor* method = service ? service->FindMethodByName(name) : nullptr;
  return method && !method->client_streaming() && !method->server_streaming() ? method : nullptr;
}

struct CallByPath final : PendingCall {
  using PendingCall::PendingCall;

  std::unique_ptr<Message> response;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<Message>> reader;
};

// Sets a parameter of a plug-in's index, by its description.
grpc::Status SetParameter(const v1::IndexTypeDescription& type, const pqc_index_parameter& given,
                          kvstore::IndexDescriptor* index) {
  const std::string field = std::string("parameters[") + given.name + "]";
  const auto refuse = [&](const std::string& text) {
    return Refuse(grpc::StatusCode::INVALID_ARGUMENT, field, text);
  };
  int number = 0;
  while (number < type.parameters_size() && type.parameters(number).name() != given.name) ++number;
  if (number == type.parameters_size()) return refuse("no parameter of " + type.name());
  const v1::IndexParameterDescription& parameter = type.parameters(number);
  if (given.value_name == nullptr && given.number >= parameter.least() &&
      given.number <= parameter.most()) {
    kvstore::SetPluginValue(index, static_cast<size_t>(number),
                            static_cast<uint32_t>(given.number));
    return grpc::Status::OK;
  }
  const std::string value = given.value_name == nullptr
                                ? std::to_string(given.number)
                                : std::string("\"") + given.value_name + "\"";
  return refuse(value + ", must lie in [" + std::to_string(parameter.least()) + ", " +
                std::to_string(parameter.most()) + "]");
}

// Makes an index of a plug-in that the sidecar has described.
grpc::Status MakePluginIndex(const v1::ListIndexTypesResponse& types, const std::string& name,
                             std::span<const pqc_index_parameter> given, pqc_index* made) {
  for (const v1::IndexTypeDescription& type : types.types()) {
    if (type.name() != name || !kvstore::IsPluginName(name)) continue;
    kvstore::IndexDescriptor index = kvstore::PluginIndexOf(name);
    for (int i = 0; i < type.parameters_size(); ++i) {
      if (i >= static_cast<int>(kvstore::kMaxPluginParameters)) break;
      const uint64_t value = type.parameters(i).default_value().number();
      kvstore::SetPluginValue(&index, static_cast<size_t>(i), static_cast<uint32_t>(value));
    }
    for (size_t i = 0; i < given.size(); ++i) {
      for (size_t other = 0; other < i; ++other) {
        if (std::string_view(given[other].name) == given[i].name) {
          return Refuse(grpc::StatusCode::INVALID_ARGUMENT,
                        std::string("parameters[") + given[i].name + "]", "given twice");
        }
      }
      RETURN_IF_ERROR(SetParameter(type, given[i], &index));
    }
    SetDescriptorWords(index, made);
    return grpc::Status::OK;
  }
  return Refuse(grpc::StatusCode::INVALID_ARGUMENT, "type", "\"" + name + "\", no such index type");
}

}  // namespace

pqc_status RpcRemote::MakeIndex(const char* type, const pqc_index_parameter* parameters,
                                uint32_t parameter_count, pqc_index* index,
                                RefusalBuffer* error) noexcept {
  return Finish("ListIndexTypes", error, [&]() -> grpc::Status {
    v1::ListIndexTypesRequest request;
    v1::ListIndexTypesResponse response;
    RETURN_IF_ERROR(Attempt(Repeat::kHarmless, CallDeadline(), [&](const Context& context) {
      return Call(*admin_, &v1::Admin::Stub::PrepareAsyncListIndexTypes, context, request,
                  &response);
    }));
    return MakePluginIndex(response, type, {parameters, parameter_count}, index);
  });
}

pqc_status RpcRemote::AdminJson(const char* method_name, const char* request_json,
                                const TextSink& answer, RefusalBuffer* error) noexcept {
  return Finish(method_name, error, [&]() -> grpc::Status {
    const MethodDescriptor* method = FindMethod(method_name);
    if (!method) {
      return Refuse(grpc::StatusCode::INVALID_ARGUMENT, "method",
                    std::string("Admin has no unary \"") + method_name + "\"");
    }
    const std::unique_ptr<Message> request = NewMessage(method->input_type());
    std::unique_ptr<Message> response;
    const auto parsed = google::protobuf::util::JsonStringToMessage(request_json, request.get());
    if (!parsed.ok()) {
      return Refuse(grpc::StatusCode::INVALID_ARGUMENT, "request", std::string(parsed.message()));
    }
    const std::string path = "/" + method->service()->full_name() + "/" + method->name();
    grpc::TemplatedGenericStub<Message, Message> stub(channel_);
    grpc::Status status = Attempt(Repeat::kNever, CallDeadline(), [&](const Context& context) {
      auto call = std::make_unique<CallByPath>(context);
      call->response = NewMessage(method->output_type());
      call->reader = stub.PrepareUnaryCall(context.get(), path, *request, call->queue());
      if (!Await(abandoned_calls_, call, call->response.get())) return Overdue();
      response = std::move(call->response);
      return call->status;
    });
    if (!status.ok()) return status;
    google::protobuf::util::JsonPrintOptions options;
    options.always_print_primitive_fields = true;
    options.preserve_proto_field_names = true;
    std::string json;
    const auto printed = google::protobuf::util::MessageToJsonString(*response, &json, options);
    if (!printed.ok()) return {grpc::StatusCode::INTERNAL, std::string(printed.message())};
    answer.write(answer.context, json.data(), json.size());
    return status;
  });
}

}  // namespace pqcached::client
