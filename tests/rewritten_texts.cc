// The function that puts the words of a refusal together, in place of kvstore/read/refusal_message.cc:
// all messages become "[rewritten]". A program that links it shows that nothing depends on messages.
#include "tests/rewritten_texts.h"

#include <algorithm>
#include <string_view>

#include "kvstore/read/refusal.h"

namespace pqcached::kvstore {

size_t WriteMessage(std::string_view, std::string_view, std::span<char> out) {
  const std::string_view message = std::string_view(kRewrittenText).substr(0, out.size() - 1);
  std::copy(message.begin(), message.end(), out.begin());
  out[message.size()] = '\0';
  return message.size();
}

}  // namespace pqcached::kvstore
