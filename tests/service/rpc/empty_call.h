// All rpcs of both services, from their descriptors, and a call of any of them.
#ifndef PQCACHED_TESTS_SERVICE_RPC_EMPTY_CALL_H_
#define PQCACHED_TESTS_SERVICE_RPC_EMPTY_CALL_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>
#include <vector>

#include "pqcached/v1/admin.pb.h"
#include "pqcached/v1/kv_cache.pb.h"

namespace pqcached::service {

inline std::vector<const google::protobuf::MethodDescriptor*> AllMethods() {
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  for (const google::protobuf::ServiceDescriptor* service :
       {v1::OpenCacheRequest::descriptor()->file()->FindServiceByName("KvCache"),
        v1::StatsRequest::descriptor()->file()->FindServiceByName("Admin")}) {
    for (int i = 0; i < service->method_count(); ++i) methods.push_back(service->method(i));
  }
  return methods;
}

// A call with one empty message, of whatever kind of rpc.
class EmptyCall {
 public:
  EmptyCall(const std::shared_ptr<grpc::Channel>& channel,
            const google::protobuf::MethodDescriptor& method,
            std::unique_ptr<grpc::ClientContext> context)
      : context_(std::move(context)), stub_(channel) {
    stream_ = stub_.PrepareCall(context_.get(),
                                "/" + method.service()->full_name() + "/" + method.name(), &queue_);
    stream_->StartCall(this);
    Await();
    const grpc::Slice nothing("");
    stream_->WriteLast(grpc::ByteBuffer(&nothing, 1), grpc::WriteOptions(), this);
    Await();
  }
  ~EmptyCall() {
    queue_.Shutdown();
    void* tag = nullptr;
    for (bool ok = false; queue_.Next(&tag, &ok);) {
    }
  }

  grpc::Status Finish() {
    grpc::ByteBuffer answer;
    do {
      stream_->Read(&answer, this);
    } while (Await());
    grpc::Status status;
    stream_->Finish(&status, this);
    Await();
    return status;
  }

 private:
  bool Await() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  const std::unique_ptr<grpc::ClientContext> context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_RPC_EMPTY_CALL_H_
