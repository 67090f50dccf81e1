// SegmentWriter: rows into slots that no snapshot shows, then one step that shows them.
//
// Ingest and Append are sequences of these steps under a WriteLease. When it dies before Commit,
// nothing has happened.
//
// Single-thread; uses the serving arena inside.
#ifndef PQCACHED_KVSTORE_WRITER_H_
#define PQCACHED_KVSTORE_WRITER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ingest.h"
#include "kvstore/cache.h"
#include "kvstore/sequence.h"
#include "kvstore/tensor.h"

namespace pqcached::kvstore {

// K and V of one layer, checked against its shape.
struct CheckedRows {
  uint32_t layer_slot = 0;
  uint32_t token_count = 0;
  CheckedTensor keys;
  CheckedTensor values;
};

// Errors: kInvalidArgument naming the field.
absl::StatusOr<CheckedRows> CheckRows(const Cache& cache, const LayerRows& rows);

// How a range of incoming tokens meets what is stored.
enum class Arrival : uint8_t { kNew, kRepeat };
// Errors: kInvalidArgument for a gap or a partly stored range; kOutOfRange beyond
// kMaxSequenceTokens. `stored`: of the layer.
absl::StatusOr<Arrival> CheckArrival(uint64_t first_position, uint32_t token_count, uint32_t stored,
                                     uint32_t layer);

class SegmentWriter {
 public:
  // `segment_tokens`: capacity of segments that it opens.
  static absl::StatusOr<SegmentWriter> Begin(std::shared_ptr<const Cache> cache, WriteLease lease,
                                             uint32_t segment_tokens);

  // Segments that it opens get no codes: a live index codes them when they are full.
  void CodeLater() { code_later_ = true; }

  // Closes the open segment of a first prefill where its tokens end, so that they can be trained on. Those
  // of later turns are coded while they are open. REQUIRES: before Reserve; all layers have the same
  // tokens.
  void EndPrefill();

  const Sequence& sequence() const { return lease_.sequence(); }
  const Snapshot& base() const { return *base_; }
  const Cache& cache() const { return *cache_; }
  uint32_t layer_tokens(uint32_t layer_slot) const { return layer_tokens_[layer_slot]; }

  // Makes room for tokens below `token_end`; once before each Write. Errors: kResourceExhausted.
  absl::Status Reserve(uint32_t token_end);
  // Writes rows at the layer's next position. Errors: kInvalidArgument for NaN or infinity, naming
  // token, layer and part; the layer's next position stays.
  //
  // REQUIRES: Reserve made room.
  absl::Status Write(const CheckedRows& rows);
  // Codes what was written, in segments that have an index; counts the cells of layers of segments
  // that are closed and full; shows all of it. Returns the token_count. Once.
  absl::StatusOr<uint64_t> Commit();

 private:
  SegmentWriter(std::shared_ptr<const Cache> cache, WriteLease lease,
                std::shared_ptr<const Snapshot> base, uint32_t segment_tokens);
  absl::Status LeaveReadersBehind();
  // Tokens [token, token + token_count) of the rows, into slots of one segment from `slot` on.
  struct Tile {
    uint32_t token = 0;
    uint32_t slot = 0;
    uint32_t token_count = 0;
  };
  kernels::IngestResult WriteTile(const CheckedRows& rows, const SegmentRows& segment,
                                  Tile tile) const;
  void EncodeNew();
  void EncodeHead(uint32_t head, std::span<std::byte> scratch) const;
  void CountClosed();
  void CountLayer(uint32_t layer_slot) const;

  // The list as it will be: kept_ entries of the base, then edited_.
  size_t entry_count() const { return kept_ + edited_.size(); }
  const SegmentEntry& entry(size_t i) const {
    return i < kept_ ? base_->list->segments[i] : edited_[i - kept_];
  }
  // The open segment, to be changed. REQUIRES: there is one.
  SegmentEntry& EditTail();
  // The first segment that holds slots at or behind `position`.
  size_t SegmentAt(uint32_t position) const;

  std::shared_ptr<const Cache> cache_;
  WriteLease lease_;
  std::shared_ptr<const Snapshot> base_;
  uint32_t segment_tokens_;
  bool code_later_ = false;
  bool ends_prefill_ = false;
  size_t kept_;
  std::vector<SegmentEntry> edited_;
  std::vector<uint32_t> layer_tokens_;
  bool readers_left_ = false;                   // of older snapshots, from the slots to be written
  std::vector<kernels::IngestResult> results_;  // per tile, of one Write
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_WRITER_H_
