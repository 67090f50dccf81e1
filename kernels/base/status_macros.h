// RETURN_IF_ERROR and ASSIGN_OR_RETURN end a function at the first error of a call.
//
//     absl::StatusOr<Rows> Fetch(const Reading& reading, uint32_t layer) {
//       RETURN_IF_ERROR(CheckLayer(layer));
//       ASSIGN_OR_RETURN(const LayerView view, Open(reading, layer));
//       return Copy(view);
//     }
//
// They work with each of the project's statuses: absl::Status, grpc::Status, gpu::Status and
// pqc_status. Only .cc files and private headers may include this header, because its macros have
// no prefix.
#ifndef PQCACHED_KERNELS_BASE_STATUS_MACROS_H_
#define PQCACHED_KERNELS_BASE_STATUS_MACROS_H_

#include <type_traits>
#include <utility>

namespace pqcached {

// Returns true for a status without an error. An enumeration's value 0 is no error.
template <class Status>
bool IsOk(const Status& status) {
  if constexpr (std::is_enum_v<Status>) {
    return status == Status{};
  } else {
    return status.ok();
  }
}

}  // namespace pqcached

#define PQCACHED_JOIN_(a, b) PQCACHED_JOIN_EXPANDED_(a, b)
#define PQCACHED_JOIN_EXPANDED_(a, b) a##b

// Evaluates a status, and returns it from the function if it is an error.
#define RETURN_IF_ERROR(...) \
  PQCACHED_RETURN_IF_ERROR_(PQCACHED_JOIN_(returned_status_, __COUNTER__), __VA_ARGS__)
#define PQCACHED_RETURN_IF_ERROR_(status, ...)    \
  do {                                            \
    auto status = (__VA_ARGS__);                  \
    if (!::pqcached::IsOk(status)) return status; \
  } while (false)

// Evaluates a StatusOr. Returns its status from the function if it is an error; otherwise moves its
// value to `target`, which may be a declaration.
#define ASSIGN_OR_RETURN(target, ...) \
  PQCACHED_ASSIGN_OR_RETURN_(PQCACHED_JOIN_(status_or_, __COUNTER__), target, __VA_ARGS__)
#define PQCACHED_ASSIGN_OR_RETURN_(result, target, ...) \
  auto result = (__VA_ARGS__);                          \
  if (!result.ok()) return std::move(result).status();  \
  target = *std::move(result)

#endif  // PQCACHED_KERNELS_BASE_STATUS_MACROS_H_
