// DeviceSteps implements Steps on one device.
//
// All layers share one set of scratch memory, because the stream orders the work of a step. The
// lookups of a layer update its block cache on a side stream as soon as the layer is done. Captured
// layers, whose replays this class does not observe, update their caches at the end of the step.
#ifndef PQCACHED_GPU_DEVICE_STEPS_H_
#define PQCACHED_GPU_DEVICE_STEPS_H_

#include <atomic>
#include <memory>
#include <vector>

#include "gpu/block_cache.h"
#include "gpu/device.h"
#include "gpu/layer_codes.h"
#include "gpu/page_lock.h"
#include "gpu/row_packer.h"
#include "gpu/row_staging.h"
#include "gpu/step_tables.h"
#include "gpu/steps.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/merge.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/select/select.h"
#include "kernels/cuda/step/lists.h"
#include "kernels/cuda/step/own_rows.h"
#include "kernels/cuda/step/pages.h"
#include "kernels/cuda/step/seats.h"

namespace pqcached::gpu {

class DeviceSteps final : public Steps {
 public:
  // Errors: kNoDevice     no device: compute on the CPU
  //         kUnsupported  the architecture of the device is too old
  //         kInvalid      an option is out of range (the message names it and the limit)
  //         kOutOfMemory  device memory or page-locked memory (the message gives the bytes wanted)
  static Status Open(const StepsOptions& options, std::unique_ptr<DeviceSteps>& steps);
  ~DeviceSteps();

  Outcome Begin(const StepBatch& batch) override;
  Outcome ReleasePool() override;
  Outcome Select(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                 uint32_t* positions, size_t stride, uint32_t* counts) override;
  Outcome SelectPages(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                      const StepPages& pages) override;
  Outcome Attend(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule, float* output,
                 float* lse) override;
  Outcome AttendPositions(uint32_t layer, const StepQueries& queries, const StepLists& lists,
                          float* output, float* lse) override;
  Outcome AttendRanges(uint32_t layer, const StepQueries& queries, const uint64_t* ranges,
                       float* output, float* lse) override;
  Outcome Decode(uint32_t layer, const StepQueries& queries, const StepRows& rows,
                 kernels::GroupRule rule, float* output, float* lse) override;
  const void* Kept(uint32_t layer) const override;
  Outcome Fetch(uint32_t layer, const StepRows& from, const void** rows) override;
  Outcome End() override;
  Outcome Wait() override;
  StepRefusal Refused() const override;
  Outcome LockStaging(std::byte* ring, size_t size_bytes, uint32_t slot_count) override;
  Outcome Pack(const StepPack& pack, uint32_t slot) override;
  Outcome WaitPacked(uint32_t slot) override;
  Outcome Count(StepsCounts* counts) override;
  void Close() override { delete this; }
  Outcome Merge(const kernels::cuda::MergeTensorsArgs& merge, void* stream,
                const char** field) override;

 private:
  // Some query tokens of every item: those that a launch works on.
  struct QueryTokens {
    uint32_t first = 0;
    uint32_t count = 0;
  };

  // Ranges of each item in device memory.
  struct ItemRanges {
    const uint64_t* ranges = nullptr;  // [items, count, 2]
    uint32_t count = 0;                // ranges of an item
    uint64_t token_count = 0;          // tokens of an item's ranges, at most
    kernels::cuda::RefusedElement refused = {};
  };

  // Whether reads of rows count as requests, by which the block cache chooses its blocks.
  enum class CacheUse { kCounts, kReadsOnly };

  DeviceSteps() = default;

  Status Create(const StepsOptions& options);
  size_t PlaceScratch(void* base);
  Status ClearListBits();
  Status CreateCaches();
  Status BeginCaches(kernels::cuda::Stream stream);
  Status CheckBatch(const StepBatch& batch) const;
  Status CheckStreamTakesWork(kernels::cuda::Stream stream) const;
  Status WaitUnfinishedStep();
  Status BeginBatch(const StepBatch& batch);
  Status CreateStaging();
  Status CheckLayer(uint32_t layer, const StepQueries& queries) const;
  Status ArrangeQueries(const StepQueries& queries, const QueryTokens& tokens);
  Status BeginScores(uint32_t layer, const StepQueries& queries, const QueryTokens& tokens);
  Status EndScores(uint32_t layer, const QueryTokens& tokens);
  Status LaunchPages(uint32_t layer, kernels::GroupRule rule, const StepPages& pages);
  Status SelectTokens(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                      const QueryTokens& tokens);
  Status BeginAttention(uint32_t layer, const StepQueries& queries, const float* output,
                        const float* lse, CaptureId& capture);
  Status ArrangeLists(uint32_t layer, const StepLists& lists);
  Status ArrangeRanges(const ItemRanges& ranges, uint64_t first);
  Status AttendInParts(uint32_t layer, const StepQueries& queries, const ItemRanges& ranges);
  ItemRanges FullCandidates(const CaptureId& capture) const;
  Status ReserveRecent();
  void CopyRecent(const StepBatch& batch);
  Status CheckDecode(uint32_t layer, const StepRows& rows) const;
  Status KeepRows(uint32_t layer, const StepRows& rows);
  Status LocateOwn(uint32_t layer, const QueryTokens& tokens);
  Status AttendToOwn(uint32_t layer, const QueryTokens& tokens, float* lane_output,
                     float* lane_lse);
  Status DecodeTokens(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                      const QueryTokens& tokens);
  Status CheckSelects(uint32_t layer) const;
  Status Locate(uint32_t layer, CacheUse cache_use);
  Status AttendLocated(const QueryTokens& tokens, float* lane_output, float* lane_lse,
                       const uint32_t* row_ranges = nullptr, const StepQueries* logits = nullptr);
  Status ArrangeOutputs(const QueryTokens& tokens, float* output, float* lse);
  Status AddPart(const QueryTokens& tokens);
  Status AttendTokens(uint32_t layer, const QueryTokens& tokens, float* output, float* lse,
                      const StepQueries* logits = nullptr);
  Status UpdateCache(uint32_t layer);
  Status UnlockPool();
  void ClearRefused();
  kernels::cuda::RefusedElement refused_element(uint32_t layer,
                                                StepRefusal::Argument argument) const;
  bool all_codes_resident() const {
    return codes_.resident_layer_count() == tables_.code_layer_count();
  }
  QueryTokens AllTokens() const { return {.count = query_length_}; }
  // Returns the number of selections of an item, and the query tokens that share one.
  uint32_t selection_count() const { return selects_per_token_ ? query_length_ : 1; }
  QueryTokens TokensOf(uint32_t selection) const {
    return selects_per_token_ ? QueryTokens{.first = selection, .count = 1} : AllTokens();
  }
  kernels::cuda::SelectTables candidates(uint32_t layer) const;
  kernels::cuda::SeatShape seat_shape(uint32_t query_length) const;
  kernels::cuda::AttendShape attend_shape(uint32_t query_length) const;

  // Returns the kept or fetched rows of a layer, in fetched_.
  std::byte* HostRows(uint32_t layer) const;
  uint32_t token_room() const { return options_.sequence_capacity * options_.query_length; }

  static constexpr size_t kRefusedArguments = 7;  // of StepRefusal

  StepsOptions options_;
  std::vector<StepLayerKind> kinds_;  // [layers]
  std::vector<uint32_t> windows_;     // [layers]: tokens of the window in layers of kind kWindow
  Device device_;
  uint32_t lane_capacity_ = 0;
  size_t row_bytes_ = 0;
  LayerCodes codes_;
  StepTables tables_;
  std::unique_ptr<BlockCache[]> caches_;  // [layers], or null
  std::vector<bool> updated_;             // [layers]: the block cache was updated in this step
  std::unique_ptr<RowStaging> staging_;   // null while the device could read all rows in place
  std::unique_ptr<PageLock> page_lock_;
  const std::byte* pool_ = nullptr;
  size_t pool_bytes_ = 0;
  PinnedBuffer fetched_;  // [layers, kv_heads, tokens of a step, row]
  // Allocated by the first step that decodes. Rows of earlier steps that are not stored, [layers,
  // lanes, kRecentCapacity, row], and [layers]: 1 where the step's work has kept rows.
  PinnedBuffer recent_;
  PinnedBuffer kept_;
  PinnedBuffer refused_;  // [kRefusedArguments]: RefusedElement::noted by StepRefusal::Argument
  OwnedEvent step_done_;
  RowPacker packer_;
  kernels::cuda::Stream stream_ = nullptr;
  uint32_t query_length_ = 0;  // 0: no step is in progress
  bool selects_per_token_ = false;
  bool decodes_ = false;
  uint32_t row_end_ = 0;                // the largest one of the step's items
  bool has_no_unfinished_step_ = true;  // step_done_ covers all work of earlier steps

  // Read by Count, which other threads call concurrently with steps.
  std::atomic<uint64_t> generation_ = 1;
  std::atomic<bool> is_staged_ = false;
  std::atomic<size_t> locked_bytes_ = 0;

  DeviceBuffer scratch_;
  float* lane_queries_ = nullptr;  // [lanes, L, G, key_dim]
  float* score_tables_ = nullptr;  // [lanes, codebook_capacity, L, G, m, 2^b]
  std::byte* select_scratch_ = nullptr;
  size_t select_scratch_bytes_ = 0;
  std::byte* page_scratch_ = nullptr;
  size_t page_scratch_bytes_ = 0;
  uint32_t* positions_ = nullptr;          // [lanes, selected_capacity]
  uint32_t* counts_ = nullptr;             // [lanes]
  uint32_t* own_counts_ = nullptr;         // [lanes]
  uint32_t* row_ranges_ = nullptr;         // [lanes, L, 2]
  uint32_t* list_bits_ = nullptr;          // [lanes, ListBitWords(token_capacity)]: zero
  const std::byte** addresses_ = nullptr;  // [lanes, selected_capacity]
  uint32_t* row_counts_ = nullptr;         // [lanes]
  std::byte* attend_scratch_ = nullptr;
  size_t attend_scratch_bytes_ = 0;
  float* lane_output_ = nullptr;  // [lanes, L, G, value_dim]
  float* lane_lse_ = nullptr;     // [lanes, L, G]
  float* part_output_ = nullptr;  // likewise, of one part of the rows
  float* part_lse_ = nullptr;
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_DEVICE_STEPS_H_
