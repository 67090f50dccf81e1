#ifndef PQCACHED_TESTS_TINYLM_RANKED_ATTENTION_H_
#define PQCACHED_TESTS_TINYLM_RANKED_ATTENTION_H_

// A model in several processes: each rank has a part of the heads, its own client and its own
// cache.
//
// Rank 0 is the engine's process; every other rank is a separate process (tinylm_rank), which makes
// the same calls for its heads. K, V and queries are sent to a rank, and the attention of the
// rank's heads is sent back, as a collective operation does between GPUs.

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/tinylm/attention.h"
#include "tests/tinylm/model.h"
#include "tests/tinylm/pqcached_attention.h"
#include "tests/tinylm/workers.h"

namespace tinylm {

// Descriptor from which tinylm_rank reads its commands.
inline constexpr int kRankSocket = 3;

// A rank in another process.
class RankProcess {
 public:
  // Starts the program `program` (tinylm_rank) with the model in `model_directory`.
  RankProcess(const std::string& program, const std::string& model_directory,
              const PqcachedAttention::Options& options);
  RankProcess(RankProcess&& other) noexcept;
  ~RankProcess();

  struct Command;
  // Sends a command with `floats`. Failures are std::runtime_error.
  void Send(const Command& command, const std::vector<float>& floats) const;
  // Receives the result of the last command: floats [count], or the other process's error.
  AttendedTokens Receive(std::vector<float>& floats) const;

 private:
  int socket_ = -1;
  pid_t pid_ = -1;
};

class RankedAttention : public Attention {
 public:
  // `others` are the ranks 1, 2, ..., started with the same options.
  RankedAttention(const Model& model, const PqcachedAttention::Options& options,
                  std::vector<RankProcess> others, Workers& workers);

  // Starts the ranks 1 .. rank_count - 1.
  static std::vector<RankProcess> Start(const std::string& program,
                                        const std::string& model_directory,
                                        const PqcachedAttention::Options& options);

  void SetSelection(const pqc_index& index, double ratio);

  void BeginSequence() override;
  void Prefill(const KvChunk& chunk) override;
  void EndPrefill() override;
  void Decode(const DecodeArgs& args) override;
  void EndStep() override;
  void Rewind() override;
  AttendedTokens last_attended() const override { return own_.last_attended(); }
  size_t engine_kv_bytes() const override { return own_.engine_kv_bytes(); }

 private:
  void ExecuteOnAll(const RankProcess::Command& command);

  const Config config_;  // config of the whole model
  const uint32_t rank_count_;
  std::vector<RankProcess> others_;
  PqcachedAttention own_;
};

// Main loop of a rank's process: executes the commands from the socket until its end. `options` are
// those of the rank.
void ServeRank(int socket, const Model& model, const PqcachedAttention::Options& options);

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_RANKED_ATTENTION_H_
