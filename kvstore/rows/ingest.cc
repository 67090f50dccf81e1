#include "kvstore/rows/ingest.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"
#include "kvstore/rows/samples.h"

namespace pqcached::kvstore {
namespace {

class IngestTransactionImpl final : public IngestTransaction {
 public:
  explicit IngestTransactionImpl(SegmentWriter writer) : writer_(std::move(writer)) {}

  absl::Status Write(uint64_t first_position, const LayerRows& rows) override {
    RETURN_IF_ERROR(CheckUsable());
    absl::Status status = WriteChunk(first_position, rows);
    if (!status.ok()) failed_ = status;
    return status;
  }

  absl::Status AddSamples(const LayerSamples& samples) override {
    RETURN_IF_ERROR(CheckUsable());
    absl::Status status = AddChecked(samples);
    if (!status.ok()) failed_ = status;
    return status;
  }

  absl::StatusOr<uint64_t> Commit() override {
    RETURN_IF_ERROR(CheckUsable());
    RETURN_IF_ERROR(CheckStored(*writer_));
    committed_ = true;
    const uint32_t begin = writer_->base().token_count();
    absl::StatusOr<uint64_t> token_count = writer_->Commit();
    PrefillTimes& times = *writer_->cache().prefill_times;
    if (token_count.ok() && times.measures()) {
      times.NoteChunk(writer_->sequence().sequence_id(), begin, static_cast<uint32_t>(*token_count),
                      SteadyTime::Now());
    }
    writer_.reset();  // other writers may begin now
    return token_count;
  }

 private:
  absl::Status CheckUsable() const {
    if (committed_) return FailedPrecondition("sequence_id", "the ingest is committed");
    return failed_;
  }

  absl::Status AddChecked(const LayerSamples& samples) {
    ASSIGN_OR_RETURN(const uint32_t layer_slot, CheckSampledLayer(writer_->cache(), samples.layer));
    ASSIGN_OR_RETURN(auto copy, CopySamples(writer_->cache(), layer_slot, samples));
    return writer_->AddSamples(layer_slot, std::move(copy));
  }

  absl::Status WriteChunk(uint64_t first_position, const LayerRows& rows) {
    const absl::StatusOr<CheckedRows> checked = CheckRows(writer_->cache(), rows);
    if (!checked.ok()) return PrefixField("rows", checked.status());
    ASSIGN_OR_RETURN(const auto arrival,
                     ClassifyRange(first_position, checked->token_count,
                                   writer_->layer_tokens(checked->layer_slot), rows.layer));
    if (arrival == RangeKind::kRepeat) {
      if (!writer_->cache().segmenting.compare_repeats) return absl::OkStatus();
      return PrefixField("rows", writer_->Compare(static_cast<uint32_t>(first_position), *checked));
    }
    const uint32_t token_end = writer_->layer_tokens(checked->layer_slot) + checked->token_count;
    RETURN_IF_ERROR(writer_->Reserve(token_end));
    return PrefixField("rows", writer_->Write(*checked));
  }

  std::optional<SegmentWriter> writer_;
  absl::Status failed_;
  bool committed_ = false;
};

// Checks that every stored layer occurs exactly once, and that all have the same number of tokens.
absl::StatusOr<std::vector<CheckedRows>> CheckAppend(const Cache& cache,
                                                     std::span<const LayerRows> layers) {
  std::vector<CheckedRows> all;
  std::vector<bool> seen(cache.layers.size(), false);
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerRows& rows = layers[i];
    const auto field = [i] { return absl::StrCat("rows[", i, "]"); };
    const absl::StatusOr<CheckedRows> checked = CheckRows(cache, rows);
    if (!checked.ok()) return PrefixField(field(), checked.status());
    if (seen[checked->layer_slot]) {
      return InvalidArgument(field() + ".layer", absl::StrCat(rows.layer, ", must be listed once"));
    }
    seen[checked->layer_slot] = true;
    all.push_back(*checked);
    if (all.front().token_count != checked->token_count) {
      return InvalidArgument(
          field() + (rows.keys.shape.empty() ? ".values.shape" : ".keys.shape"),
          absl::StrCat("layer ", rows.layer, " has ", checked->token_count, " tokens; layer ",
                       layers.front().layer, " has ", all.front().token_count));
    }
  }
  for (uint32_t slot = 0; slot < seen.size(); ++slot) {
    if (seen[slot]) continue;
    return InvalidArgument("rows",
                           absl::StrCat("layer ", cache.layers.layers[slot].layer, " is missing"));
  }
  return all;
}

}  // namespace

absl::StatusOr<std::unique_ptr<IngestTransaction>> BeginIngest(std::shared_ptr<const Cache> cache,
                                                               WriteLease lease,
                                                               bool has_live_index,
                                                               AnnouncedEnd announced) {
  const uint32_t segment_tokens = cache->segmenting.segment_tokens;
  ASSIGN_OR_RETURN(auto writer,
                   SegmentWriter::Begin(std::move(cache), std::move(lease), segment_tokens));
  writer.BeginPrefill(announced);
  if (has_live_index) writer.DeferEncoding();
  return std::make_unique<IngestTransactionImpl>(std::move(writer));
}

absl::StatusOr<uint64_t> AppendRows(std::shared_ptr<const Cache> cache, WriteLease lease,
                                    bool has_live_index, uint64_t first_position,
                                    std::span<const LayerRows> layers) {
  ASSIGN_OR_RETURN(const auto all, CheckAppend(*cache, layers));
  ASSIGN_OR_RETURN(const auto base, lease.sequence().Read());
  const uint32_t tail_tokens = cache->segmenting.NextTailTokens(
      base->token_count(), all.empty() ? 0 : all.front().token_count);
  ASSIGN_OR_RETURN(auto writer,
                   SegmentWriter::Begin(std::move(cache), std::move(lease), tail_tokens));
  uint32_t new_count = 0;
  for (const CheckedRows& rows : all) {
    ASSIGN_OR_RETURN(
        const auto arrival,
        ClassifyRange(first_position, rows.token_count, writer.layer_tokens(rows.layer_slot),
                      writer.cache().layers.layers[rows.layer_slot].layer));
    if (arrival == RangeKind::kNew) ++new_count;
  }
  for (size_t i = 0; new_count == 0 && writer.cache().segmenting.compare_repeats && i < all.size();
       ++i) {
    absl::Status status = writer.Compare(static_cast<uint32_t>(first_position), all[i]);
    if (!status.ok()) return PrefixField(absl::StrCat("rows[", i, "]"), status);
  }
  if (new_count == 0) return writer.base().token_count();
  if (new_count != all.size()) {
    return InvalidArgument(
        "first_position",
        absl::StrCat(first_position, ": some layers hold these tokens, others do not"));
  }
  if (has_live_index) writer.ClosePrefill();
  const auto token_end = static_cast<uint32_t>(first_position) + all.front().token_count;
  RETURN_IF_ERROR(writer.Reserve(token_end));
  for (size_t i = 0; i < all.size(); ++i) {
    if (absl::Status status = writer.Write(all[i]); !status.ok()) {
      return PrefixField(absl::StrCat("rows[", i, "]"), status);
    }
  }
  return writer.Commit();
}

absl::StatusOr<uint64_t> TruncateRows(WriteLease lease, uint64_t token_count, uint64_t own_lease) {
  ASSIGN_OR_RETURN(const auto base, lease.sequence().Read());
  const uint32_t stored = base->token_count();
  if (token_count > stored) {
    return InvalidArgument("token_count",
                           absl::StrCat(token_count, "; the sequence has ", stored, " tokens"));
  }
  const auto kept = static_cast<uint32_t>(token_count);
  RETURN_IF_ERROR(lease.sequence().Truncate(kept, own_lease));
  return kept;
}

}  // namespace pqcached::kvstore
