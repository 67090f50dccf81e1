// IndexType: the interface behind which an index lives. A type describes its parameters, stores
// codebooks and index data in a segment image, trains, codes, and searches.
//
// A new type is one implementation of this interface and one line in index_types.cc: the store,
// builds, incremental indexes, recovery, clients and the RPCs that list types work through it. The
// memory has two parts, whose headers are in layout.h. A *codebook* holds the state that training
// makes of many rows, for one layer. *Index data* hold the codes of the rows of one segment and
// layer. Both consist of a header and of one part per kv head, and every call but the checks works
// on one kv head.
//
// Implementations have no state. Thread-safe as long as outputs and scratch are not shared.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_INDEX_TYPE_H_
#define PQCACHED_KVSTORE_READ_INDEXES_INDEX_TYPE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <string_view>

#include "kernels/base/exec.h"
#include "kvstore/read/indexes/search_plan.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/refusal.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

// A parameter of an index type: a whole number, or one of several names.
struct IndexParameter {
  std::string_view name;  // as in the proto
  std::string_view text;  // the meaning, for people
  uint32_t least = 0;
  uint32_t most = 0;
  uint32_t default_value = 0;
  bool power_of_two = false;                     // only powers of two in [least, most]
  std::span<const std::string_view> names = {};  // of the values from 0 on; empty: a number
};

struct IndexTypeInfo {
  IndexKind kind = IndexKind::kFlat;
  std::string_view name;  // as in the proto
  std::string_view text;  // the method, for people
  std::span<const IndexParameter> parameters = {};
  // The reason why a plug-in is switched off, behind its name. It reads rows only.
  std::string_view switched_off = {};
};

// Scratch of one search, in bytes.
struct SearchScratch {
  size_t prepared_bytes = 0;  // what Prepare computes once per kv head
  size_t work_bytes = 0;      // what Score or Select need
};

// Search of the candidates of one plan in one kv head.
struct HeadSearch {
  const kernels::Exec& exec;
  const LayerShape& shape;
  const IndexDescriptor& index;
  const SearchPlan& plan;
  uint32_t kv_head = 0;
  // Searches that have the rows of the same kv head, for a share of its query heads each, and the
  // ordinal of this one: 1 and 0, or the query heads of a kv head and one of them.
  uint32_t sharing_heads = 1;
  uint32_t sharing_head = 0;
  std::span<const float> queries;  // [G, key_dim]: of query tokens and then query heads
  std::span<std::byte> prepared;   // 64-byte aligned
  std::span<std::byte> work;       // 64-byte aligned
};

// Query samples of one kv head: of each sampled position, the queries of its query heads.
struct SampledQueries {
  const std::byte* rows = nullptr;    // first query of the first position, in the layer's dtype
  size_t row_stride = 0;              // bytes from one position to the next
  uint32_t position_count = 0;        // 0: there are none
  uint32_t queries_per_position = 0;  // one behind the other

  uint64_t count() const { return uint64_t{position_count} * queries_per_position; }
  // Returns a query, counted over positions and then heads.
  const std::byte* query(uint64_t index, size_t query_bytes) const {
    return rows + index / queries_per_position * row_stride +
           index % queries_per_position * query_bytes;
  }
};

// Returns a gap such that every gap-th query is at most `most` queries, in which all heads occur.
inline uint64_t SampleGap(const SampledQueries& samples, uint64_t most) {
  uint64_t gap = std::max<uint64_t>(1, (samples.count() + most - 1) / most);
  while (gap > 1 && std::gcd<uint64_t>(gap, samples.queries_per_position) != 1) ++gap;
  return gap;
}

// One task of a training; the tasks of a kv head are independent of each other.
struct TrainingArgs {
  LayerShape shape;
  uint32_t kv_head = 0;
  uint32_t task = 0;  // below TrainingTasks
  // Rows of the kv head; contains only rows that may be trained on.
  std::span<const kernels::RowSpan> rows;
  uint32_t sample_tokens = 0;  // sample size; 0, or at least the number of rows: all rows
  uint32_t iterations = 0;
  uint64_t seed = 0;  // same for all tasks of a kv head, which draw the same sample
  // Codebook that the training starts from; null, or it does not fit: chosen by `seed`.
  const CodebookHeader* first = nullptr;
  SampledQueries samples = {};  // of types that need them
  // Called before each iteration; false ends the training with the current state.
  std::function<bool()> keep_going;
  CodebookHeader* codebook = nullptr;  // formatted; the part of this task is overwritten
};

struct TrainingResult {
  uint32_t trained_tokens = 0;
  // Iterations in effect. All of them on convergence, since further ones would change nothing.
  uint32_t iterations = 0;
  double inertia = 0;  // mean squared distance of a sample to its centroid, before the last change
};

// Rows of one kv head and the slots that get their codes.
struct EncodeArgs {
  LayerShape shape;
  uint32_t kv_head = 0;
  const CodebookHeader* codebook = nullptr;
  const std::byte* rows = nullptr;  // of the first slot
  PositionRange slots;
  IndexDataHeader* data = nullptr;
};

// Rows of one kv head of a segment that is closed.
struct CloseArgs {
  LayerShape shape;
  uint32_t kv_head = 0;
  const CodebookHeader* codebook = nullptr;
  const std::byte* rows = nullptr;  // of slot 0
  uint32_t slot_end = 0;            // above the header's counted_begin
  IndexDataHeader* data = nullptr;
  std::function<bool()> keep_going = {};  // false ends the work; absent: always true
};

class BuiltIndexType;

// An index type as its users see it: what it is, and how it searches.
class IndexType {
 public:
  virtual const IndexTypeInfo& info() const = 0;
  // Returns the type with its storage and builds; null for one that reads rows only.
  virtual const BuiltIndexType* built() const { return nullptr; }

  // Return and change the value of a parameter, by its ordinal in info().parameters.
  virtual uint32_t ValueOf(const IndexDescriptor& index, size_t parameter) const = 0;
  virtual void SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const = 0;
  // Checks what the descriptions of single parameters cannot say. `field`: path of the index.
  virtual Refusal CheckFit(const IndexDescriptor& index, uint32_t key_dim,
                           const char* field) const = 0;
  // Returns the index as people write it, such as "pq m=4 b=8".
  virtual std::string NameOf(const IndexDescriptor& index) const = 0;

  virtual SearchScratch ScoreScratch(const LayerShape& shape, const IndexDescriptor& index,
                                     const SearchPlanSize& plan) const = 0;
  // Computes what scoring and selection of all pieces need.
  virtual void Prepare(const HeadSearch& search) const = 0;
  // Writes the scaled logits of one piece, [G, tokens] in rows `stride` apart, without softcap.
  virtual void Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
                     size_t stride) const = 0;
  // Returns whether Select works; otherwise the caller selects by logits.
  virtual bool Selects(const LayerShape& shape, const IndexDescriptor& index) const = 0;
  virtual SearchScratch SelectScratch(const kernels::Exec& exec, const LayerShape& shape,
                                      const IndexDescriptor& index,
                                      const SearchPlanSize& plan) const = 0;
  // Writes the positions.size() best candidates under the rule, ascending; ties are resolved in
  // favour of the lower position.
  virtual void Select(const HeadSearch& search, GroupRule rule,
                      std::span<uint32_t> positions) const = 0;

 protected:
  ~IndexType() = default;
};

// An index type with codebooks and index data.
class BuiltIndexType : public IndexType {
 public:
  const BuiltIndexType* built() const final { return this; }

  // Storage. The caller writes the fields of headers that all types have (index, kv_head_count,
  // key_dim, slot_capacity, counted_begin, codebook_generation); Format... writes the others.

  virtual size_t CodebookBytes(const IndexDescriptor& index, const LayerShape& shape) const = 0;
  virtual void FormatCodebook(const LayerShape& shape, CodebookHeader* header) const = 0;
  // Returns whether the fields that FormatCodebook writes are those of this version, or of an
  // earlier one that it reads.
  virtual bool ReadsCodebook(const CodebookHeader& header, const LayerShape& shape) const = 0;
  // Returns the bytes of the codebooks of all kv heads without rounding, which statistics report.
  virtual size_t CodebookContentBytes(const CodebookHeader& header) const = 0;
  virtual size_t DataBytes(const IndexDescriptor& index, const LayerShape& shape,
                           uint32_t slot_capacity) const = 0;
  virtual void FormatData(const LayerShape& shape, IndexDataHeader* header) const = 0;
  // Returns the bytes from the header on that are zeroed before the header is written.
  virtual size_t ZeroedDataBytes(const IndexDescriptor& index, const LayerShape& shape,
                                 uint32_t slot_capacity) const = 0;
  // Returns the bytes of index data without rounding, which statistics report.
  virtual size_t DataContentBytes(const IndexDescriptor& index, const LayerShape& shape,
                                  uint32_t slot_capacity, uint32_t slot_count) const = 0;
  // Check the fields that Format... writes, in memory that another process has written, so that no
  // read leaves the extent. The other fields are those of the arguments: `header` may have changed
  // since they were compared. Return the name of the wrong field, or "".
  virtual std::string CheckCodebook(const CodebookHeader& header, size_t extent_bytes,
                                    const IndexDescriptor& index,
                                    const LayerShape& shape) const = 0;
  virtual std::string CheckData(const IndexDataHeader& header, size_t extent_bytes,
                                const IndexDescriptor& index, const LayerShape& shape,
                                uint32_t slot_capacity) const = 0;

  // Builds.

  // Returns whether the first codebook of a layer needs query samples. Later ones have `first`.
  virtual bool NeedsSamples(const IndexDescriptor& index, uint32_t key_dim) const {
    static_cast<void>(index);
    static_cast<void>(key_dim);
    return false;
  }
  // Writes the parts of a codebook that all tasks of a kv head use, before they begin; `args.task`
  // has no meaning. REQUIRES, where the type needs samples: some, or a `first` that fits.
  virtual size_t PrepareScratchBytes(const TrainingArgs& args) const {
    static_cast<void>(args);
    return 0;
  }
  virtual void PrepareTraining(const TrainingArgs& args, std::span<std::byte> scratch) const {
    static_cast<void>(args);
    static_cast<void>(scratch);
  }
  // Returns whether training repeats iterations, whose number and costs a build can choose. Costs
  // of others are not measured.
  virtual bool Iterates() const { return true; }
  // Returns whether a codebook depends on the rows that it is trained on. Others are trained once.
  virtual bool TrainsOnRows() const { return true; }
  // Returns the number of independent training tasks per kv head.
  virtual uint32_t TrainingTasks(const IndexDescriptor& index) const = 0;
  virtual size_t TrainScratchBytes(const kernels::Exec& exec, const TrainingArgs& args) const = 0;
  // Writes the part of a codebook that belongs to one task. `scratch`: 64-byte aligned.
  virtual TrainingResult Train(const kernels::Exec& exec, const TrainingArgs& args,
                               std::span<std::byte> scratch) const = 0;
  // Returns the mean squared distance of a sample of the rows to `args.codebook`, which it does not
  // change, as Train reports it; 0 without rows.
  virtual double MeasureInertia(const kernels::Exec& exec, const TrainingArgs& args,
                                std::span<std::byte> scratch) const = 0;
  virtual size_t EncodeScratchBytes(const IndexDescriptor& index,
                                    const LayerShape& shape) const = 0;
  // Codes rows: those of a build, and those that are appended. `scratch`: 64-byte aligned.
  virtual void Encode(const kernels::Exec& exec, const EncodeArgs& args,
                      std::span<std::byte> scratch) const = 0;
  // Returns whether closed segments get more than their codes. CloseHead makes it of the slots
  // [counted_begin, slot_end); readers use it once counted_end says so.
  virtual bool HasClosing(const IndexDataHeader& header) const = 0;
  // Returns whether that takes so long that writers do not do it: segments that they have coded get
  // it when a background merge or the next build codes them. Searches find the rows without it,
  // and rows have no codes of their own.
  virtual bool ClosesLater() const { return false; }
  virtual size_t CloseScratchBytes(const CloseArgs& args) const {
    static_cast<void>(args);
    return 0;
  }
  // Returns false after `keep_going` has: the slots are then as before closing. `scratch`: 64-byte
  // aligned.
  virtual bool CloseHead(const kernels::Exec& exec, const CloseArgs& args,
                         std::span<std::byte> scratch) const = 0;
  // Copies the codes of the first `slot_count` slots, which the same codebook made, to the slots
  // from `first_slot` on. Returns whether it has also copied what closing makes of exactly the
  // slots [to->counted_begin, slot_count).
  virtual bool CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                         uint32_t first_slot, IndexDataHeader* to) const = 0;

 protected:
  ~BuiltIndexType() = default;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_INDEX_TYPE_H_
