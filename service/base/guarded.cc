#include "service/base/guarded.h"

#include <exception>
#include <new>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"

namespace pqcached::service {

absl::Status Guarded(const std::function<absl::Status()>& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return ShortOf(Shortage::kMemory, "memory", "the machine has too little for this call",
                   kRetryMemory);
  } catch (const std::length_error&) {
    return ResourceExhausted("memory", "the call needs more than there can be", kNoRetry);
  } catch (const std::exception& error) {
    return Internal(absl::StrCat("exception: ", error.what()));
  }
}

}  // namespace pqcached::service
