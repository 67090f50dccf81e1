#include "kvstore/evict/admission.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/index/builder.h"
#include "kvstore/memory/free_map.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Returns the number of codebook generations that SplitGenerations (index/builder.h) makes of
// segments that are all full except the last.
uint64_t GenerationCount(uint64_t tokens, uint64_t segment_tokens, uint64_t codebook_tokens) {
  const uint64_t segments = CeilDiv(codebook_tokens, segment_tokens);
  const uint64_t whole = tokens / (segments * segment_tokens);
  const uint64_t left = tokens % (segments * segment_tokens);
  return std::max<uint64_t>(1, whole + (left >= codebook_tokens ? 1 : 0));
}

void AddSegments(const Cache& cache, const IndexDescriptor& index, uint32_t slot_capacity,
                 uint64_t segment_count, ExtentDemand& demand) {
  std::vector<size_t> sizes_bytes;
  SegmentRows::AppendSizes(cache.layers, slot_capacity, sizes_bytes);
  if (IsBuilt(index)) {
    SegmentIndex::AppendSizes(cache.layers, index, slot_capacity, sizes_bytes);
  }
  for (const size_t size_bytes : sizes_bytes) demand.Add(size_bytes, segment_count);
}

// Returns the extents that a prefill with its index, and the active segments after it, will
// allocate.
ExtentDemand DemandOf(const Cache& cache, const AdmitSpec& spec, const IndexDescriptor& index) {
  const SegmentingOptions& options = cache.segmenting;
  ExtentDemand demand;
  const auto last = static_cast<uint32_t>(spec.prefill_tokens % options.segment_tokens);
  AddSegments(cache, index, options.segment_tokens, spec.prefill_tokens / options.segment_tokens,
              demand);
  if (last > 0) AddSegments(cache, index, options.PrefillTokens(0, last), 1, demand);
  AddSegments(cache, index, options.tail_tokens, CeilDiv(spec.output_tokens, options.tail_tokens),
              demand);
  if (!IsBuilt(index) || spec.prefill_tokens == 0) return demand;
  const auto tokens = static_cast<uint32_t>(spec.prefill_tokens);
  const uint64_t generations =
      BuiltTypeOf(index).TrainsOnRows()
          ? GenerationCount(tokens, options.segment_tokens,
                            MinGenerationTokens(tokens, options.codebook_tokens))
          : 1;
  for (const StoredLayers::Layer& layer : cache.layers.layers) {
    if (layer.shape.has_index()) demand.Add(Codebook::SizeBytes(index, layer.shape), generations);
  }
  return demand;
}

}  // namespace

absl::StatusOr<Admission> Admit(const Cache& cache, const AdmitSpec& spec, const Evictor& evictor,
                                size_t growable_bytes) {
  if (spec.prefill_tokens > kMaxSequenceTokens || spec.output_tokens > kMaxSequenceTokens ||
      spec.prefill_tokens + spec.output_tokens > kMaxSequenceTokens) {
    return OutOfRange("token_count",
                      absl::StrCat(spec.prefill_tokens, ", with ", spec.output_tokens,
                                   " of output; a sequence has at most ", kMaxSequenceTokens));
  }
  const IndexDescriptor index = spec.index.value_or(cache.spec.default_index);
  for (const StoredLayers::Layer& layer : cache.layers.layers) {
    if (layer.shape.has_index()) {
      RETURN_IF_ERROR(ValidateIndex(index, layer.shape.key_dim, "index"));
    }
  }
  const ExtentDemand demand = DemandOf(cache, spec, index);
  const PoolUsage usage = cache.pool->usage();
  FreeMap free = cache.pool->free_map(growable_bytes);
  Admission admission{.needed_bytes = demand.bytes(), .limit_bytes = free.limit_bytes()};
  const RunAllocator empty(static_cast<uint32_t>(usage.capacity_bytes >> kExtentUnitShift));
  // The limits may leave more to a cache that grows when others have become smaller.
  const FreeMap most(empty, cache.spec.grows ? usage.capacity_bytes : free.limit_bytes());
  if (!most.Fits(demand)) {
    admission.verdict = Verdict::kExceedsCapacity;
    admission.shortfall_bytes = most.ShortfallBytes(demand);
    return admission;
  }
  if (free.Fits(demand)) {
    admission.verdict = Verdict::kFitsNow;
    return admission;
  }
  const std::vector<Candidate> candidates = evictor.Candidates(cache, /*retained_only=*/false);
  const std::vector<Victim> victims = evictor.Plan(cache, candidates);
  if (const auto count = CountNeeded(free, victims, demand); count.has_value()) {
    for (size_t i = 0; i < *count; ++i) admission.bytes_to_evict += victims[i].bytes();
    admission.verdict = Verdict::kFitsAfterEviction;
    return admission;
  }
  for (const Victim& victim : victims) {
    for (const UnitRange units : victim.extents) free.Free(units);
  }
  admission.verdict = Verdict::kRetryable;
  admission.shortfall_bytes = free.ShortfallBytes(demand);
  return admission;
}

}  // namespace pqcached::kvstore
