// ClosedIndexType: what index types have in common that make their index data of a closed segment
// as a whole, and whose rows have no codes: graphs and clusters.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_CLOSED_INDEX_TYPE_H_
#define PQCACHED_KVSTORE_READ_INDEXES_CLOSED_INDEX_TYPE_H_

#include "kvstore/read/indexes/index_type.h"

namespace pqcached::kvstore {

class ClosedIndexType : public BuiltIndexType {
 public:
  bool Iterates() const final { return false; }
  bool TrainsOnRows() const final { return false; }
  uint32_t TrainingTasks(const IndexDescriptor&) const final { return 1; }
  size_t TrainScratchBytes(const kernels::Exec&, const TrainingArgs&) const final {
    return kContentAlignment;
  }
  // All of a codebook is written by PrepareTraining.
  TrainingResult Train(const kernels::Exec&, const TrainingArgs& args,
                       std::span<std::byte>) const final {
    uint32_t tokens = 0;
    for (const kernels::RowSpan& span : args.rows) tokens += span.token_count;
    return {.trained_tokens = tokens, .iterations = args.iterations, .inertia = 0};
  }
  double MeasureInertia(const kernels::Exec&, const TrainingArgs&,
                        std::span<std::byte>) const final {
    return 0;
  }
  size_t EncodeScratchBytes(const IndexDescriptor&, const LayerShape&) const final {
    return kContentAlignment;
  }
  void Encode(const kernels::Exec&, const EncodeArgs&, std::span<std::byte>) const final {}
  bool HasClosing(const IndexDataHeader&) const final { return true; }
  bool ClosesLater() const final { return true; }

 protected:
  ~ClosedIndexType() = default;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_CLOSED_INDEX_TYPE_H_
