// SegmentWriter writes rows into slots that no snapshot shows, then publishes them in one step.
//
// Ingest and Append are sequences of these steps under a WriteLease. A writer that is destroyed
// before Commit leaves the sequence unchanged.
//
// Single-thread; uses the serving arena inside.
#ifndef PQCACHED_KVSTORE_ROWS_WRITER_H_
#define PQCACHED_KVSTORE_ROWS_WRITER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/rows/ingest.h"
#include "kvstore/rows/tensor.h"
#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

// K and V of one layer, checked against its shape.
struct CheckedRows {
  uint32_t layer_slot = 0;
  uint32_t token_count = 0;
  CheckedTensor keys;
  CheckedTensor values;
};

// Checks the tensors of one layer. Errors: kInvalidArgument naming the field.
absl::StatusOr<CheckedRows> CheckRows(const Cache& cache, const LayerRows& rows);

// Relation of a range of incoming tokens to the stored ones: new, or stored already.
enum class RangeKind : uint8_t { kNew, kRepeat };
// Classifies a range of incoming tokens. `stored`: tokens that the layer has. Errors:
// kInvalidArgument for a gap or a partly stored range; kOutOfRange beyond kMaxSequenceTokens.
absl::StatusOr<RangeKind> ClassifyRange(uint64_t first_position, uint32_t token_count,
                                        uint32_t stored, uint32_t layer);

class SegmentWriter {
 public:
  // `segment_tokens`: capacity of the segments that it opens.
  static absl::StatusOr<SegmentWriter> Begin(std::shared_ptr<const Cache> cache, WriteLease lease,
                                             uint32_t segment_tokens);

  // Opens segments of a prefill: a short one where the announced tokens end.
  void BeginPrefill(AnnouncedEnd announced) {
    is_prefill_ = true;
    announced_ = announced;
  }

  // Opens segments without codes: the incremental index encodes them when they are full.
  void DeferEncoding() { defer_encoding_ = true; }

  // Closes the open segment of a first prefill after its last token, so that a codebook can be
  // trained on it. Open segments of later turns are encoded while they are filled. REQUIRES: before
  // Reserve; all layers have the same tokens.
  void ClosePrefill();

  const Sequence& sequence() const { return lease_.sequence(); }
  const Snapshot& base() const { return *base_; }
  const Cache& cache() const { return *cache_; }
  uint32_t layer_tokens(uint32_t layer_slot) const { return layer_tokens_[layer_slot]; }

  // Allocates segments for tokens below `token_end`; called once before each Write. Errors:
  // kResourceExhausted.
  absl::Status Reserve(uint32_t token_end);
  // Writes rows at the layer's next position. Errors: kInvalidArgument for NaN or infinity, naming
  // token, layer and part; the layer's next position then stays.
  //
  // REQUIRES: Reserve was called for these tokens.
  absl::Status Write(const CheckedRows& rows);
  // Compares rows with those that are stored, or written, at the same positions, after conversion
  // to the cache's dtype. Errors: kInvalidArgument naming keys or values, for NaN or infinity, and
  // for the first element that differs.
  //
  // REQUIRES: ClassifyRange returned kRepeat.
  absl::Status Compare(uint32_t first_position, const CheckedRows& rows) const;
  // Returns the query samples of a layer, with those of AddSamples; null: none.
  std::shared_ptr<const QuerySamples> samples(uint32_t layer_slot) const {
    return layer_slot < samples_.size() ? samples_[layer_slot] : base_->list->SamplesOf(layer_slot);
  }
  // Adds samples of a layer (samples.h), which Commit publishes with the rows. Errors:
  // kResourceExhausted.
  absl::Status AddSamples(uint32_t layer_slot, std::shared_ptr<const QuerySamples> newer);

  // Encodes the new rows in segments that have an index, counts the cells of complete layers of
  // closed segments, and publishes all of it. Returns the token_count. Called once.
  absl::StatusOr<uint64_t> Commit();

 private:
  SegmentWriter(std::shared_ptr<const Cache> cache, WriteLease lease,
                std::shared_ptr<const Snapshot> base, uint32_t segment_tokens);
  absl::Status MoveFromReaders();
  // Creates the segments that the tokens [first, token_end) need, behind `last` (null: none). When
  // the pool has no room, a prefill whose end is not known exactly gets a shorter one.
  absl::StatusOr<std::vector<SegmentEntry>> CreateNext(const SegmentEntry* last, uint32_t first,
                                                       uint32_t token_end) const;
  // In a prefill, the segment where `slots_end` lies is as short as PrefillTokens allows.
  absl::StatusOr<std::vector<SegmentEntry>> Create(uint32_t first, uint32_t token_end,
                                                   uint32_t slots_end) const;
  // Tokens [token, token + token_count) of the rows, for the slots of one segment that start at
  // `slot`.
  struct Tile {
    uint32_t token = 0;
    uint32_t slot = 0;
    uint32_t token_count = 0;
  };
  kernels::IngestResult WriteTile(const CheckedRows& rows, const SegmentRows& segment,
                                  Tile tile) const;
  // Writes tokens [token, token + token_count) of the rows to the rows of each kv head.
  kernels::IngestResult WriteTo(const CheckedRows& rows, uint32_t token, uint32_t token_count,
                                std::span<std::byte* const> targets) const;
  void EncodeNew();
  void EncodeHead(uint32_t head, std::span<std::byte> scratch) const;
  void CountClosed();
  void CountLayer(uint32_t layer_slot) const;

  // Number of segments after Commit: kept_ entries of the base, then edited_.
  size_t entry_count() const { return kept_ + edited_.size(); }
  const SegmentEntry& entry(size_t i) const {
    return i < kept_ ? base_->list->segments[i] : edited_[i - kept_];
  }
  // Returns the base's open segment for editing. REQUIRES: there is one.
  SegmentEntry& EditActiveSegment();
  // Returns the ordinal of the segment that holds `position`.
  size_t SegmentAt(uint32_t position) const;

  std::shared_ptr<const Cache> cache_;
  WriteLease lease_;
  std::shared_ptr<const Snapshot> base_;
  uint32_t segment_tokens_;
  bool is_prefill_ = false;
  AnnouncedEnd announced_;  // of the prefill
  bool defer_encoding_ = false;
  bool closes_prefill_ = false;
  size_t kept_;
  std::vector<SegmentEntry> edited_;
  std::vector<uint32_t> layer_tokens_;
  std::vector<std::shared_ptr<const QuerySamples>> samples_;  // empty: none were added
  bool readers_checked_ = false;  // slots to be written are not visible to older readers
  std::vector<kernels::IngestResult> results_;  // per tile, of one Write
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_ROWS_WRITER_H_
