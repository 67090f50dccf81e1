// The index types of plug-ins: adapters from their C interface (pqcached/index_plugin.h) to
// IndexType.
//
// The adapter stores codebooks and codes, converts rows to fp32, and checks every size and logit
// that the plug-in returns. Thread-safe, like all index types.
#ifndef PQCACHED_KVSTORE_PLUGINS_PLUGIN_INDEX_H_
#define PQCACHED_KVSTORE_PLUGINS_PLUGIN_INDEX_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvstore/plugins/include/pqcached/index_plugin.h"
#include "kvstore/read/indexes/flat.h"
#include "kvstore/read/indexes/index_type.h"

namespace pqcached::kvstore {

using PluginDescription = pqcached_index_plugin_description;

// Returns what is wrong with a description, behind its name; empty when it can be used.
std::string CheckDescription(const PluginDescription& description);

// A plug-in as a user sees it.
class PluginInfo {
 public:
  // `switched_off`: see IndexTypeInfo. REQUIRES: CheckDescription, and that the description stays.
  PluginInfo(const PluginDescription& description, std::string switched_off);
  PluginInfo(const PluginInfo&) = delete;
  PluginInfo& operator=(const PluginInfo&) = delete;

  const IndexTypeInfo& info() const { return info_; }
  // Returns the index as people write it: "lsh bits=64".
  std::string NameOf(const IndexDescriptor& index) const;

 private:
  const std::string switched_off_;
  const std::string text_;
  std::vector<IndexParameter> parameters_;
  IndexTypeInfo info_;
};

class PluginIndex final : public BuiltIndexType {
 public:
  // `calls`: counts the calls of the plug-in that are in progress.
  PluginIndex(const PluginDescription& description, std::atomic<uint32_t>* calls)
      : plugin_(description), calls_(*calls), info_(description, "") {}

  const IndexTypeInfo& info() const override { return info_.info(); }
  uint32_t ValueOf(const IndexDescriptor& index, size_t parameter) const override;
  void SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const override;
  Refusal CheckFit(const IndexDescriptor& index, uint32_t key_dim,
                   const char* field) const override;
  std::string NameOf(const IndexDescriptor& index) const override { return info_.NameOf(index); }

  // Search.
  SearchScratch ScoreScratch(const LayerShape&, const IndexDescriptor&,
                             const SearchPlanSize&) const override {
    return {};
  }
  void Prepare(const HeadSearch&) const override {}
  void Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
             size_t stride) const override;
  bool Selects(const LayerShape&, const IndexDescriptor&) const override { return false; }
  SearchScratch SelectScratch(const kernels::Exec&, const LayerShape&, const IndexDescriptor&,
                              const SearchPlanSize&) const override {
    return {};
  }
  void Select(const HeadSearch&, GroupRule, std::span<uint32_t>) const override {}

  // Storage.
  size_t CodebookBytes(const IndexDescriptor& index, const LayerShape& shape) const override;
  void FormatCodebook(const LayerShape& shape, CodebookHeader* header) const override;
  bool ReadsCodebook(const CodebookHeader& header, const LayerShape& shape) const override;
  size_t CodebookContentBytes(const CodebookHeader& header) const override;
  size_t DataBytes(const IndexDescriptor& index, const LayerShape& shape,
                   uint32_t slot_capacity) const override;
  void FormatData(const LayerShape& shape, IndexDataHeader* header) const override;
  size_t ZeroedDataBytes(const IndexDescriptor& index, const LayerShape& shape,
                         uint32_t slot_capacity) const override;
  size_t DataContentBytes(const IndexDescriptor& index, const LayerShape& shape,
                          uint32_t slot_capacity, uint32_t slot_count) const override;
  std::string CheckCodebook(const CodebookHeader& header, size_t extent_bytes,
                            const IndexDescriptor& index, const LayerShape& shape) const override;
  std::string CheckData(const IndexDataHeader& header, size_t extent_bytes,
                        const IndexDescriptor& index, const LayerShape& shape,
                        uint32_t slot_capacity) const override;

  // Builds.
  bool NeedsSamples(const IndexDescriptor& index, uint32_t key_dim) const override;
  // A plug-in trains in one piece, which a measurement would do several times.
  bool Iterates() const override { return false; }
  uint32_t TrainingTasks(const IndexDescriptor&) const override { return 1; }
  size_t TrainScratchBytes(const kernels::Exec& exec, const TrainingArgs& args) const override;
  TrainingResult Train(const kernels::Exec& exec, const TrainingArgs& args,
                       std::span<std::byte> scratch) const override;
  double MeasureInertia(const kernels::Exec&, const TrainingArgs&,
                        std::span<std::byte>) const override {
    return 0;  // a plug-in has no measure of drift
  }
  size_t EncodeScratchBytes(const IndexDescriptor& index, const LayerShape& shape) const override;
  void Encode(const kernels::Exec& exec, const EncodeArgs& args,
              std::span<std::byte> scratch) const override;
  bool HasClosing(const IndexDataHeader&) const override { return false; }
  bool CloseHead(const kernels::Exec&, const CloseArgs&, std::span<std::byte>) const override {
    return true;
  }
  bool CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                 uint32_t first_slot, IndexDataHeader* to) const override;

 private:
  class Call;
  size_t HeadCodebookBytes(const IndexDescriptor& index, uint32_t key_dim) const;
  // Returns whether train_on_queries trains the index.
  bool IsTrainedOnQueries(const pqcached_index_plugin_shape& shape) const;
  size_t TokenCodeBytes(const IndexDescriptor& index, uint32_t key_dim) const;

  const PluginDescription& plugin_;
  std::atomic<uint32_t>& calls_;
  const PluginInfo info_;
};

// A plug-in that is switched off: it is not called, and its indexes are read as flat.
class SwitchedOffIndex final : public IndexType {
 public:
  SwitchedOffIndex(const PluginDescription& description, std::string why)
      : info_(description, std::move(why)) {}

  const IndexTypeInfo& info() const override { return info_.info(); }
  uint32_t ValueOf(const IndexDescriptor& index, size_t parameter) const override;
  void SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const override;
  Refusal CheckFit(const IndexDescriptor&, uint32_t, const char*) const override { return {}; }
  std::string NameOf(const IndexDescriptor& index) const override { return info_.NameOf(index); }

  SearchScratch ScoreScratch(const LayerShape& shape, const IndexDescriptor& index,
                             const SearchPlanSize& plan) const override {
    return flat_.ScoreScratch(shape, index, plan);
  }
  void Prepare(const HeadSearch&) const override {}
  void Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
             size_t stride) const override {
    flat_.Score(search, piece, logits, stride);
  }
  bool Selects(const LayerShape&, const IndexDescriptor&) const override { return false; }
  SearchScratch SelectScratch(const kernels::Exec&, const LayerShape&, const IndexDescriptor&,
                              const SearchPlanSize&) const override {
    return {};
  }
  void Select(const HeadSearch&, GroupRule, std::span<uint32_t>) const override {}

 private:
  const PluginInfo info_;
  const FlatIndex flat_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_PLUGINS_PLUGIN_INDEX_H_
