#ifndef PQCACHED_CLIENT_EXAMPLES_TINYLM_PQCACHED_ATTENTION_H_
#define PQCACHED_CLIENT_EXAMPLES_TINYLM_PQCACHED_ATTENTION_H_

// Attention whose middle tokens live in a pqcached sidecar: how an engine links the client.
//
// The engine keeps the sink and the window. All rows go to the sidecar during the prefill, which
// then builds its indexes. A decode step attends to sink and window here, asks the sidecar for the
// attention over the tokens that it selects from the rest, and merges the two by their log-sum-exp;
// the step's new rows follow when it ends. A question is rolled back by truncating the sequence to
// the end of the prefill.

#include <pqcached/client.h>

#include <memory>
#include <string>
#include <vector>

#include "client/examples/tinylm/attention.h"

namespace tinylm {

class PqcachedAttention : public Attention {
 public:
  struct Options {
    std::string endpoint;
    std::string cache_name = "tinylm";
    uint64_t capacity_bytes = uint64_t{256} << 20;
    pqc_dtype dtype = PQC_F16;       // of the stored rows
    std::vector<pqc_index> indexes;  // built at the end of each prefill; flat needs no build
    WindowAttention::Options engine_tokens;
  };

  struct LayerBuild {
    uint32_t layer = 0;
    double seconds = 0;
    uint64_t index_bytes = 0, codebook_bytes = 0;
  };
  struct IndexBuild {
    pqc_index index;
    std::vector<LayerBuild> layers;  // ascending
    double seconds = 0;              // as this engine saw it
  };

  // Connects and opens the cache. Throws std::runtime_error with the client's message.
  PqcachedAttention(const Model& model, const Options& options, Workers& workers);
  ~PqcachedAttention() override;

  // How later steps select: `ratio` of all tokens are attended, sink and window included. At first:
  // flat, 1/10.
  void SetSelection(const pqc_index& index, double ratio);
  // The same with a fixed number of attended tokens. A context that has no more is attended whole.
  void SetTokenBudget(const pqc_index& index, uint64_t token_count);

  void BeginSequence() override;
  void Prefill(const KvChunk& chunk) override;
  void EndPrefill() override;
  void Decode(const DecodeArgs& args) override;
  void EndStep() override;
  void Rewind() override;
  AttendedTokens last_attended() const override { return attended_; }
  size_t engine_kv_bytes() const override { return ends_.engine_kv_bytes(); }

  const std::vector<IndexBuild>& builds() const { return builds_; }  // of this sequence
  pqc_sequence_info DescribeSequence() const;

 private:
  struct NewRows {
    uint32_t layer;
    std::vector<float> k, v;
  };
  struct CloseClient {
    void operator()(pqc_client* client) const { pqc_client_close(client); }
  };
  struct CloseCache {
    void operator()(pqc_cache* cache) const { pqc_cache_close(cache); }
  };

  const Config& config_;
  Options options_;
  WindowAttention ends_;  // sink and window
  std::unique_ptr<pqc_client, CloseClient> client_;
  std::unique_ptr<pqc_cache, CloseCache> cache_;
  pqc_sequence* sequence_ = nullptr;
  pqc_selection selection_;
  uint64_t token_budget_ = 0;  // of each step; 0 = selection_.ratio
  std::vector<IndexBuild> builds_;
  uint32_t position_ = 0;          // of the running step
  std::vector<NewRows> new_rows_;  // of the running step, by layer
  AttendedTokens attended_;
};

// An index for Options::indexes and SetSelection.
pqc_index PqIndex(uint32_t subspaces, uint32_t bits);
pqc_index FlatIndex();

}  // namespace tinylm

#endif  // PQCACHED_CLIENT_EXAMPLES_TINYLM_PQCACHED_ATTENTION_H_
