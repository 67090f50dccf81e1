#ifndef PQCACHED_TESTS_TINYLM_PROMPTS_H_
#define PQCACHED_TESTS_TINYLM_PROMPTS_H_

// Reads the prompt files, and asks the engine their questions.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/tinylm/engine.h"

namespace tinylm {

// One turn: the input is fed, then as many tokens are generated as the answer has.
struct Segment {
  std::vector<uint32_t> input, answer;
};

using Question = std::vector<Segment>;

struct Prompt {
  std::vector<uint32_t> context;
  std::vector<Question> questions;
};

// Reads the file directory/TASK_LENGTH.jsonl, its first `prompt_limit` contexts (0 = all).
//
// Throws std::runtime_error that names the file. HasPrompts returns true if the file exists.
std::vector<Prompt> LoadPrompts(const std::string& directory, const std::string& task,
                                uint32_t length, size_t prompt_limit = 0);
bool HasPrompts(const std::string& directory, const std::string& task, uint32_t length);

struct GeneratedToken {
  uint32_t token = 0;
  uint32_t runner_up = 0;
  float margin = 0;  // logit of `token` less that of `runner_up`
};

struct Answer {
  bool is_right = false;                // every generated token is the expected one
  std::vector<GeneratedToken> outputs;  // of all segments, in order
  std::vector<float> first_logits;      // after the first input
  uint32_t step_count = 0;              // number of tokens fed
  double seconds = 0;
};

// Asks one question after the prefilled context, greedily, and rewinds.
Answer Ask(Engine& engine, Attention& attention, const Question& question);

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_PROMPTS_H_
