// Store's calls that make and change sequences.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvstore/builder.h"
#include "kvstore/ingest.h"
#include "kvstore/store_impl.h"

namespace pqcached::kvstore {

absl::StatusOr<CreatedSequence> StoreImpl::CreateSequence(std::string_view tenant,
                                                          uint64_t cache_id,
                                                          const SequenceSpec& spec) {
  if (spec.live_index) return absl::UnimplementedError("live_index");
  auto cache = FindCache(tenant, cache_id);
  if (!cache.ok()) return cache.status();
  const MutexLock lock(&mutex_);
  uint32_t& count = sequence_counts_[cache_id];
  if (count >= engine_->options.max_sequences) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_sequences: cache ", cache_id, " has ", count, " sequences"));
  }
  ++count;
  const uint64_t sequence_id = next_id_++;
  auto sequence = std::make_shared<Sequence>(sequence_id, spec.session, (*cache)->layers.size());
  sequences_.emplace(sequence_id, Found{*std::move(cache), std::move(sequence)});
  return CreatedSequence{.sequence_id = sequence_id};
}

void StoreImpl::Forget(uint64_t sequence_id) {
  const MutexLock lock(&mutex_);
  const auto it = sequences_.find(sequence_id);
  if (it == sequences_.end()) return;
  --sequence_counts_[it->second.cache->cache_id];
  sequences_.erase(it);
}

absl::Status StoreImpl::DropSequence(std::string_view tenant, uint64_t sequence_id) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  Forget(sequence_id);
  found->sequence->Drop();  // a writer at work finds out when it publishes
  return absl::OkStatus();
}

uint32_t StoreImpl::DropSession(std::string_view session) {
  local_.Drop(session);  // first: its client takes no result any more
  std::vector<std::shared_ptr<Sequence>> dropped;
  {
    const MutexLock lock(&mutex_);
    for (const auto& [id, found] : sequences_) {
      if (found.sequence->session() == session) dropped.push_back(found.sequence);
    }
  }
  for (const auto& sequence : dropped) {
    Forget(sequence->sequence_id());
    sequence->Drop();  // a writer at work finds out when it publishes
  }
  return static_cast<uint32_t>(dropped.size());
}

absl::StatusOr<uint64_t> StoreImpl::TruncateSequence(std::string_view tenant, uint64_t sequence_id,
                                                     uint64_t token_count, uint64_t) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  auto lease = WriteLease::Take(found->sequence);
  if (!lease.ok()) return lease.status();
  return TruncateRows(*std::move(lease), token_count);
}

absl::StatusOr<std::unique_ptr<IngestTransaction>> StoreImpl::BeginIngest(std::string_view tenant,
                                                                          uint64_t sequence_id) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  auto lease = WriteLease::Take(found->sequence);
  if (!lease.ok()) return lease.status();
  return kvstore::BeginIngest(found->cache, *std::move(lease));
}

absl::StatusOr<uint64_t> StoreImpl::Append(std::string_view tenant, uint64_t sequence_id,
                                           uint64_t first_position,
                                           std::span<const LayerRows> layers) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  auto lease = WriteLease::Take(found->sequence);
  if (!lease.ok()) return lease.status();
  return AppendRows(found->cache, *std::move(lease), first_position, layers);
}

absl::Status StoreImpl::BuildIndex(std::string_view tenant, uint64_t sequence_id,
                                   const BuildSpec& spec,
                                   const std::function<bool(const BuildProgress&)>& progress) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  auto lease = WriteLease::Take(found->sequence);
  if (!lease.ok()) return lease.status();
  return BuildSequenceIndex(*found->cache, *std::move(lease), spec, progress);
}

absl::StatusOr<CreatedSequence> StoreImpl::ForkSequence(std::string_view, uint64_t, uint64_t,
                                                        std::string_view) {
  return absl::UnimplementedError("ForkSequence");
}

absl::StatusOr<uint64_t> StoreImpl::MatchPrefix(std::string_view, uint64_t,
                                                std::span<const uint32_t>, std::string_view) {
  return absl::UnimplementedError("MatchPrefix");
}

absl::Status StoreImpl::NameTokens(std::string_view, uint64_t, uint64_t,
                                   std::span<const uint32_t>) {
  return absl::UnimplementedError("token_ids");
}

absl::StatusOr<uint64_t> StoreImpl::SuspendSequence(std::string_view, uint64_t) {
  return absl::UnimplementedError("SuspendSequence");
}

absl::StatusOr<uint64_t> StoreImpl::ResumeSequence(std::string_view, uint64_t) {
  return absl::UnimplementedError("ResumeSequence");
}

}  // namespace pqcached::kvstore
