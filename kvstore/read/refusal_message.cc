// The only place where the words of a refusal are put together. Its one function has a file of its
// own, so that a test can link another one, which replaces every text, and see that nothing depends
// on texts.
#include <algorithm>

#include "kvstore/read/refusal.h"

namespace pqcached::kvstore {

size_t WriteMessage(std::string_view field, std::string_view text, std::span<char> out) {
  size_t length = 0;
  const auto append = [&](std::string_view part) {
    const size_t fitting = std::min(part.size(), out.size() - 1 - length);
    std::copy_n(part.data(), fitting, out.data() + length);
    length += fitting;
  };
  append(field);
  if (!field.empty() && !text.empty()) append(": ");
  append(text);
  out[length] = '\0';
  return length;
}

}  // namespace pqcached::kvstore
