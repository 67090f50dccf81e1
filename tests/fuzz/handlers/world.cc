#include "tests/fuzz/handlers/world.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "absl/strings/str_join.h"
#include "pqcached/v1/admin.pb.h"
#include "tests/fuzz/handlers/calls.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using absl::StatusCode;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using kvstore::SteadyTime;

constexpr absl::Duration kHurry = absl::Milliseconds(3);
constexpr absl::Duration kPatience = absl::Seconds(20);  // less than libFuzzer's

service::Config ConfigOfWorld() {
  service::Config config = service::SmallConfig();
  config.max_pool_bytes = size_t{32} << 20;
  config.max_caches = 8;
  config.max_sequences = 24;
  config.threads = 1;
  config.merge_segments = 2;
  config.memory_check_interval = absl::ZeroDuration();
  config.max_staging_bytes = World::kSlotBytes;
  return config;
}

constexpr size_t kRacedTokens = 6;

size_t RacedBytes() { return kRacedTokens * kLayerCount * sizeof(Row); }

// By layer, keys before values.
std::vector<uint16_t> RacedNumbers(const RowTable& table, size_t which) {
  std::string all;
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    all += ElementsOf(table, layer, RacedContent(which), 0, kKeyElements);
    all += ElementsOf(table, layer, RacedContent(which), kKeyElements, kRowElements);
  }
  std::vector<uint16_t> numbers(all.size() / sizeof(uint16_t));
  std::memcpy(numbers.data(), all.data(), all.size());
  return numbers;
}

bool IsOperators(const Message& request) {
  return request.GetDescriptor() == v1::SetLogLevelRequest::descriptor();
}

bool NeedsSession(const Message& request) {
  return !IsOperators(request) && request.GetDescriptor() != v1::GetServerInfoRequest::descriptor();
}

// Sets how the call is made. Returns how often the request is to be changed.
int Hinder(Bytes& bytes, service::Client* client, World::Result* result) {
  const uint8_t how = bytes.Byte();
  if (how < 160) return 0;
  if (how < 208) return 1;
  if (how < 232) return 3;
  if (how < 244) {
    result->is_hindered = true;  // gives up at one of the first checks
    const auto checks = std::make_shared<std::atomic<int>>(how % 8);
    client->is_cancelled = [checks] { return checks->fetch_sub(1) <= 0; };
  } else if (how < 250) {
    result->is_hindered = true;
    client->deadline = SteadyTime::Now() + kHurry * (how % 3);
  } else {
    result->has_session = false;
    client->token = how == 250 ? "" : "another token";
  }
  return 0;
}

}  // namespace

v1::OpenCacheRequest World::CacheOf() {
  v1::OpenCacheRequest request;
  request.set_name("cache");
  request.set_model_fingerprint("model");
  request.set_capacity_bytes(size_t{3} << 20);
  v1::LayerGroup* group = request.add_layer_groups();
  group->set_kind(v1::LAYER_KIND_SELECTED);
  for (const uint32_t layer : kStoredLayers) group->add_layers(layer);
  group->set_kv_heads(1);
  group->set_query_heads(kQueryHeadCount);
  group->set_key_dim(kKeyElements);
  group->set_value_dim(kValueElements);
  group->set_dtype(v1::DTYPE_FLOAT16);
  *request.mutable_default_index() = service::Flat();
  return request;
}

const Content& RacedContent(size_t which) {
  static const std::array<Content, 2> contents = {Content{1, 2, 3, 4, 5, 6},
                                                  Content{101, 102, 103, 104, 105, 106}};
  return contents[which];
}

uint64_t RacedOffset(bool writes_nan) { return writes_nan ? RacedBytes() : 0; }

World::World(const Options& options)
    : options_(options), tenants_{Tenant("first", false), Tenant("second", true)} {
  if (options_.is_slow) keeper_ = std::make_unique<kvstore::testing::MemoryKeeper>();
  MakeSidecar();
  for (Tenant& tenant : tenants_) OpenTenant(tenant);
  ShareStaging();
}

void World::OpenTenant(Tenant& tenant) {
  tenant.client = sidecar_->Open("fuzz", /*mapped=*/true, tenant.name);
  v1::OpenCacheResponse opened;
  if (!sidecar_->Call(tenant.client, CacheOf(), &opened).ok()) Found("no cache");
  tenant.cache_id = opened.cache_id();
  OpenMemory(tenant);
}

void World::OpenMemory(Tenant& tenant) {
  tenant.generation = 0;
  tenant.staging = sidecar_->OpenStaging(tenant.client, kSlotBytes, 1);
  auto pool = sidecar_->store->OpenPool(tenant.name, "", tenant.cache_id);
  if (!pool.ok()) Found("no pool");
  tenant.pool = service::SharedMapping(std::move(pool->descriptor), pool->size_bytes, PROT_READ);
  if (tenant.staging.data() == nullptr || tenant.pool.data() == nullptr) Found("no memory");
}

void World::ShareStaging() {
  std::vector<Rewriter::Job> jobs;
  for (const Tenant& tenant : tenants_) {
    for (const bool writes_nan : {false, true}) {
      auto* begin = reinterpret_cast<uint16_t*>(tenant.staging.data() + RacedOffset(writes_nan));
      Rewriter::Job job{.memory = std::span(begin, RacedBytes() / sizeof(uint16_t)),
                        .first = RacedNumbers(tenant.rows, 0),
                        .second = RacedNumbers(tenant.rows, 1),
                        .writes_nan = writes_nan};
      std::copy(job.first.begin(), job.first.end(), begin);
      jobs.push_back(std::move(job));
    }
  }
  rewriter_.SetJobs(std::move(jobs));
}

void World::WriteStaging(const Tenant& tenant, bool writes_nan) {
  rewriter_.Write(static_cast<size_t>(&tenant - tenants_.data()) * 2 + (writes_nan ? 1 : 0));
}

void World::MakeSidecar() {
  // The machine's memory is not read: that takes longer than all else.
  sidecar_ = std::make_unique<service::DirectSidecar>(
      ConfigOfWorld(),
      service::Surroundings{.keeper = keeper_.get(), .memory_root = "/proc/self/no-folder"});
}

void World::Run(Bytes bytes) {
  ++inputs_;
  for (size_t i = 0; i < kMaxCalls && !bytes.empty(); ++i) {
    const uint8_t choice = bytes.Byte();
    CallOne(*this, tenants_[choice / 128], choice % 128, bytes);
  }
  CompareAll();
  for (Tenant& tenant : tenants_) End(tenant);
  ExpectNothingIsLeft();
}

World::Result World::Call(Tenant& tenant, Message& request, Message* response, Bytes& bytes) {
  Result result;
  service::Client client = tenant.client;
  const int changes = Hinder(bytes, &client, &result);
  if (IsOperators(request)) client.door = service::Door::kAdminSocket;
  for (int i = 0; i < changes; ++i) Mutate(request, bytes);
  result.is_changed = changes > 0;
  return Outcome(request, sidecar_->Call(client, request, response), result);
}

World::Result World::Ingest(Tenant& tenant, const std::vector<v1::IngestRequest*>& requests,
                            v1::IngestResponse* response, Bytes& bytes) {
  Result result;
  service::Client client = tenant.client;
  const int changes = Hinder(bytes, &client, &result);
  for (int i = 0; i < changes; ++i) Mutate(*requests[bytes.Below(requests.size())], bytes);
  result.is_changed = changes > 0;
  std::vector<std::string> messages;
  for (const v1::IngestRequest* each : requests) {
    messages.push_back(each->SerializePartialAsString());
  }
  return Outcome(*requests[0], sidecar_->Ingest(client, messages, response), result);
}

World::Result World::Outcome(const Message& request, absl::Status status, Result result) {
  result.status = std::move(status);
  const StatusCode code = result.status.code();
  if (code == StatusCode::kInternal || code == StatusCode::kUnknown ||
      code == StatusCode::kDataLoss) {
    Found(request.GetDescriptor()->name() + ": " + result.status.ToString());
  }
  return result;
}

bool World::Expect(Tenant& tenant, const Result& result, const Message& request,
                   StatusCode expected, bool may_lack) {
  const StatusCode code = result.status.code();
  if (result.is_changed) {
    Loosen(tenant, request, result.status.ok());
    return false;
  }
  if (!result.has_session && NeedsSession(request)) expected = StatusCode::kUnauthenticated;
  if (code == expected) return result.status.ok();
  const bool gave_up = code == StatusCode::kCancelled || code == StatusCode::kDeadlineExceeded;
  if (result.is_hindered && gave_up) return false;
  if (may_lack && code == StatusCode::kResourceExhausted) return false;
  // The indexer may be writing.
  const auto is_live = [](const Sequence& each) { return each.is_live; };
  const std::vector<Sequence>& all = tenant.sequences;
  if (code == StatusCode::kAborted && std::any_of(all.begin(), all.end(), is_live)) return false;
  Found(request.GetDescriptor()->name() + ": " + result.status.ToString() + " in place of " +
        absl::StatusCodeToString(expected) + "\n" + request.ShortDebugString().substr(0, 400));
}

void World::Loosen(Tenant& tenant, const Message& request, bool succeeded) {
  const std::string& type = request.GetDescriptor()->name();
  // Items before the one that fails are stored.
  if (type == "AppendRequest" && static_cast<const v1::AppendRequest&>(request).items_size() > 1) {
    succeeded = true;
  }
  const bool names = type == "CreateSequenceRequest" || type == "ForkSequenceRequest" ||
                     type == "ForkSequencesRequest" || type == "AppendRequest" ||
                     type == "IngestRequest";
  if (succeeded && names) tenant.has_loose_names = true;
  if (succeeded && type == "OpenCacheRequest") is_worn_ = true;
  if (succeeded && type == "OpenPageCacheRequest") is_worn_ = true;
  if (succeeded && type == "PutPagesRequest") {
    for (Tenant& each : tenants_) each.has_loose_pages = true;
  }
  LoosenIds(tenant, request, succeeded);
}

void World::LoosenIds(Tenant& tenant, const Message& message, bool succeeded) {
  const Reflection& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      const int count = field->is_repeated() ? reflection.FieldSize(message, field) : 1;
      for (int i = 0; i < count; ++i) {
        const Message& part = field->is_repeated()
                                  ? reflection.GetRepeatedMessage(message, field, i)
                                  : reflection.GetMessage(message, field);
        LoosenIds(tenant, part, succeeded);
      }
    }
    if (succeeded && field->name() == "dropped_sequence_ids") {
      for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
        Sequence* const own = tenant.Find(reflection.GetRepeatedUInt64(message, field, i));
        if (own != nullptr) own->is_loose = true;
      }
    }
    if (field->is_repeated() || field->cpp_type() != FieldDescriptor::CPPTYPE_UINT64) continue;
    const uint64_t number = reflection.GetUInt64(message, field);
    if (field->name() == "generation") tenant.generation = std::max(tenant.generation, number);
    for (Lease& lease : tenant.leases) {
      if (field->name() == "lease_id" && lease.id == number) lease.is_loose = true;
    }
    if (!succeeded || field->name() != "sequence_id") continue;
    if (Sequence* own = tenant.Find(number); own != nullptr) own->is_loose = true;
    if (Other(tenant).Find(number) != nullptr) Found("a call changed another tenant's sequence");
  }
}

void World::ReplaceSession(Tenant& tenant) {
  for (const Lease& lease : tenant.leases) CompareLease(tenant, lease);
  rewriter_.SetJobs({});
  sidecar_->Close(tenant.client);
  tenant.leases.clear();
  while (!tenant.sequences.empty()) tenant.Forget(tenant.sequences.back().id);
  tenant.client = sidecar_->Open("fuzz", /*mapped=*/true, tenant.name);
  OpenMemory(tenant);
  ShareStaging();
}

void World::Restart() {
  rewriter_.SetJobs({});
  sidecar_.reset();
  MakeSidecar();
  const kvstore::RecoveryReport report = sidecar_->store->Recovery();
  if (!report.recovered || report.dropped_records != 0) {
    Found("a restart has lost " + std::to_string(report.dropped_records) +
          " records: " + absl::StrJoin(report.dropped, "; "));
  }
  // What only leases, or work on an index, had in use.
  if (sidecar_->store->Stats(kvstore::kAllTenants).quarantined_bytes != 0)
    Found("a quarantine without clients");
  for (Tenant& tenant : tenants_) {
    tenant.leases.clear();
    tenant.client = sidecar_->Resume(tenant.client, /*mapped=*/true);
    OpenMemory(tenant);
  }
  ShareStaging();
  CompareAll();
}

void World::CompareAll() {
  for (Tenant& tenant : tenants_) {
    for (const Sequence& each : tenant.sequences) Compare(tenant, each);
    for (const Lease& each : tenant.leases) CompareLease(tenant, each);
  }
}

void World::Compare(const Tenant& tenant, const Sequence& sequence) {
  if (sequence.is_loose) return;
  kvstore::Store& store = *sidecar_->store;
  const auto info = store.DescribeSequence(tenant.name, sequence.id);
  if (!info.ok()) Found("a sequence is lost: " + info.status().ToString());
  if (info->token_count != sequence.content.size()) {
    Found("sequence " + std::to_string(sequence.id) + " has " + std::to_string(info->token_count) +
          " tokens, not " + std::to_string(sequence.content.size()));
  }
  if (sequence.is_suspended || sequence.content.empty()) return;
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    const auto rows = store.FetchBlocks(tenant.name, sequence.id, kStoredLayers[layer],
                                        {0, sequence.content.size()}, kvstore::RowPart::kRow);
    if (!rows.ok()) Found("rows are lost: " + rows.status().ToString());
    const std::byte* row = rows->data.data();
    for (const uint32_t content : sequence.content) {
      if (std::memcmp(row, tenant.rows.row(layer, content).data(), sizeof(Row)) != 0) {
        Found("other rows in sequence " + std::to_string(sequence.id));
      }
      row += sizeof(Row);
    }
  }
}

void World::End(Tenant& tenant) {
  for (const Lease& lease : tenant.leases) {
    v1::DetachRequest request;
    request.set_lease_id(lease.id);
    v1::DetachResponse response;
    const absl::Status status = sidecar_->Call(tenant.client, request, &response);
    if (!status.ok() && !lease.is_loose) Found("a lease is lost: " + status.ToString());
  }
  for (const Sequence& each : tenant.sequences) {
    v1::DropSequenceRequest request;
    request.set_sequence_id(each.id);
    v1::DropSequenceResponse response;
    const absl::Status status = sidecar_->Call(tenant.client, request, &response);
    if (!status.ok() && !each.is_loose) Found("a sequence is lost: " + status.ToString());
  }
  tenant.leases.clear();
  tenant.sequences.clear();
  if (tenant.is_staging_worn()) ReplaceSession(tenant);
  tenant.ended.clear();
  tenant.has_loose_names = false;
  tenant.rows.ForgetAdded();
}

// Evicts what is retained, or loose.
void World::EndPrefixes(Tenant& tenant) {
  kvstore::Store& store = *sidecar_->store;
  const auto left = store.ListSequences("", tenant.cache_id);
  for (const kvstore::SequenceInfo& info : *left) {
    if (!info.is_cached_prefix) Found("sequence " + std::to_string(info.sequence_id) + " is left");
    if (info.pin_left > absl::ZeroDuration()) {
      store.PinSequence("", info.sequence_id, absl::ZeroDuration()).IgnoreError();
    }
    const absl::Status status = store.EvictSequence(kvstore::kAllTenants, info.sequence_id);
    if (!status.ok()) Found("a prefix without holders stays: " + status.ToString());
  }
}

// Threads of the store may hold what was dropped as long as they look at it.
void World::ExpectNothingIsLeft() {
  kvstore::Store& store = *sidecar_->store;
  for (Tenant& tenant : tenants_) {
    for (const kvstore::CacheInfo& cache : store.ListCaches(tenant.name)) {
      if (cache.cache_id == tenant.cache_id && cache.sequence_count > 0) EndPrefixes(tenant);
      if (cache.spec.kind != kvstore::CacheKind::kPages) continue;
      const auto dropped = store.DropCache(tenant.name, cache.cache_id, /*force=*/true);
      if (!dropped.ok()) Found("a page cache stays: " + dropped.status().ToString());
    }
  }
  for (Tenant& tenant : tenants_) tenant.has_loose_pages = false;
  const auto used_bytes = [&] {
    size_t bytes = 0;
    for (const kvstore::CacheInfo& cache : store.ListCaches("")) bytes += cache.used_bytes;
    return bytes;
  };
  if (used_bytes() > 0 && !store.WaitIdle(SteadyTime::Now() + kPatience)) {
    Found("the store does not come to rest");
  }
  for (const SteadyTime until = SteadyTime::Now() + kPatience; used_bytes() > 0 && !is_worn_;) {
    if (SteadyTime::Now() > until) Found(std::to_string(used_bytes()) + " bytes are left");
    std::this_thread::yield();
  }
  if (!store.ListLeases(kvstore::kAllTenants).empty()) Found("a lease is left");
}

}  // namespace pqcached::fuzz
