#ifndef PQCACHED_TESTS_TINYLM_PQCACHED_ATTENTION_H_
#define PQCACHED_TESTS_TINYLM_PQCACHED_ATTENTION_H_

// Attention whose middle tokens are stored in a pqcached sidecar: an example of an engine that
// links the client.
//
// The engine keeps the sink and the window. All rows are sent to the sidecar during the prefill;
// the sidecar then builds its indexes. A decode step (steps.h) attends to sink and window here,
// requests the attention over the tokens that the client selects from the rest, and merges the two
// by their log-sum-exp; the step's new rows are appended when it ends. A question is rolled back by
// truncating the sequence to the end of the prefill, or asked in a fork of the sequence.
//
// A model in several processes (tensor parallel) has one attention per rank, over the rank's heads.

#include <pqcached/client.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/tinylm/attention.h"
#include "tests/tinylm/steps.h"

namespace tinylm {

class PqcachedAttention : public Attention {
 public:
  struct Options {
    std::string endpoint;
    std::string cache_name = "tinylm";
    uint64_t capacity_bytes = uint64_t{256} << 20;
    pqc_dtype dtype = PQC_F16;       // dtype of the stored rows
    std::vector<pqc_index> indexes;  // built at the end of each prefill; flat needs no build
    WindowAttention::Options engine_tokens;
    pqc_path_choice path = PQC_PATH_ANY;
    // Rank of this process, which has part `rank` of `rank_count` of the model's heads.
    uint32_t rank = 0, rank_count = 1;
  };

  struct LayerBuild {
    uint32_t layer = 0;
    double seconds = 0;
    uint64_t index_bytes = 0, codebook_bytes = 0;
  };
  struct IndexBuild {
    pqc_index index;
    std::vector<LayerBuild> layers;  // ascending
    double seconds = 0;              // measured by this engine
  };

  // Connects and opens the cache. Throws std::runtime_error with the client's message.
  PqcachedAttention(const Model& model, const Options& options, Workers& workers);
  // Constructs the attention over one rank's heads, whose number is in `config`. `fingerprint` is
  // that of the whole model.
  PqcachedAttention(const Config& config, const std::string& fingerprint, const Options& options,
                    Workers& workers);
  ~PqcachedAttention() override;

  // Returns another sequence that continues from here and shares all tokens; its steps use `steps`.
  std::unique_ptr<PqcachedAttention> Fork(Steps& steps, Workers& workers) const;
  pqc_client* client() const { return client_.get(); }

  // Sets the selection of later steps: a fraction `ratio` of all tokens is attended to, sink and
  // window included. Initially flat, 1/10.
  void SetSelection(const pqc_index& index, double ratio);
  // Sets a selection with a fixed number of attended tokens. A context with no more tokens than
  // that is attended to in full.
  void SetTokenBudget(const pqc_index& index, uint64_t token_count);

  // Sets how later steps join the query heads of a kv head. Initially PQC_SUM_SOFTMAX.
  void SetGroupRule(pqc_group_rule rule) { selection_.group_rule = rule; }

  void BeginSequence() override;
  void Prefill(const KvChunk& chunk) override;
  void EndPrefill() override;
  void Decode(const DecodeArgs& args) override;
  void EndStep() override;
  void Rewind() override;
  AttendedTokens last_attended() const override { return attended_; }
  size_t engine_kv_bytes() const override { return sink_and_window_.engine_kv_bytes(); }

  const std::vector<IndexBuild>& builds() const { return builds_; }  // of the present sequence
  pqc_sequence_info DescribeSequence() const;

 private:
  PqcachedAttention(const PqcachedAttention& parent, Steps& steps, Workers& workers);
  void OpenCache(const std::string& fingerprint);
  void AddSamples(const KvChunk& chunk);

  const Config config_;
  Options options_;
  WindowAttention sink_and_window_;     // sink and window
  std::shared_ptr<pqc_client> client_;  // shared with forks, as is the cache
  std::shared_ptr<pqc_cache> cache_;
  std::unique_ptr<Steps> own_steps_;
  Steps* steps_ = nullptr;
  pqc_sequence* sequence_ = nullptr;
  pqc_selection selection_;
  uint64_t token_budget_ = 0;  // budget of each step; 0 = selection_.ratio
  std::vector<IndexBuild> builds_;
  uint32_t position_ = 0;           // of the step in progress
  std::vector<StepRows> new_rows_;  // of the step in progress, by layer
  AttendedTokens attended_;
};

// Return indexes for Options::indexes and SetSelection.
pqc_index PqIndex(uint32_t subspaces, uint32_t bits);
pqc_index FlatIndex();
pqc_index GraphIndex();

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_PQCACHED_ATTENTION_H_
