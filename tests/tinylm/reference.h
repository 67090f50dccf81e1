#ifndef PQCACHED_TESTS_TINYLM_REFERENCE_H_
#define PQCACHED_TESTS_TINYLM_REFERENCE_H_

// Compares the engine with outputs and logits that another implementation (PyTorch, fp32) computed.

#include <cstdint>
#include <string>
#include <vector>

#include "tests/tinylm/engine.h"

namespace tinylm {

struct ReferenceComparison {
  struct Mismatch {
    std::string where;
    uint32_t expected = 0, actual = 0;
    float margin = 0;  // logit of the actual token minus that of the best other token
    bool is_near_tie =
        false;  // the expected token is the runner-up, by less than twice the logit tolerance
  };

  uint32_t question_count = 0;
  uint32_t match_count = 0;  // questions whose generated tokens are all the reference's
  std::vector<Mismatch> mismatches;
  uint32_t logit_count = 0;
  float logit_max_abs_error = 0;

  void Add(const ReferenceComparison& other);
};

inline constexpr float kLogitTolerance = 1e-3f;

// Asks the questions that reference_directory/TASK_LENGTH.ref.jsonl answers, with full attention;
// only those of the first `prompt_limit` contexts (0 = all). Compares nothing when the file does
// not exist.
ReferenceComparison CompareWithReference(Engine& engine, Attention& attention,
                                         const std::string& prompt_directory,
                                         const std::string& reference_directory,
                                         const std::string& task, uint32_t length,
                                         size_t prompt_limit = 0);

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_REFERENCE_H_
