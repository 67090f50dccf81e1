// Calls that create, cut and end sequences, and build their indexes.
#include <set>
#include <string>

#include "tests/fuzz/handlers/calls.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using absl::StatusCode;

constexpr uint64_t kPromptLengths[] = {1, 127, 128, 129, 200, 256, 257, kPromptTokens};
constexpr char kExtraKey[] = "extra";
constexpr uint32_t kMinorLiveKind = 240;  // kinds from here on have an incremental index

size_t CommonTokens(const std::vector<uint32_t>& names, size_t stored,
                    std::span<const uint32_t> prompt) {
  const size_t most = std::min(stored, prompt.size());
  size_t same = 0;
  while (same < most && names[same] == prompt[same]) ++same;
  return same / kvstore::kBlockTokens * kvstore::kBlockTokens;
}

// Watches the cache of a tenant, whose stream must begin with all that MatchPrefix has found, and
// which does not exist for the other tenant.
void CheckEvents(World& world, const Tenant& tenant, const v1::MatchPrefixRequest& matched,
                 uint64_t count) {
  service::DirectSidecar& sidecar = world.sidecar();
  v1::WatchEventsRequest request;
  request.set_cache_id(matched.cache_id());
  v1::CacheEvents events;
  if (const absl::Status status = sidecar.Call(tenant.client, request, &events); !status.ok()) {
    Found("WatchEvents: " + status.ToString());
  }
  v1::MatchPrefixRequest asks_for_keys = matched;
  asks_for_keys.set_want_keys(true);
  v1::MatchPrefixResponse prompt;
  if (!sidecar.Call(tenant.client, asks_for_keys, &prompt).ok()) Found("MatchPrefix with keys");
  count = std::min(count, prompt.token_count());  // some may have been evicted since
  std::set<std::string> stored;
  for (const v1::CacheEvent& event : events.events()) stored.insert(event.key());
  constexpr int kMostEvents = 256;  // of one message
  for (uint64_t i = 0; i < count / 128 && events.events_size() < kMostEvents; ++i) {
    if (!stored.contains(prompt.keys(static_cast<int>(i)))) Found("WatchEvents lacks a key");
  }
  if (sidecar.Call(world.Other(tenant).client, request, &events).code() != StatusCode::kNotFound) {
    Found("WatchEvents of another tenant's cache");
  }
}

// Throws out a count of matched tokens that the model does not allow: all that sequences have
// stored must be found, and what ended ones had may be.
void CheckMatch(const Tenant& tenant, std::span<const uint32_t> prompt, bool has_extra_key,
                uint64_t count) {
  if (tenant.has_loose_names) return;
  size_t least = 0;
  for (const Sequence& each : tenant.sequences) {
    if (each.is_loose || each.has_extra_key != has_extra_key) continue;
    least = std::max(least, CommonTokens(each.ids, each.named(), prompt));
  }
  size_t most = least;
  for (const Sequence& each : tenant.sequences) {
    if (!each.is_loose || each.has_extra_key != has_extra_key) continue;
    most = std::max(most, CommonTokens(each.ids, each.ids.size(), prompt));
  }
  for (const Names& each : tenant.ended) {
    if (each.has_extra_key != has_extra_key) continue;
    most = std::max(most, CommonTokens(each.ids, each.ids.size(), prompt));
  }
  if (count < least || count > most) {
    Found("matched " + std::to_string(count) + " tokens, not " + std::to_string(least) + " to " +
          std::to_string(most));
  }
}

bool RemembersIndexes(const Sequence& one) { return !one.is_live && !one.content.empty(); }

}  // namespace

void Create(World& world, Tenant& tenant, Bytes& bytes) {
  if (tenant.sequences.size() >= World::kMaxSequences) return Drop(world, tenant, bytes);
  const uint8_t kind = bytes.Byte();
  const uint8_t prompt_kind = bytes.Byte();
  const Prompt& prompt = PromptOf(prompt_kind % kFamilies);
  const size_t length = kind % 2 == 0 ? 0 : kPromptLengths[prompt_kind / kFamilies % 8];
  Sequence made;
  made.ids.assign(prompt.ids.begin(), prompt.ids.begin() + static_cast<ptrdiff_t>(length));
  made.has_extra_key = kind / 2 % 4 == 3;
  made.is_live = world.is_slow() && kind >= kMinorLiveKind;
  v1::CreateSequenceRequest request;
  request.set_cache_id(tenant.cache_id);
  request.mutable_token_ids()->Add(made.ids.begin(), made.ids.end());
  if (made.has_extra_key) request.set_extra_key(kExtraKey);
  if (made.is_live) {
    *request.mutable_live_index()->mutable_index() = service::Pq(2, 4);
    request.mutable_live_index()->set_iterations(1);
  }
  v1::CreateSequenceResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  const bool exact = world.Expect(tenant, result, request, StatusCode::kOk, /*may_lack=*/true);
  if (!result.status.ok()) return;
  made.id = response.sequence_id();
  if (made.id == 0 || world.IsKnown(made.id)) Found("an id is used twice");
  made.is_loose = !exact || (tenant.has_loose_names && response.token_count() > 0);
  if (exact) CheckMatch(tenant, made.ids, made.has_extra_key, response.token_count());
  made.content = prompt.content;
  made.content.resize(std::min<size_t>(response.token_count(), made.content.size()));
  if (!made.content.empty()) {  // a prefix is shared with its indexes
    const auto info = world.sidecar().store->DescribeSequence(tenant.name, made.id);
    if (info.ok()) made.indexes = info->indexes;
  }
  tenant.sequences.push_back(std::move(made));
}

void Fork(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* parent = Choose(tenant, bytes);
  if (parent == nullptr || tenant.sequences.size() >= World::kMaxSequences) {
    return Drop(world, tenant, bytes);
  }
  Sequence child = *parent;
  const uint64_t stored = child.content.size();
  const uint8_t choice = bytes.Byte();
  const uint64_t count = choice == 255 ? stored + 1 : choice % 4 == 0 ? 0 : stored * choice / 256;
  const bool by_list = choice % 3 == 1;
  v1::ForkSequencesRequest list;
  v1::ForkSequencesResponse answers;
  v1::ForkSequenceRequest single;
  v1::ForkSequenceResponse answer;
  v1::ForkSequenceRequest& fork = by_list ? *list.add_items() : single;
  fork.set_sequence_id(parent->id);
  fork.set_token_count(count);
  google::protobuf::Message& request =
      by_list ? static_cast<google::protobuf::Message&>(list) : single;
  const World::Result result = by_list ? world.Call(tenant, list, &answers, bytes)
                                       : world.Call(tenant, single, &answer, bytes);
  const v1::ForkSequenceResponse& response = answers.items_size() > 0 ? answers.items(0) : answer;
  StatusCode expected = ExpectedOf(*parent);
  if (expected == StatusCode::kOk && count > stored) expected = StatusCode::kOutOfRange;
  const bool exact = child.is_loose
                         ? !result.is_changed && result.status.ok()
                         : world.Expect(tenant, result, request, expected, /*may_lack=*/true);
  if (!result.status.ok()) return;
  if (by_list && answers.items_size() == 0) return;  // the changed list was empty
  child.id = response.sequence_id();
  if (world.IsKnown(child.id)) Found("an id is used twice");
  child.is_loose = child.is_loose || !exact;
  if (count > 0) child.content.resize(std::min<size_t>(count, stored));
  child.ids.resize(child.named());
  child.is_pinned = false;
  if (child.content.empty()) child.indexes.clear();
  if (!child.is_loose && response.token_count() != child.content.size()) {
    Found("a fork has another count of tokens");
  }
  tenant.sequences.push_back(std::move(child));
  for (int i = 1; i < answers.items_size(); ++i) {  // of a changed list
    Sequence other = tenant.sequences.back();
    other.id = answers.items(i).sequence_id();
    other.is_loose = true;
    tenant.sequences.push_back(std::move(other));
  }
}

void Drop(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (one == nullptr) return;
  v1::DropSequenceRequest request;
  request.set_sequence_id(one->id);
  v1::DropSequenceResponse response;
  const uint64_t id = one->id;
  const bool is_loose = one->is_loose;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (is_loose && !result.status.ok()) return;
  if (world.Expect(tenant, result, request, StatusCode::kOk)) tenant.Forget(id);
}

void Truncate(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (one == nullptr) return;
  const uint64_t stored = one->content.size();
  const uint8_t choice = bytes.Byte();
  const uint64_t count = choice == 255  ? stored + 1
                         : choice < 128 ? stored - std::min<uint64_t>(stored, choice % 8)
                                        : stored * (choice - 128) / 128;
  v1::TruncateSequenceRequest request;
  request.set_sequence_id(one->id);
  request.set_token_count(count);
  if (one->is_loose) return;
  if (choice % 2 == 0) *request.mutable_lease() = world.LeaseStateOf(tenant, one->id);
  v1::TruncateSequenceResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  StatusCode expected = ExpectedOf(*one);
  if (expected == StatusCode::kOk && count > stored) expected = StatusCode::kInvalidArgument;
  // A lease that was revoked is refused.
  if (request.lease().lease_id() != 0 && absl::IsFailedPrecondition(result.status)) return;
  if (!world.Expect(tenant, result, request, expected)) return;
  if (response.token_count() != count) Found("a roll-back has another count of tokens");
  if (count == stored) return;
  for (Lease& lease : tenant.leases) {  // the holder itself gives up what it cuts off
    if (lease.id != request.lease().lease_id() || lease.content.size() <= count) continue;
    lease.content.resize(count);
  }
  one->ids.resize(std::min<size_t>(one->ids.size(), count));
  one->content.resize(count);
  if (count == 0) one->indexes.clear();
}

void Suspend(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (one == nullptr || one->is_loose) return;
  v1::SuspendSequenceRequest request;
  request.set_sequence_id(one->id);
  v1::SuspendSequenceResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (world.Expect(tenant, result, request, StatusCode::kOk)) one->is_suspended = true;
}

void Resume(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (one == nullptr || one->is_loose) return;
  v1::ResumeSequenceRequest request;
  request.set_sequence_id(one->id);
  v1::ResumeSequenceResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, StatusCode::kOk)) return;
  one->is_suspended = false;
  if (response.token_count() != one->content.size()) Found("another count of tokens");
}

void Match(World& world, Tenant& tenant, Bytes& bytes) {
  const uint8_t kind = bytes.Byte();
  const Prompt& prompt = PromptOf(kind % kFamilies);
  const bool has_extra_key = kind / 32 % 4 == 3;
  const std::span<const uint32_t> ids =
      std::span(prompt.ids).first(kPromptLengths[kind / kFamilies % 8]);
  v1::MatchPrefixRequest request;
  request.set_cache_id(tenant.cache_id);
  request.mutable_token_ids()->Add(ids.begin(), ids.end());
  if (has_extra_key) request.set_extra_key(kExtraKey);
  v1::MatchPrefixResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, StatusCode::kOk)) return;
  CheckMatch(tenant, ids, has_extra_key, response.token_count());
  CheckEvents(world, tenant, request, response.token_count());
}

void Build(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (one == nullptr || one->is_loose) return;
  const uint8_t kind = bytes.Byte();
  v1::BuildIndexRequest request;
  request.set_sequence_id(one->id);
  *request.mutable_index() = service::Pq(1 + kind % 2, 4);
  request.set_iterations(1);
  const kvstore::IndexDescriptor index = {
      .kind = kvstore::IndexKind::kPq, .subspace_count = 1u + kind % 2, .bits = 4};
  v1::BuildProgress response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (one->is_live && !result.is_changed) return;
  StatusCode expected = ExpectedOf(*one);
  const std::vector<kvstore::IndexDescriptor>& built = one->indexes;
  const bool has_it = std::find(built.begin(), built.end(), index) != built.end();
  if (expected == StatusCode::kOk && has_it) expected = StatusCode::kAlreadyExists;
  if (one->content.empty()) expected = StatusCode::kFailedPrecondition;
  if (world.Expect(tenant, result, request, expected, /*may_lack=*/true) &&
      RemembersIndexes(*one)) {
    one->indexes.push_back(index);
  }
}

void ClosePrefill(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (one == nullptr || one->is_loose) return;
  v1::ClosePrefillRequest request;
  request.set_sequence_id(one->id);
  v1::ClosePrefillResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  world.Expect(tenant, result, request, ExpectedOf(*one), /*may_lack=*/true);
}

}  // namespace pqcached::fuzz
