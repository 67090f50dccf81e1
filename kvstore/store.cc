#include "kvstore/store_impl.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/describe.h"
#include "kvstore/live_index.h"
#include "kvstore/memory_limits.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kMaxThreads = 1024;

absl::Status CheckTokens(absl::string_view option, uint32_t tokens) {
  if (tokens == 0 || tokens > kMaxSegmentTokens || tokens % kBlockTokens != 0) {
    return InvalidArgument(option,
                           absl::StrCat(tokens, ", must be a multiple of ", kBlockTokens, " in [",
                                        kBlockTokens, ", ", kMaxSegmentTokens, "]"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const StoreOptions& options) {
  if (options.max_pool_bytes < kMinExtentBytes) {
    return InvalidArgument("max_pool_bytes", absl::StrCat(options.max_pool_bytes,
                                                          ", must be at least ", kMinExtentBytes));
  }
  if (options.max_caches == 0) return InvalidArgument("max_caches", "0");
  if (options.max_sequences == 0) return InvalidArgument("max_sequences", "0");
  if (!(options.max_retained_share >= 0 && options.max_retained_share <= 1)) {
    return InvalidArgument("max_retained_share",
                           absl::StrCat(options.max_retained_share, ", must lie in [0, 1]"));
  }
  if (options.codebook_tokens == 0) return InvalidArgument("codebook_tokens", "0");
  if (options.threads > kMaxThreads) {
    return InvalidArgument("threads",
                           absl::StrCat(options.threads, ", must be at most ", kMaxThreads));
  }
  if (options.exec.level > kernels::BestLevel()) {
    return InvalidArgument("exec.level", "the machine lacks these instructions");
  }
  if (absl::Status status = CheckTokens("segment_tokens", options.segment_tokens); !status.ok()) {
    return status;
  }
  return CheckTokens("tail_tokens", options.tail_tokens);
}

// Returns the first field in which the specs differ; empty if they agree. Capacities are not
// compared: an open cache keeps its own.
std::string FindDifference(const CacheSpec& a, const CacheSpec& b) {
  if (a.model_fingerprint != b.model_fingerprint) return "model_fingerprint";
  if (a.default_index != b.default_index) return "default_index";
  if (a.groups.size() != b.groups.size()) return "layer_groups";
  if (a.rank.group != b.rank.group) return "rank.group";
  if (a.rank.rank_count != b.rank.rank_count) return "rank.rank_count";
  if (a.rank.kv_head_begin != b.rank.kv_head_begin) return "rank.kv_head_begin";
  if (a.rank.layer_begin != b.rank.layer_begin) return "rank.layer_begin";
  for (size_t i = 0; i < a.groups.size(); ++i) {
    const LayerGroup& x = a.groups[i];
    const LayerGroup& y = b.groups[i];
    const std::string prefix = absl::StrCat("layer_groups[", i, "].");
    if (x.kind != y.kind) return prefix + "kind";
    if (x.layers != y.layers) return prefix + "layers";
    if (x.kind == LayerKind::kNone) continue;
    if (x.kv_heads != y.kv_heads) return prefix + "kv_heads";
    if (x.query_heads != y.query_heads) return prefix + "query_heads";
    if (x.key_dim != y.key_dim) return prefix + "key_dim";
    if (x.value_dim != y.value_dim) return prefix + "value_dim";
    if (x.dtype != y.dtype) return prefix + "dtype";
    if (x.scale() != y.scale()) return prefix + "softmax_scale";
    if (x.softcap != y.softcap) return prefix + "softcap";
    if (x.rope != y.rope) return prefix + "rope";
  }
  return {};
}

struct StoredLayer {
  uint32_t layer = 0;
  const LayerGroup* group = nullptr;
};

std::vector<StoredLayer> LayersOf(const CacheSpec& spec) {
  std::vector<StoredLayer> layers;
  for (const LayerGroup& group : spec.groups) {
    if (group.kind == LayerKind::kNone) continue;
    for (const uint32_t layer : group.layers) layers.push_back({layer, &group});
  }
  return layers;
}

// Returns the first field in which two ranks of a group are incompatible; empty if there is none.
// Ranks may hold different layers, or different kv heads of a layer. Paths of groups
// are those of `b`.
std::string FindIncompatibleField(const CacheSpec& a, const CacheSpec& b) {
  if (a.model_fingerprint != b.model_fingerprint) return "model_fingerprint";
  if (a.rank.rank_count != b.rank.rank_count) return "rank.rank_count";
  if (a.default_index != b.default_index) return "default_index";
  for (const StoredLayer& x : LayersOf(a)) {
    for (const StoredLayer& y : LayersOf(b)) {
      if (x.layer != y.layer) continue;
      const std::string group = absl::StrCat("layer_groups[", y.group - b.groups.data(), "].");
      if (x.group->key_dim != y.group->key_dim) return group + "key_dim";
      if (x.group->value_dim != y.group->value_dim) return group + "value_dim";
      if (x.group->group_size() != y.group->group_size()) return group + "query_heads";
      if (x.group->dtype != y.group->dtype) return group + "dtype";
      if (x.group->scale() != y.group->scale()) return group + "softmax_scale";
      if (x.group->softcap != y.group->softcap) return group + "softcap";
      if (x.group->rope != y.group->rope) return group + "rope";
      const uint32_t a_begin = a.rank.kv_head_begin;
      const uint32_t b_begin = b.rank.kv_head_begin;
      if (a_begin < b_begin + y.group->kv_heads && b_begin < a_begin + x.group->kv_heads) {
        return "rank.kv_head_begin";
      }
    }
  }
  return {};
}

}  // namespace

absl::Status StoreImpl::CheckRanks(std::string_view tenant, const CacheSpec& spec) {
  if (spec.rank.group.empty()) return absl::OkStatus();
  for (const auto& [id, cache] : caches_) {
    const CacheSpec& other = cache->spec;
    if (cache->tenant != tenant || other.name != spec.name) continue;
    if (const std::string field = FindIncompatibleField(other, spec); !field.empty()) {
      return FailedPrecondition(field, absl::StrCat("does not go with that of rank ",
                                                    other.rank.rank, " of cache ", spec.name));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<CacheInfo> StoreImpl::OpenCache(std::string_view tenant, const CacheSpec& spec) {
  if (absl::Status status = ValidateCacheSpec(spec); !status.ok()) return status;
  const size_t machine_bytes = ReadMemoryLimits(engine_->options.memory_root).available_bytes;
  std::shared_ptr<const Cache> found;
  bool is_new = false;
  {
    const MutexLock lock(&mutex_);
    for (const auto& [id, cache] : caches_) {
      // Ranks of a group have one cache each, all under one name.
      const bool same_rank =
          cache->spec.rank.group != spec.rank.group || cache->spec.rank.rank == spec.rank.rank;
      if (cache->tenant == tenant && cache->spec.name == spec.name && same_rank) found = cache;
    }
    if (found == nullptr) {
      if (absl::Status status = CheckRanks(tenant, spec); !status.ok()) return status;
      auto made = MakeCache(tenant, spec, machine_bytes);
      if (!made.ok()) return made.status();
      found = *std::move(made);
      is_new = true;
    }
  }
  if (is_new) InstallReclaimer(found);
  if (const std::string field = FindDifference(found->spec, spec); !field.empty()) {
    return FailedPrecondition(field,
                              absl::StrCat("cache ", spec.name, " is open with another value"));
  }
  return DescribeCache(found);
}

absl::StatusOr<std::shared_ptr<const Cache>> StoreImpl::MakeCache(std::string_view tenant,
                                                                  const CacheSpec& spec,
                                                                  size_t machine_bytes) {
  const StoreOptions& options = engine_->options;
  if (caches_.size() >= options.max_caches) {
    return ResourceExhausted("max_caches", absl::StrCat(options.max_caches, " caches are open"),
                             kRetryMemory);
  }
  if (absl::Status status = CheckTenantQuota(tenant, spec.capacity_bytes); !status.ok()) {
    return status;
  }
  size_t open_bytes = 0;
  size_t untouched_bytes = 0;  // reserved, though the machine still counts them as available
  for (const auto& [id, cache] : caches_) {
    open_bytes += cache->pool->usage().capacity_bytes;
    untouched_bytes += cache->pool->untouched_bytes();
  }
  const size_t allowed_bytes =
      options.max_pool_bytes - std::min(options.max_pool_bytes, open_bytes);
  if (spec.capacity_bytes > allowed_bytes) {
    return ResourceExhausted(
        "capacity_bytes",
        absl::StrCat(spec.capacity_bytes, "; max_pool_bytes leaves ", allowed_bytes, ", ",
                     spec.capacity_bytes - allowed_bytes, " bytes short"),
        spec.capacity_bytes > options.max_pool_bytes ? kNoRetry : kRetryMemory);
  }
  const size_t available_bytes = machine_bytes - std::min(machine_bytes, untouched_bytes);
  if (spec.capacity_bytes > available_bytes) {
    return ResourceExhausted(
        "capacity_bytes",
        absl::StrCat(spec.capacity_bytes, "; the machine has ", available_bytes, ", ",
                     spec.capacity_bytes - available_bytes, " bytes short"),
        kRetryMemory);
  }
  auto cache = MakeMemory(tenant, spec);
  if (!cache.ok()) return cache.status();
  caches_.emplace((*cache)->cache_id, *cache);
  return cache;
}

absl::StatusOr<std::shared_ptr<const Cache>> StoreImpl::FindCache(std::string_view tenant,
                                                                  uint64_t cache_id) const {
  const MutexLock lock(&mutex_);
  const auto it = caches_.find(cache_id);
  if (it == caches_.end() || it->second->tenant != tenant) {
    return NotFound("cache_id", absl::StrCat("no cache ", cache_id));
  }
  return it->second;
}

absl::StatusOr<StoreImpl::Found> StoreImpl::FindInAnyTenant(uint64_t sequence_id) const {
  const MutexLock lock(&mutex_);
  const auto it = sequences_.find(sequence_id);
  if (it == sequences_.end()) {
    return NotFound("sequence_id",
                    evicted_.Contains(sequence_id)
                        ? absl::StrCat("sequence ", sequence_id, " was evicted: memory was short")
                        : absl::StrCat("no sequence ", sequence_id));
  }
  return it->second;
}

absl::StatusOr<StoreImpl::Found> StoreImpl::Find(std::string_view tenant,
                                                 uint64_t sequence_id) const {
  auto found = FindInAnyTenant(sequence_id);
  if (found.ok() && found->cache->tenant != tenant) {
    return NotFound("sequence_id", absl::StrCat("no sequence ", sequence_id));
  }
  if (found.ok()) found->sequence->holds().Touch();
  return found;
}

absl::StatusOr<Reading> StoreImpl::Read(std::string_view tenant, uint64_t sequence_id) const {
  auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  auto snapshot = found->sequence->Read();
  if (!snapshot.ok()) return snapshot.status();
  return Reading{.cache = std::move(found->cache), .snapshot = *std::move(snapshot)};
}

absl::StatusOr<Selected> StoreImpl::TopK(std::string_view tenant, uint64_t sequence_id,
                                         const Query& query, const Selection& selection) {
  const auto reading = Read(tenant, sequence_id);
  if (!reading.ok()) return reading.status();
  return SelectTokens(*reading, query, selection);
}

absl::StatusOr<Scores> StoreImpl::Score(std::string_view tenant, uint64_t sequence_id,
                                        const Query& query, const IndexDescriptor& index,
                                        TokenRange tokens) {
  const auto reading = Read(tenant, sequence_id);
  if (!reading.ok()) return reading.status();
  return ScoreTokens(*reading, query, index, tokens);
}

absl::StatusOr<Rows> StoreImpl::FetchBlocks(std::string_view tenant, uint64_t sequence_id,
                                            uint32_t layer, TokenRange tokens, RowPart part) {
  const auto reading = Read(tenant, sequence_id);
  if (!reading.ok()) return reading.status();
  return FetchRows(*reading, layer, tokens, part);
}

absl::StatusOr<Rows> StoreImpl::FetchTokens(std::string_view tenant, uint64_t sequence_id,
                                            uint32_t layer, std::span<const uint32_t> positions,
                                            RowPart part) {
  const auto reading = Read(tenant, sequence_id);
  if (!reading.ok()) return reading.status();
  return FetchRowsAt(*reading, layer, positions, part);
}

absl::StatusOr<Attention> StoreImpl::Attend(std::string_view tenant, uint64_t sequence_id,
                                            const Query& query, const Selection& selection,
                                            bool want_positions) {
  const auto reading = Read(tenant, sequence_id);
  if (!reading.ok()) return reading.status();
  return AttendSelection(*reading, query, selection, want_positions);
}

absl::StatusOr<Attention> StoreImpl::AttendPositions(std::string_view tenant, uint64_t sequence_id,
                                                     const Query& query,
                                                     std::span<const uint32_t> positions) {
  const auto reading = Read(tenant, sequence_id);
  if (!reading.ok()) return reading.status();
  return AttendAt(*reading, query, positions);
}

CacheInfo StoreImpl::DescribeCache(const std::shared_ptr<const Cache>& cache) const {
  const PoolUsage usage = cache->pool->usage();
  CacheInfo info{.cache_id = cache->cache_id,
                 .tenant = cache->tenant,
                 .spec = cache->spec,
                 .capacity_bytes = usage.capacity_bytes,
                 .used_bytes = usage.used_bytes,
                 .free_bytes = usage.free_bytes,
                 .largest_free_bytes = usage.largest_free_bytes,
                 .page_bytes = cache->pool->page_bytes(),
                 .limit_bytes = usage.limit_bytes};
  info.cached_prefix_count =
      static_cast<uint32_t>(SequencesOf(*cache, /*retained_only=*/true).size());
  const MutexLock lock(&mutex_);
  const auto it = sequence_counts_.find(cache->cache_id);
  if (it != sequence_counts_.end()) info.sequence_count = it->second;
  return info;
}

std::vector<CacheInfo> StoreImpl::ListCaches(std::string_view tenant) {
  std::vector<std::shared_ptr<const Cache>> caches;
  {
    const MutexLock lock(&mutex_);
    for (const auto& [id, cache] : caches_) {
      if (tenant.empty() || cache->tenant == tenant) caches.push_back(cache);
    }
  }
  std::vector<CacheInfo> infos;
  infos.reserve(caches.size());
  for (const auto& cache : caches) infos.push_back(DescribeCache(cache));
  return infos;
}

absl::StatusOr<std::vector<SequenceInfo>> StoreImpl::ListSequences(std::string_view tenant,
                                                                   uint64_t cache_id) {
  std::vector<Found> all;
  {
    const MutexLock lock(&mutex_);
    const auto it = caches_.find(cache_id);
    if (it == caches_.end() || (!tenant.empty() && it->second->tenant != tenant)) {
      return NotFound("cache_id", absl::StrCat("no cache ", cache_id));
    }
    for (const auto& [id, found] : sequences_) {
      if (found.cache->cache_id == cache_id) all.push_back(found);
    }
  }
  std::vector<SequenceInfo> infos;
  for (const Found& found : all) {
    const auto snapshot = found.sequence->Peek();
    if (!snapshot.ok()) continue;  // dropped concurrently
    infos.push_back(Describe(*found.cache, *found.sequence, **snapshot));
  }
  std::sort(infos.begin(), infos.end(), [](const SequenceInfo& a, const SequenceInfo& b) {
    return a.sequence_id < b.sequence_id;
  });
  return infos;
}

absl::StatusOr<SequenceInfo> StoreImpl::DescribeSequence(std::string_view tenant,
                                                         uint64_t sequence_id) {
  const auto found = tenant.empty() ? FindInAnyTenant(sequence_id) : Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  const auto snapshot = found->sequence->Peek();
  if (!snapshot.ok()) return snapshot.status();
  SequenceInfo info = Describe(*found->cache, *found->sequence, **snapshot);
  info.live_index = engine_->live->StatusOf(sequence_id);
  return info;
}

absl::StatusOr<std::unique_ptr<Store>> Store::Create(const StoreOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  const uint32_t threads =
      options.threads > 0 ? options.threads : std::max(1u, std::thread::hardware_concurrency());
  auto store = std::make_unique<StoreImpl>(options, threads);
  if (absl::Status status = store->Open(); !status.ok()) return status;
  return store;
}

}  // namespace pqcached::kvstore
