#ifndef PQCACHED_TESTS_QUALITY_KCACHE_ATTENTION_H_
#define PQCACHED_TESTS_QUALITY_KCACHE_ATTENTION_H_

// Attention by KCache (arXiv 2404.18057): the engine keeps the keys of all layers, and the values
// of its first layers; the other values are in a pqcached sidecar.
//
// A decode step computes the logits of all tokens here, takes the N best tokens of each query head,
// and reads their values by pqc_step_attend_positions with these logits: for each kv head one list,
// the union of what the query heads of its group have selected. The step's own token is attended to
// here, where it is selected.

#include <pqcached/client.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/tinylm/attention.h"
#include "tests/tinylm/model.h"

namespace pqcached::quality {

// Single-thread.
class KCacheAttention : public tinylm::Attention {
 public:
  struct Options {
    std::string endpoint;
    std::string cache_name = "kcache";
    uint64_t capacity_bytes = uint64_t{256} << 20;
    pqc_dtype dtype = PQC_F16;  // of the stored rows
    pqc_path_choice path = PQC_PATH_ANY;
    uint32_t kept_layers = 1;  // L: the first layers of the model, whose values stay in the engine
  };

  // Connects and opens the cache. Throws std::runtime_error with the client's message.
  KCacheAttention(const tinylm::Model& model, const Options& options, tinylm::Workers& workers);
  ~KCacheAttention() override;

  // Sets N, and whether the weights of the selected tokens have the sum 1; otherwise they are those
  // of the softmax over all tokens.
  void SetSelection(uint32_t token_count, bool renormalises);

  void BeginSequence() override;
  void Prefill(const tinylm::KvChunk& chunk) override;
  void Decode(const tinylm::DecodeArgs& args) override;
  void EndStep() override;
  void Rewind() override;
  // Returns the rows of the longest list as the selected tokens.
  tinylm::AttendedTokens last_attended() const override { return attended_; }
  size_t engine_kv_bytes() const override;

  // Layers whose values are in the sidecar.
  const std::vector<uint32_t>& stored_layers() const { return stored_layers_; }
  // Returns the bytes of the rows in the sidecar; half of them are keys, which nothing reads.
  uint64_t sidecar_row_bytes() const;

 private:
  // Keys of one kv head, transposed in panels of kPanelColumns tokens, which the matrix product
  // reads: [panels, head_dim, kPanelColumns].
  struct Keys {
    void Append(const float* key, uint32_t head_dim, uint32_t position);
    std::vector<float> panels;
  };
  // V of the step's token, [kv_heads, head_dim].
  struct NewRows {
    uint32_t layer = 0;
    std::vector<float> v;
  };
  // The tokens of one kv head that its query heads have selected.
  struct Selected {
    std::vector<int32_t> positions;          // ascending, without the step's token
    std::vector<std::vector<float>> logits;  // of each query head; -infinity: another's token
  };

  void OpenCache(const std::string& fingerprint);
  bool IsStored(uint32_t layer) const { return layer >= options_.kept_layers; }
  // Selects for the query heads of one kv head. Writes the logit of the step's token, or -infinity,
  // and the lse of all tokens, by query head.
  Selected Select(const tinylm::DecodeArgs& args, uint32_t kv_head, float* own, float* lse) const;
  // Attends to the values of the selected tokens, [kv_heads], in the sidecar.
  void AttendStored(const tinylm::DecodeArgs& args, const std::vector<Selected>& selected,
                    float* lse);

  const tinylm::Config config_;
  const Options options_;
  tinylm::Workers& workers_;
  std::vector<uint32_t> stored_layers_;
  std::vector<tinylm::KvRows> kept_;     // by layer; empty where the values are stored
  std::vector<std::vector<Keys>> keys_;  // by layer and kv head; of the stored layers
  std::shared_ptr<pqc_client> client_;   // deleted by the client library
  std::shared_ptr<pqc_cache> cache_;     // likewise
  pqc_sequence* sequence_ = nullptr;
  pqc_step* step_ = nullptr;
  uint32_t top_count_ = 64;
  bool renormalises_ = false;
  uint32_t prefill_end_ = 0, token_count_ = 0;
  std::vector<NewRows> new_rows_;  // of the step in progress
  tinylm::AttendedTokens attended_;
};

}  // namespace pqcached::quality

#endif  // PQCACHED_TESTS_QUALITY_KCACHE_ATTENTION_H_
