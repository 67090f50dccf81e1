// Tests run twice: as they are, and with messages that say nothing (rewritten_texts.cc). Codes, fields
// and retry times have to be the same; messages are looked at in the first run alone.
#ifndef PQCACHED_TESTS_REWRITTEN_TEXTS_H_
#define PQCACHED_TESTS_REWRITTEN_TEXTS_H_

#include <cstdlib>
#include <string_view>

namespace pqcached {

inline constexpr char kRewrittenText[] = "[rewritten]";

// Returns whether this is the second run. ctest sets the variable, so that a test fails when the
// function was not replaced after all.
inline bool TextsAreRewritten() { return std::getenv("PQCACHED_TEST_REWRITTEN_TEXTS") != nullptr; }

// Returns whether a message is as it should be: has `part`, or says nothing in the second run.
inline bool HasText(std::string_view message, std::string_view part) {
  if (TextsAreRewritten()) return message == kRewrittenText;
  return message.find(part) != std::string_view::npos;
}

}  // namespace pqcached

#endif  // PQCACHED_TESTS_REWRITTEN_TEXTS_H_
