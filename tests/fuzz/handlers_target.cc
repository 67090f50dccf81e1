// Fuzz target: the inputs of all handlers. An input is a sequence of calls of a session of the broker,
// each of any rpc of the services, with a message that fits what is stored and was then changed, or
// with bytes that are none.
//
// Between its inputs nothing may be left: no sequence, no lease, no byte of the pools in use.
#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "tests/fuzz/bytes.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/target.h"
#include "tests/service/session/broker_fixture.h"

namespace pqcached::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::MethodDescriptor;
using google::protobuf::Reflection;
using service::BrokerConnection;

constexpr size_t kMaxCalls = 12;
constexpr size_t kMaxSequences = 6;
constexpr size_t kMaxMessagesOfStream = 3;
constexpr uint64_t kSlotBytes = uint64_t{1} << 20;
constexpr uint32_t kSlots = 2;
// What is stored by earlier inputs in other caches ends with the sidecar.
constexpr int kInputsPerSidecar = 1000;
constexpr auto kPatience = std::chrono::seconds(20);  // less than libFuzzer's
constexpr auto kHurry = std::chrono::milliseconds(3);
// In process, a write waits for its deadline when the server has ended the stream without reading it.
constexpr auto kStreamPatience = std::chrono::seconds(1);

// A call whose messages are made below is told by its number: seeds and findings depend on the order,
// so new rpcs go to the end.
// OpenCache is the first one.
std::vector<const MethodDescriptor*> AllMethods() {
  std::vector<const MethodDescriptor*> methods;
  for (const auto* message : {v1::OpenCacheRequest::descriptor(), v1::StatsRequest::descriptor()}) {
    const google::protobuf::FileDescriptor* file = message->file();
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) {
        const MethodDescriptor* method = file->service(i)->method(j);
        if (method->name() != "Drain") methods.push_back(method);  // it ends the service
      }
    }
  }
  const auto open_cache = std::find_if(methods.begin(), methods.end(), [](const auto* method) {
    return method->name() == "OpenCache";
  });
  std::iter_swap(methods.begin(), open_cache);
  return methods;
}

struct KnownSequence {
  uint64_t id = 0;
  uint64_t token_count = 0;
};

// What one input has made so far.
struct Session {
  Session(const std::string& broker_path, const std::string& name) : broker(broker_path) {
    const kvstore::BrokerReply reply = broker.Call(BrokerConnection::Hello("", name));
    if (reply.status != 0) Found(std::string("hello: ") + reply.message);
    token = reply.session_token;
  }

  BrokerConnection broker;
  service::SharedMapping staging;
  std::string token;
  uint64_t cache_id = 0;
  uint64_t lease_id = 0;
  uint64_t generation = 0;
  std::vector<KnownSequence> sequences;
};

class Sidecar {
 public:
  Sidecar() {
    std::string path = (std::filesystem::temp_directory_path() / "pqcached-fuzz-XXXXXX").string();
    folder_ = mkdtemp(path.data());
    service::Config config;
    config.listen = "unix://" + (folder_ / "s").string();
    config.max_pool_bytes = size_t{512} << 20;
    config.max_message_bytes = size_t{1} << 20;
    config.segment_tokens = 128;
    config.tail_tokens = 128;
    config.codebook_tokens = 256;
    config.call_threads = 2;
    config.threads = 1;
    config.shutdown_timeout = absl::Seconds(5);
    config.log_level = "off";
    config.retain = false;  // each input leaves nothing
    broker_path_ = (folder_ / "s").string() + kvstore::kBrokerSuffix;
    log_ = *service::Log::Open(config.log_level, config.log_file);
    store_ = *kvstore::Store::Create(StoreOptionsOf(config));
    server_ = *service::Server::Start(config, *store_, *log_);
    stub_ = std::make_unique<grpc::GenericStub>(server_->InProcessChannel());
  }

  ~Sidecar() {
    stub_.reset();
    server_.reset();
    store_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Run(Bytes bytes) {
    {
      Session session(broker_path_, "fuzz" + std::to_string(inputs_++));
      Message& open = Empty(methods_[kOpenCache]);
      open.CopyFrom(service::CacheRequest());
      Learn(session, Call(session, *methods_[kOpenCache], {open.SerializeAsString()}, kPatience));
      for (size_t i = 0; i < kMaxCalls && !bytes.empty(); ++i) CallOne(session, bytes);
    }
    ExpectNothingIsLeft();
  }

  bool worn() const { return inputs_ >= kInputsPerSidecar; }

 private:
  // Of methods_.
  static constexpr size_t kOpenCache = 0;

  void CallOne(Session& session, Bytes& bytes) {
    const MethodDescriptor& method = *methods_[bytes.Below(methods_.size())];
    const uint8_t how = bytes.Byte();
    const size_t messages = method.client_streaming() ? 1 + bytes.Below(kMaxMessagesOfStream) : 1;
    std::vector<std::string> requests;
    for (size_t i = 0; i < messages; ++i)
      requests.push_back(Request(session, method, how, i, bytes));
    const std::string token = session.token;
    if (how % 32 == 31) session.token = OtherToken(bytes);
    const std::chrono::milliseconds longest =
        method.client_streaming() ? kStreamPatience : kPatience;
    const std::chrono::milliseconds patience = how / 32 == 7 ? kHurry : longest;
    const std::vector<std::string> responses = Call(session, method, requests, patience);
    session.token = token;
    for (const std::string& response : responses) {
      Message& message = *Prototype(method.output_type()).New(&arena_);
      if (!message.ParseFromString(response)) Found(method.full_name() + ": garbled answer");
      Walk(session, message);
    }
    arena_.Reset();
  }

  // Of what gRPC's client takes: it ends its process for anything else.
  static std::string OtherToken(Bytes& bytes) {
    std::string token = bytes.Text(bytes.Below(40));
    for (char& c : token) c = static_cast<char>(' ' + static_cast<uint8_t>(c) % ('~' - ' ' + 1));
    return token;
  }

  std::string Request(Session& session, const MethodDescriptor& method, uint8_t how, size_t i,
                      Bytes& bytes) {
    const uint8_t changes = how % 8;
    if (changes == 7) return bytes.Text(bytes.Byte());
    Message& message = Empty(&method);
    Fit(session, message, i, bytes);
    for (uint8_t change = 0; change < changes; ++change) Mutate(message, bytes);
    return message.SerializePartialAsString();
  }

  const Message& Prototype(const google::protobuf::Descriptor* type) {
    return *google::protobuf::MessageFactory::generated_factory()->GetPrototype(type);
  }
  Message& Empty(const MethodDescriptor* method) {
    return *Prototype(method->input_type()).New(&arena_);
  }

  // Fills the message so that the handler takes it, as far as there is something to take.
  void Fit(Session& session, Message& message, size_t number_in_stream, Bytes& bytes);
  void FitRows(Session& session, bool staged, uint64_t tokens, uint32_t layer, v1::LayerRows& rows);
  KnownSequence Choose(const Session& session, Bytes& bytes) {
    return session.sequences.empty() ? KnownSequence{}
                                     : session.sequences[bytes.Below(session.sequences.size())];
  }

  // The answers, none after a failure.
  std::vector<std::string> Call(Session& session, const MethodDescriptor& method,
                                const std::vector<std::string>& requests,
                                std::chrono::milliseconds patience);
  void Await(void* tag) {
    void* done = nullptr;
    if (!queue_.Next(&done, &ok_) || done != tag) Found("the completion queue");
  }

  void Learn(Session& session, const std::vector<std::string>& responses) {
    if (responses.empty()) Found("a cache that fits is refused");
    v1::OpenCacheResponse response;
    response.ParseFromString(responses[0]);
    session.cache_id = response.cache_id();
  }
  // Takes the ids out of an answer.
  void Walk(Session& session, const Message& message) {
    const Reflection& reflection = *message.GetReflection();
    const google::protobuf::Descriptor& type = *message.GetDescriptor();
    const auto number = [&](const char* name) -> uint64_t {
      const FieldDescriptor* field = type.FindFieldByName(name);
      const bool is_number = field != nullptr && !field->is_repeated() &&
                             field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
      return is_number ? reflection.GetUInt64(message, field) : 0;
    };
    const bool made =
        type.name() == "CreateSequenceResponse" || type.name() == "ForkSequenceResponse";
    if (made && session.sequences.size() < kMaxSequences) {
      session.sequences.push_back({number("sequence_id"), number("token_count")});
    }
    if (type.name() == "AttachResponse") session.lease_id = number("lease_id");
    if (type.name() == "OpenCacheResponse") session.cache_id = number("cache_id");
  }

  void ExpectNothingIsLeft() {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    std::string left;
    do {
      left.clear();
      for (const kvstore::CacheInfo& cache : store_->ListCaches("")) {
        if (cache.used_bytes == 0 && cache.sequence_count == 0) continue;
        left += cache.spec.name + ": " + std::to_string(cache.sequence_count) + " sequences, " +
                std::to_string(cache.used_bytes) + " bytes; ";
      }
      const kvstore::StoreStats stats = store_->Stats();
      if (stats.lease_count != 0) left += std::to_string(stats.lease_count) + " leases; ";
      if (stats.staging_bytes != 0) left += std::to_string(stats.staging_bytes) + " of staging; ";
      if (left.empty()) return;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    } while (std::chrono::steady_clock::now() < until);
    Found("left when the session had ended: " + left);
  }

  const std::vector<const MethodDescriptor*> methods_ = AllMethods();
  std::filesystem::path folder_;
  std::string broker_path_;
  std::unique_ptr<service::Log> log_;
  std::unique_ptr<kvstore::Store> store_;
  std::unique_ptr<service::Server> server_;
  std::unique_ptr<grpc::GenericStub> stub_;
  grpc::CompletionQueue queue_;
  bool ok_ = false;
  google::protobuf::Arena arena_;
  std::map<std::pair<uint32_t, uint64_t>, v1::LayerRows> rows_;  // by layer, tokens
  int inputs_ = 0;
};

std::vector<std::string> Sidecar::Call(Session& session, const MethodDescriptor& method,
                                       const std::vector<std::string>& requests,
                                       std::chrono::milliseconds patience) {
  grpc::ClientContext context;
  context.AddMetadata("pqcached-session", session.token);
  context.set_deadline(std::chrono::system_clock::now() + patience);
  const std::string name = "/" + method.service()->full_name() + "/" + method.name();
  grpc::Status status;
  std::vector<std::string> responses;
  grpc::ByteBuffer response;
  const auto keep = [&] {
    grpc::Slice slice;
    if (!response.DumpToSingleSlice(&slice).ok()) return;
    responses.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
  };
  const auto buffer_of = [](const std::string& text) {
    const grpc::Slice slice(text);
    return grpc::ByteBuffer(&slice, 1);
  };
  const auto begun = std::chrono::steady_clock::now();
  if (!method.client_streaming() && !method.server_streaming()) {
    const auto call = stub_->PrepareUnaryCall(&context, name, buffer_of(requests[0]), &queue_);
    call->StartCall();
    call->Finish(&response, &status, this);
    Await(this);
    if (status.ok()) keep();
  } else {
    const auto call = stub_->PrepareCall(&context, name, &queue_);
    call->StartCall(this);
    Await(this);
    for (const std::string& request : requests) {
      call->Write(buffer_of(request), this);
      Await(this);
      if (!ok_) break;
    }
    call->WritesDone(this);
    Await(this);
    do {
      call->Read(&response, this);
      Await(this);
      if (ok_) keep();
    } while (ok_);
    call->Finish(&status, this);
    Await(this);
  }
  if (std::chrono::steady_clock::now() - begun > patience + std::chrono::seconds(1)) {
    Found(name + " outlived its deadline by more than a second");
  }
  if (status.error_code() == grpc::StatusCode::INTERNAL ||
      status.error_code() == grpc::StatusCode::UNKNOWN ||
      status.error_code() == grpc::StatusCode::DATA_LOSS) {
    const bool of_protobuf = status.error_message().find("ByteBuffer") != std::string::npos;
    if (!of_protobuf) Found(name + ": " + status.error_message());
  }
  return responses;
}

void Sidecar::FitRows(Session& session, bool staged, uint64_t tokens, uint32_t layer,
                      v1::LayerRows& rows) {
  v1::LayerRows& known = rows_[{layer, tokens}];
  if (known.layer() == 0) known = service::RowsOf(layer, 0, tokens);
  rows = known;
  if (!staged) return;
  if (session.staging.data() == nullptr) {
    session.staging = session.broker.OpenStaging(kSlotBytes, kSlots);
    if (session.staging.data() == nullptr) Found("staging that fits is refused");
  }
  uint64_t offset = layer == service::kLayers[0] ? 0 : kSlotBytes / 2;
  for (v1::Tensor* tensor : {rows.mutable_keys(), rows.mutable_values()}) {
    const std::string data = tensor->inline_data();
    std::memcpy(session.staging.data() + offset, data.data(), data.size());
    v1::StagingReference* place = tensor->mutable_staging();
    place->set_offset_bytes(offset);
    place->set_size_bytes(data.size());
    place->set_generation(session.generation);
    offset += (data.size() + 127) / 128 * 128;
  }
}

void Sidecar::Fit(Session& session, Message& message, size_t number_in_stream, Bytes& bytes) {
  static constexpr uint64_t kTokens[] = {1, 2, 3, 40, 127, 128, 129, 200};
  const std::string& type = message.GetDescriptor()->name();
  const auto numbers = [&](const char* name, uint64_t value) {
    const FieldDescriptor* field = message.GetDescriptor()->FindFieldByName(name);
    if (field != nullptr && field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64) {
      message.GetReflection()->SetUInt64(&message, field, value);
    }
  };
  if (type == "OpenCacheRequest") {
    message.CopyFrom(service::CacheRequest(bytes.Byte() % 8 == 0 ? "other" : "cache"));
    return;
  }
  if (type == "SessionRequest") {
    static_cast<v1::SessionRequest&>(message).mutable_open()->set_protocol_version(1);
    return;
  }
  numbers("cache_id", session.cache_id);
  const KnownSequence sequence = Choose(session, bytes);
  numbers("sequence_id", sequence.id);
  numbers("token_count", sequence.token_count / 2);
  numbers("lease_id", session.lease_id);
  if (type == "CreateSequenceRequest") {
    auto& request = static_cast<v1::CreateSequenceRequest&>(message);
    const uint8_t kind = bytes.Byte();
    for (uint32_t i = 0; kind % 2 == 1 && i < 260; ++i) request.add_token_ids(i);
    if (kind % 4 >= 2) *request.mutable_live_index()->mutable_index() = service::Pq(2, 4);
  } else if (type == "MatchPrefixRequest") {
    for (uint32_t i = 0; i < 260; ++i)
      static_cast<v1::MatchPrefixRequest&>(message).add_token_ids(i);
  } else if (type == "BuildIndexRequest") {
    auto& request = static_cast<v1::BuildIndexRequest&>(message);
    *request.mutable_index() = service::Pq(2, 4);
    request.set_iterations(1);
  } else if (type == "IngestRequest" && number_in_stream == 0) {
    static_cast<v1::IngestRequest&>(message).mutable_header()->set_sequence_id(sequence.id);
  } else if (type == "IngestRequest") {
    v1::IngestChunk& chunk = *static_cast<v1::IngestRequest&>(message).mutable_chunk();
    chunk.set_first_position(sequence.token_count);
    FitRows(session, false, kTokens[bytes.Below(std::size(kTokens))],
            service::kLayers[number_in_stream % 2 == 1 ? 0 : 1], *chunk.mutable_rows());
  } else if (type == "CommitRequest" || type == "AppendRequest") {
    const uint64_t tokens = kTokens[bytes.Below(std::size(kTokens))];
    const bool staged = type == "CommitRequest" || tokens == 2;
    if (staged) ++session.generation;
    v1::SequenceAppend item;
    item.set_sequence_id(sequence.id);
    item.set_first_position(sequence.token_count);
    item.mutable_lease()->set_lease_id(session.lease_id);
    for (const uint32_t layer : service::kLayers) {
      FitRows(session, staged, tokens, layer, *item.add_rows());
    }
    for (KnownSequence& known :
         session.sequences) {  // when the call is taken, this is where it ends
      if (known.id == sequence.id) known.token_count += tokens;
    }
    if (type == "AppendRequest") {
      *static_cast<v1::AppendRequest&>(message).add_items() = item;
    } else {
      auto& commit = static_cast<v1::CommitRequest&>(message);
      commit.set_first_position(item.first_position());
      commit.mutable_rows()->Swap(item.mutable_rows());
    }
  } else if (type == "TopKRequest" || type == "AttendRequest" || type == "ScoreRequest") {
    const uint64_t position = sequence.token_count == 0 ? 0 : sequence.token_count - 1;
    const v1::Query query = service::QueryAt(sequence.id, service::kLayers[0], position);
    const uint8_t kind = bytes.Byte();
    const v1::IndexSpec index = kind % 2 == 0 ? service::Flat() : service::Pq(2, 4);
    const v1::Selection selection = service::TokenCountSelection(index, 1, 2, 1 + kind / 8);
    if (type == "TopKRequest") {
      v1::TopKItem& item = *static_cast<v1::TopKRequest&>(message).add_items();
      *item.mutable_query() = query;
      *item.mutable_selection() = selection;
    } else if (type == "AttendRequest") {
      v1::AttendItem& item = *static_cast<v1::AttendRequest&>(message).add_items();
      *item.mutable_query() = query;
      *item.mutable_selection() = selection;
    } else {
      v1::ScoreItem& item = *static_cast<v1::ScoreRequest&>(message).add_items();
      *item.mutable_query() = query;
      *item.mutable_index() = index;
      item.mutable_tokens()->set_end(sequence.token_count);
    }
  } else if (type == "FetchBlocksRequest") {
    auto& request = static_cast<v1::FetchBlocksRequest&>(message);
    request.set_layer(service::kLayers[0]);
    request.add_ranges()->set_end(sequence.token_count);
  } else if (type == "FetchTokensRequest") {
    auto& request = static_cast<v1::FetchTokensRequest&>(message);
    request.set_layer(service::kLayers[1]);
    request.set_count(1);
    for (uint32_t head = 0; head < service::kKvHeads; ++head) request.add_positions(head);
  }
}

// A seed names its calls by the order of AllMethods.
std::string CallNamed(const std::string& name, const std::string& choices) {
  const std::vector<const MethodDescriptor*> methods = AllMethods();
  for (size_t i = 0; i < methods.size(); ++i) {
    if (methods[i]->name() == name) return static_cast<char>(i) + std::string(1, '\0') + choices;
  }
  Found("no rpc " + name);
}

}  // namespace

std::vector<std::string> Seeds() {
  const auto bytes = [](std::initializer_list<int> numbers) {
    std::string text;
    for (const int number : numbers) text += static_cast<char>(number);
    return text;
  };
  const std::string create = CallNamed("CreateSequence", bytes({0, 0}));
  const std::string create_live = CallNamed("CreateSequence", bytes({0, 3}));
  const auto append = [&](int tokens) { return CallNamed("Append", bytes({0, tokens})); };
  const std::string build = CallNamed("BuildIndex", bytes({0}));
  std::vector<std::string> seeds = {
      create + append(4) + append(5) + build + CallNamed("TopK", bytes({0, 1 + 8 * 9})) +
          CallNamed("Attend", bytes({0, 1 + 8 * 9})) + CallNamed("Score", bytes({0, 1})),
      create + CallNamed("Commit", bytes({0, 5})) + CallNamed("Commit", bytes({0, 3})) +
          CallNamed("FetchBlocks", bytes({0})) + CallNamed("FetchTokens", bytes({0})) +
          CallNamed("TruncateSequence", bytes({0})) + append(0),
      create_live + append(5) + append(6) + CallNamed("ForkSequence", bytes({0})) + append(0) +
          CallNamed("DropSequence", bytes({0})) + CallNamed("MatchPrefix", bytes({0})),
      create + CallNamed("Ingest", bytes({2, 0, 0, 3, 0, 3})) + CallNamed("Attach", bytes({0})) +
          CallNamed("Append", bytes({0, 1})) + CallNamed("Detach", bytes({0})) +
          CallNamed("SuspendSequence", bytes({0})) + CallNamed("ResumeSequence", bytes({0})),
      CallNamed("Session", bytes({0, 0}))};
  for (const MethodDescriptor* method : AllMethods()) {
    seeds.push_back(create + append(3) + CallNamed(method->name(), bytes({0, 0, 0, 0})));
  }
  return seeds;
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return pqcached::fuzz::RunOn<pqcached::fuzz::Sidecar>(data, size);
}
