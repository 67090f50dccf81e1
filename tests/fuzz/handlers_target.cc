// Fuzz target: the inputs of all handlers, without a server or a socket. An input is a sequence of
// calls of a local session, each of any rpc of the services, with a message that fits what is stored
// and was then changed, or with bytes that are none.
//
// Between its inputs nothing may be left: no sequence, no lease, no byte of the pools in use.
#include <google/protobuf/arena.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "pqcached/v1/admin.pb.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/target.h"
#include "tests/service/handlers/direct_sidecar.h"

namespace pqcached::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::MethodDescriptor;
using google::protobuf::Reflection;
using kvstore::SteadyTime;

constexpr size_t kMaxCalls = 12;
constexpr size_t kMaxSequences = 6;
constexpr size_t kMaxMessagesOfStream = 3;
constexpr uint64_t kSlotBytes = uint64_t{1} << 20;
constexpr uint32_t kSlots = 2;
// What is stored by earlier inputs in other caches ends with the sidecar.
constexpr int kInputsPerSidecar = 1000;
constexpr absl::Duration kPatience = absl::Seconds(20);  // less than libFuzzer's
constexpr absl::Duration kHurry = absl::Milliseconds(3);

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
  service::Client client;
  service::SharedMapping staging;
  uint64_t cache_id = 0;
  uint64_t lease_id = 0;
  uint64_t generation = 0;
  std::vector<KnownSequence> sequences;
};

service::Config FuzzConfig() {
  service::Config config = service::SmallConfig();
  config.max_pool_bytes = size_t{512} << 20;
  config.threads = 1;
  config.retain = false;  // each input leaves nothing
  return config;
}

class Sidecar {
 public:
  void Run(Bytes bytes) {
    {
      Session session;
      session.client = sidecar_.Open("fuzz" + std::to_string(inputs_++), /*mapped=*/true);
      v1::OpenCacheResponse opened;
      if (!sidecar_.Call(session.client, service::CacheRequest(), &opened).ok()) {
        Found("a cache that fits is refused");
      }
      session.cache_id = opened.cache_id();
      for (size_t i = 0; i < kMaxCalls && !bytes.empty(); ++i) CallOne(session, bytes);
      sidecar_.Close(session.client);
    }
    ExpectNothingIsLeft();
  }

  bool worn() const { return inputs_ >= kInputsPerSidecar; }

 private:
  void CallOne(Session& session, Bytes& bytes) {
    const MethodDescriptor& method = *methods_[bytes.Below(methods_.size())];
    const uint8_t how = bytes.Byte();
    const size_t messages = method.client_streaming() ? 1 + bytes.Below(kMaxMessagesOfStream) : 1;
    std::vector<std::string> requests;
    for (size_t i = 0; i < messages; ++i)
      requests.push_back(Request(session, method, how, i, bytes));
    service::Client client = session.client;
    if (how % 32 == 31) client.token = OtherToken(bytes);
    if (how / 32 == 6) {  // gives up at one of the first checks
      const auto checks = std::make_shared<std::atomic<int>>(bytes.Below(8));
      client.is_cancelled = [checks] { return checks->fetch_sub(1) <= 0; };
    }
    const absl::Duration patience = how / 32 == 7 ? kHurry : kPatience;
    const SteadyTime begun = SteadyTime::Now();
    client.deadline = begun + patience;
    Message& response = *Prototype(method.output_type()).New(&arena_);
    const absl::Status status = Call(client, method, requests, response);
    if (SteadyTime::Now() > begun + patience + absl::Seconds(1)) {
      Found(method.full_name() + " outlived its deadline by more than a second");
    }
    if (absl::IsInternal(status) || absl::IsUnknown(status) || absl::IsDataLoss(status)) {
      Found(method.full_name() + ": " + std::string(status.message()));
    }
    if (status.ok()) Walk(session, response);
    arena_.Reset();
  }

  static std::string OtherToken(Bytes& bytes) { return bytes.Text(bytes.Below(40)); }

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

  // Calls an rpc. Bytes that are no request end the call before its handler, as they do in gRPC.
  absl::Status Call(const service::Client& client, const MethodDescriptor& method,
                    const std::vector<std::string>& requests, Message& response);
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
    const SteadyTime until = SteadyTime::Now() + kPatience;
    std::string left;
    do {
      left.clear();
      for (const kvstore::CacheInfo& cache : sidecar_.store->ListCaches("")) {
        if (cache.used_bytes == 0 && cache.sequence_count == 0) continue;
        left += cache.spec.name + ": " + std::to_string(cache.sequence_count) + " sequences, " +
                std::to_string(cache.used_bytes) + " bytes; ";
      }
      const kvstore::StoreStats stats = sidecar_.store->Stats();
      if (stats.lease_count != 0) left += std::to_string(stats.lease_count) + " leases; ";
      if (stats.staging_bytes != 0) left += std::to_string(stats.staging_bytes) + " of staging; ";
      if (left.empty()) return;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    } while (SteadyTime::Now() < until);
    Found("left when the session had ended: " + left);
  }

  const std::vector<const MethodDescriptor*> methods_ = AllMethods();
  service::DirectSidecar sidecar_{FuzzConfig()};
  google::protobuf::Arena arena_;
  std::map<std::pair<uint32_t, uint64_t>, v1::LayerRows> rows_;  // by layer, tokens
  int inputs_ = 0;
};

absl::Status Sidecar::Call(const service::Client& client, const MethodDescriptor& method,
                           const std::vector<std::string>& requests, Message& response) {
  if (method.name() == "Ingest") {
    return sidecar_.Ingest(client, requests, static_cast<v1::IngestResponse*>(&response));
  }
  Message& request = Empty(&method);
  if (!request.ParseFromString(requests[0])) return absl::InvalidArgumentError("no request");
  if (method.name() != "Session") return sidecar_.Call(client, request, &response);
  const auto opened =
      sidecar_.handlers.sessions.Open(static_cast<const v1::SessionRequest&>(request).open());
  if (opened.ok()) sidecar_.handlers.sessions.Close(*opened);
  return opened.status();
}

void Sidecar::FitRows(Session& session, bool staged, uint64_t tokens, uint32_t layer,
                      v1::LayerRows& rows) {
  v1::LayerRows& known = rows_[{layer, tokens}];
  if (known.layer() == 0) known = service::RowsOf(layer, 0, tokens);
  rows = known;
  if (!staged) return;
  if (session.staging.data() == nullptr) {
    session.staging = sidecar_.OpenStaging(session.client, kSlotBytes, kSlots);
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
      create_live + CallNamed("Ingest", bytes({2, 0, 0, 3, 0, 3})) +
          CallNamed("ClosePrefill", bytes({0})) + CallNamed("TopK", bytes({0, 1})) + append(4),
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
