// RpcRemote: Admin calls by name, and Admit, for tools.
#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>

#include <memory>
#include <string_view>

#include "client/rpc/refusal.h"
#include "client/rpc/rpc_remote.h"

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

}  // namespace

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
