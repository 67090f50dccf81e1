#ifndef PQCACHED_TESTS_QUALITY_CHOSEN_ATTENTION_H_
#define PQCACHED_TESTS_QUALITY_CHOSEN_ATTENTION_H_

// Selective attention inside the engine, in fp32 and without any index: what the judge measures the
// sidecar against. A *chooser* names the middle tokens of each kv head; sink, window and those are
// then attended exactly.

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/tinylm/attention.h"

namespace pqcached::quality {

// How many tokens a step attends to, sink and window included. Exactly one of the two is set.
struct Budget {
  double ratio = 0;    // of all tokens so far
  uint64_t count = 0;  // at least sink + window + 1
};

// One kv head of one step. The middle is [begin, end): without sink and window.
struct Choice {
  uint32_t layer, kv_head, position;
  uint32_t begin, end, count;  // count <= end - begin
  const float* queries;        // [group_size, head_dim], scaled
  uint32_t group_size;
  const tinylm::KvRows& rows;
};

// Returns `count` positions of the middle, in any order.
using Chooser = std::function<std::vector<uint32_t>(const Choice& choice)>;

// The tokens with the largest sum over the group of softmax over *all* tokens up to `position`: no
// choice of the same size covers more attention mass. Ties go to the lowest position.
std::vector<uint32_t> ChooseExactTopK(const Choice& choice);
// The latest ones: with the window, one longer window.
std::vector<uint32_t> ChooseLatest(const Choice& choice);
// Any; the same ones for the same layer, head and position.
std::vector<uint32_t> ChooseRandom(const Choice& choice);

// Single-thread.
class ChosenAttention : public tinylm::Attention {
 public:
  ChosenAttention(const tinylm::Config& config, tinylm::WindowAttention::Options ends,
                  tinylm::Workers& workers);

  void SetChooser(Chooser chooser, Budget budget);

  void BeginSequence() override;
  void Prefill(const tinylm::KvChunk& chunk) override;
  void Decode(const tinylm::DecodeArgs& args) override;
  void Rewind() override;
  tinylm::AttendedTokens last_attended() const override { return attended_; }
  size_t engine_kv_bytes() const override;

  const tinylm::KvRows& rows(uint32_t layer) const { return layers_[layer]; }

 private:
  const tinylm::Config& config_;
  tinylm::WindowAttention::Options sink_and_window_;
  tinylm::Workers& workers_;
  std::vector<tinylm::KvRows> layers_;
  Chooser chooser_ = ChooseExactTopK;
  Budget budget_{.ratio = 1};
  uint32_t prefill_end_ = 0;
  tinylm::AttendedTokens attended_;
};

}  // namespace pqcached::quality

#endif  // PQCACHED_TESTS_QUALITY_CHOSEN_ATTENTION_H_
