// A client of the broker that speaks its protocol by hand, and calls over gRPC with the token it gets.
#ifndef PQCACHED_TESTS_SERVICE_SESSION_BROKER_FIXTURE_H_
#define PQCACHED_TESTS_SERVICE_SESSION_BROKER_FIXTURE_H_

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/local_session.h"
#include "kvstore/read/attachment.h"
#include "kvstore/read/broker_protocol.h"
#include "tests/service/handlers/shared_mapping.h"
#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {

// The connection. Reports what went wrong in what it returns, so that it can be used in a child.
class BrokerConnection {
 public:
  explicit BrokerConnection(const std::string& path)
      : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval patience = {.tv_sec = 60, .tv_usec = 0};  // no test waits for ever
    setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    connected_ =
        connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }

  bool connected() const { return connected_; }
  int socket_descriptor() const { return socket_.get(); }

  static kvstore::BrokerRequest Request(kvstore::BrokerCall call) {
    kvstore::BrokerRequest request;
    request.call = call;
    return request;
  }
  static kvstore::BrokerRequest Hello(const std::string& tenant = "",
                                      const std::string& name = "local") {
    kvstore::BrokerRequest request = Request(kvstore::BrokerCall::kHello);
    tenant.copy(request.tenant, sizeof(request.tenant));
    name.copy(request.client_name, sizeof(request.client_name));
    return request;
  }

  bool Send(const void* data, size_t size_bytes) {
    return send(socket_.get(), data, size_bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(size_bytes);
  }

  // Reads a whole reply. False: the broker closed the connection, or has sent nothing for long.
  bool Receive(kvstore::BrokerReply& reply, kvstore::FileDescriptor* descriptor = nullptr) {
    size_t got = 0;
    while (got < sizeof(reply)) {
      iovec part = {reinterpret_cast<char*>(&reply) + got, sizeof(reply) - got};
      alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
      msghdr message = {};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      const ssize_t received = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
      if (received <= 0) return false;
      got += static_cast<size_t>(received);
      const cmsghdr* header = CMSG_FIRSTHDR(&message);
      if (header == nullptr || header->cmsg_type != SCM_RIGHTS) continue;
      int received_descriptor = -1;
      std::memcpy(&received_descriptor, CMSG_DATA(header), sizeof(int));
      kvstore::FileDescriptor owner(received_descriptor);
      if (descriptor != nullptr) *descriptor = std::move(owner);
    }
    return true;
  }

  // The answer; a status of UNAVAILABLE when the broker closes instead.
  kvstore::BrokerReply Call(const kvstore::BrokerRequest& request,
                            kvstore::FileDescriptor* descriptor = nullptr) {
    kvstore::BrokerReply reply;
    if (!Send(&request, sizeof(request)) || !Receive(reply, descriptor)) {
      reply = kvstore::BrokerReply{};
      reply.status = grpc::StatusCode::UNAVAILABLE;
    }
    return reply;
  }

  // The memory that a call opens; empty when it fails.
  SharedMapping Open(const kvstore::BrokerRequest& request, int protection,
                     kvstore::BrokerReply* reply_out = nullptr) {
    kvstore::FileDescriptor descriptor;
    const kvstore::BrokerReply reply = Call(request, &descriptor);
    if (reply_out != nullptr) *reply_out = reply;
    if (reply.status != 0 || !descriptor.valid()) return {};
    return SharedMapping(std::move(descriptor), reply.size_bytes, protection);
  }
  SharedMapping OpenPool(uint64_t cache_id, kvstore::BrokerReply* reply = nullptr) {
    kvstore::BrokerRequest request = Request(kvstore::BrokerCall::kOpenPool);
    request.cache_id = cache_id;
    return Open(request, PROT_READ, reply);
  }
  SharedMapping OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                            kvstore::BrokerReply* reply = nullptr) {
    kvstore::BrokerRequest request = Request(kvstore::BrokerCall::kOpenStaging);
    request.slot_bytes = slot_bytes;
    request.slot_count = slot_count;
    return Open(request, PROT_READ | PROT_WRITE, reply);
  }

 private:
  kvstore::FileDescriptor socket_;
  bool connected_ = false;
};

// A local client with an open session.
class LocalClient {
 public:
  explicit LocalClient(const std::string& endpoint, const std::string& tenant = "",
                       const std::string& name = "local")
      : connection_(endpoint.substr(std::string("unix://").size()) + kvstore::kBrokerSuffix) {
    control_ = connection_.Open(BrokerConnection::Hello(tenant, name), PROT_READ, &hello_);
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    kv_ = v1::KvCache::NewStub(
        grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments));
  }

  BrokerConnection& connection() { return connection_; }
  const kvstore::BrokerReply& hello() const { return hello_; }
  v1::KvCache::Stub& kv() { return *kv_; }
  const kvstore::ControlPage& page() const {
    return *reinterpret_cast<const kvstore::ControlPage*>(control_.data());
  }
  const kvstore::WorkerEnd& worker_end() const {
    return *reinterpret_cast<const kvstore::WorkerEnd*>(control_.data() +
                                                        kvstore::WorkerEnd::kOffsetBytes);
  }
  const kvstore::LeaseWords& words(uint32_t index) const {
    return reinterpret_cast<const kvstore::LeaseWords*>(control_.data() +
                                                        page().words_offset_bytes)[index];
  }

  uint64_t SlotWord(uint32_t slot) const {
    return reinterpret_cast<const std::atomic<uint64_t>*>(control_.data() +
                                                          page().slot_words_offset_bytes)[slot];
  }

  std::unique_ptr<grpc::ClientContext> Context() const {
    auto context = std::make_unique<grpc::ClientContext>();
    context->AddMetadata("pqcached-session", hello_.session_token);
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return context;
  }

  template <typename Request, typename Response>
  grpc::Status Rpc(grpc::Status (v1::KvCache::Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                   const Request& request, Response* response) {
    return (kv_.get()->*method)(Context().get(), request, response);
  }

  uint64_t OpenCache(const v1::OpenCacheRequest& request = CacheRequest()) {
    v1::OpenCacheResponse response;
    const grpc::Status status = Rpc(&v1::KvCache::Stub::OpenCache, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.cache_id();
  }
  uint64_t CreateSequence(uint64_t cache_id) {
    v1::CreateSequenceRequest request;
    request.set_cache_id(cache_id);
    v1::CreateSequenceResponse response;
    const grpc::Status status = Rpc(&v1::KvCache::Stub::CreateSequence, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.sequence_id();
  }
  grpc::Status Attach(uint64_t sequence_id, v1::AttachResponse* response) {
    v1::AttachRequest request;
    request.set_sequence_id(sequence_id);
    return Rpc(&v1::KvCache::Stub::Attach, request, response);
  }
  grpc::Status Detach(uint64_t lease_id) {
    v1::DetachRequest request;
    request.set_lease_id(lease_id);
    v1::DetachResponse response;
    return Rpc(&v1::KvCache::Stub::Detach, request, &response);
  }

 private:
  BrokerConnection connection_;
  kvstore::BrokerReply hello_;
  SharedMapping control_;
  std::unique_ptr<v1::KvCache::Stub> kv_;
};

// Appends the fixture's rows of tokens [first, first + tokens) in all layers.
inline grpc::Status Append(LocalClient& client, uint64_t sequence_id, uint64_t first,
                           uint64_t tokens) {
  v1::AppendRequest request;
  v1::SequenceAppend* item = request.add_items();
  item->set_sequence_id(sequence_id);
  item->set_first_position(first);
  for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, first, tokens);
  v1::AppendResponse response;
  return client.Rpc(&v1::KvCache::Stub::Append, request, &response);
}

// Rows [0, token_count) of a layer out of mapped memory, as FetchBlocks gives them.
inline std::string MappedRows(const std::string& image, const SharedMapping& pool, uint32_t layer,
                              uint32_t token_count) {
  kvstore::Attachment attachment;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(image.data()),
                                         image.size());
  std::string wrong = kvstore::ParseAttachment(bytes, pool.size_bytes(), &attachment);
  if (!wrong.empty()) return "parse: " + wrong;
  const kvstore::LayerShape shape{.dtype = kernels::DType::kF32,
                                  .key_dim = kKeyDim,
                                  .value_dim = kValueDim,
                                  .kv_heads = kKvHeads,
                                  .query_heads = kQueryHeads,
                                  .row_bytes = (kKeyDim + kValueDim) * 4};
  kvstore::MappedLayer mapped;
  wrong = kvstore::MappedLayer::Make(attachment, layer, shape, kvstore::kMaxIndexes, pool.data(),
                                     &mapped);
  if (!wrong.empty()) return "make: " + wrong;
  std::string rows;
  const kvstore::LayerView view = mapped.View(token_count);
  for (uint32_t head = 0; head < kKvHeads; ++head) {
    for (const kvstore::SegmentView& segment : view.segments) {
      rows.append(reinterpret_cast<const char*>(segment.rows[head]),
                  size_t{segment.token_count} * shape.row_bytes);
    }
  }
  return rows;
}

// Puts the tensors of `rows` into a slot from `offset` on and makes them references. Returns the end.
inline uint64_t Stage(const SharedMapping& staging, uint64_t slot_bytes, uint32_t slot,
                      uint64_t generation, uint64_t offset, v1::LayerRows* rows) {
  for (v1::Tensor* tensor : {rows->mutable_keys(), rows->mutable_values()}) {
    const std::string data = tensor->inline_data();
    data.copy(reinterpret_cast<char*>(staging.data()) + slot * slot_bytes + offset, data.size());
    v1::StagingReference* reference = tensor->mutable_staging();
    reference->set_slot(slot);
    reference->set_offset_bytes(offset);
    reference->set_size_bytes(data.size());
    reference->set_generation(generation);
    offset += data.size();
  }
  return offset;
}

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_SESSION_BROKER_FIXTURE_H_
