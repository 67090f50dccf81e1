// The calling thread's last refusal, and the frame that every call of the C ABI runs in.
// Thread-safe.
#ifndef PQCACHED_CLIENT_BASE_ERROR_H_
#define PQCACHED_CLIENT_BASE_ERROR_H_

#include <exception>
#include <initializer_list>
#include <new>
#include <string>
#include <string_view>

#include "client/base/deadline.h"
#include "client/base/remote.h"
#include "kvstore/read/refusal.h"
#include "pqcached/client.h"

namespace pqcached::client {

using kvstore::kNoRetry;
using kvstore::kRetryConflict;
using kvstore::kRetryMemory;
using kvstore::kRetryQueue;

// A FieldPath is the path of a field in the words of the C header, such as
// "items[2].query_position". It does not allocate; longer paths are cut.
class FieldPath {
 public:
  FieldPath(const char* path) noexcept;  // NOLINT: a literal is a path
  // Returns a path printed as by printf.
  [[gnu::format(printf, 1, 2)]] static FieldPath Of(const char* format, ...) noexcept;

  const char* c_str() const { return text_; }

 private:
  FieldPath() = default;

  char text_[sizeof(RefusalBuffer::field)] = {};
};

// A HeaderName pairs a path in the request with its name in the C header:
// {"items[0].rows", "layers"}.
struct HeaderName {
  std::string_view wire;
  std::string_view header;
};

// Returns the path of a refused field in the words of the C header. The first of `names` whose wire
// path is the beginning of `field` replaces it; the fields of a selection and of an index, and
// `sequence_id`, have the same names in all calls.
//
//     HeaderPathOf("items[0].selection.token_ratio", {{"items[0]", ""}})  // "selection.ratio"
std::string HeaderPathOf(std::string_view field, std::initializer_list<HeaderName> names = {});

// Records why the thread's call failed, and returns `status`. `field` is the refused field ("" =
// none); the rest is the text, which begins with the refused value. Does not allocate. A repetition
// is not worthwhile; see SetRetry.
//
//     return Fail(PQC_INVALID_ARGUMENT, "options.path", "%u is unknown", path);
[[gnu::format(printf, 3, 4)]] pqc_status Fail(pqc_status status, const FieldPath& field,
                                              const char* format, ...) noexcept;
// Records a refusal that another function has returned.
pqc_status Fail(pqc_status status, const RefusalBuffer& refusal) noexcept;
// Records a refusal whose field is named as in the request.
pqc_status Fail(const kvstore::Refusal& refusal);

// Reports what a Remote returned, with the field's path in the words of the C header: see
// HeaderPathOf. `names` are the names of the C call's arguments.
pqc_status Report(pqc_status status, const RefusalBuffer& error,
                  std::initializer_list<HeaderName> names = {});

// Sets after which time a repetition of the thread's failed call may succeed. Returns `status`.
//
//     return SetRetry(kRetryConflict, Fail(PQC_ABORTED, "sequence", "another thread changes it"));
pqc_status SetRetry(uint32_t retry_ms, pqc_status status) noexcept;

// Puts `path` before the field of the thread's last refusal. Returns `status`.
pqc_status PrefixField(const FieldPath& path, pqc_status status) noexcept;
// Adds `first` to the number in the field of the thread's last refusal, when that is an element of
// `list`: a call was made for the elements from `first` on. Returns `status`.
//
//     AddToNumber("pages", 4, status)  // "pages[1].key" becomes "pages[5].key"
pqc_status AddToNumber(const char* list, uint32_t first, pqc_status status) noexcept;
// Puts `text` and ": " before the text of the thread's last refusal. Returns `status`.
pqc_status PrefixText(const char* text, pqc_status status) noexcept;

// Puts `text` behind the text of the thread's last refusal. Returns `status`.
pqc_status AppendText(const char* text, pqc_status status) noexcept;

// Returns the thread's last refusal; empty after a call that succeeded.
const RefusalBuffer& LastRefusal() noexcept;
// Returns field and text of the thread's last refusal in one line.
const char* LastMessage() noexcept;
void ClearLastError() noexcept;

// Sets text and field, cut to their sizes.
void SetRefusal(RefusalBuffer* refusal, const char* field, const char* text) noexcept;

// Runs the body of one call and converts exceptions to statuses.
template <class Body>
pqc_status Call(const Body& body) noexcept {
  ClearLastError();
  const CallFrame frame;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Fail(PQC_RESOURCE_EXHAUSTED, "", "the client is out of memory");
  } catch (const std::exception& error) {
    return Fail(PQC_INTERNAL, "", "%s", error.what());
  }
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_ERROR_H_
