#include "service/session/text.h"

#include <boost/locale/utf.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

namespace utf = boost::locale::utf;

bool IsPrintable(utf::code_point point) {
  const auto is_in = [point](utf::code_point first, utf::code_point last) {
    return point >= first && point <= last;
  };
  const bool control = point < 0x20 || is_in(0x7f, 0x9f);
  const bool separator = is_in(0x2028, 0x2029);
  const bool direction =
      point == 0x61c || is_in(0x200e, 0x200f) || is_in(0x202a, 0x202e) || is_in(0x2066, 0x2069);
  return !control && !separator && !direction;
}

}  // namespace

absl::Status CheckText(absl::string_view field, absl::string_view text, size_t max_bytes) {
  if (text.size() > max_bytes) {
    return InvalidArgument(field, absl::StrCat(text.size(), " bytes, must be at most ", max_bytes));
  }
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    const auto offset = at - text.data();
    const utf::code_point point = utf::utf_traits<char>::decode(at, end);
    if (!utf::is_valid_codepoint(point)) {
      return InvalidArgument(field, absl::StrCat("is not valid UTF-8 at byte ", offset));
    }
    if (!IsPrintable(point)) {
      return InvalidArgument(
          field, absl::StrFormat("has the unprintable character U+%04X at byte %d", point, offset));
    }
  }
  return absl::OkStatus();
}

}  // namespace pqcached::service
