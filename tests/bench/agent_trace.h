// Shape of a conversation as agents have them, in numbers that eviction_study includes and
// turn_trace.py reads as text: one constant per line, whole decimal numbers.
//
// The prompt of turn t of kTurns has t * (kPromptTokens / kTimedTurn) tokens, of which all but the
// last kPromptTokens / kTimedTurn were in the turn before: 94 % of all input tokens are prefix hits.
// One token in kInputTokensPerOutputToken is an answer's, which the next prompt holds.
#ifndef PQCACHED_TESTS_BENCH_AGENT_TRACE_H_
#define PQCACHED_TESTS_BENCH_AGENT_TRACE_H_

#include <cstdint>

namespace pqcached::agent_trace {

inline constexpr uint32_t kTurns = 33;
inline constexpr uint32_t kTimedTurn = 30;
inline constexpr uint32_t kPromptTokens = 80000;  // of the timed turn
inline constexpr uint32_t kInputTokensPerOutputToken = 131;

}  // namespace pqcached::agent_trace

#endif  // PQCACHED_TESTS_BENCH_AGENT_TRACE_H_
