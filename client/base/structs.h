// The rule by which structs of the C ABI are read and written when the other side has another
// version of them: client.h, convention 2. Used towards the engine (arguments.h), and by
// libpqcached_rpc towards a client library of another version.
//
// Every struct begins with its struct_size. Pure; thread-safe.
#ifndef PQCACHED_CLIENT_BASE_STRUCTS_H_
#define PQCACHED_CLIENT_BASE_STRUCTS_H_

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "client/base/struct_sizes.h"

namespace pqcached::client {

// Larger values of struct_size are uninitialised memory, not a struct of a later version.
inline constexpr size_t kMaxStructBytes = 4096;

// Returns struct_size, also where the other side's version of the struct is another type than this
// one's.
inline size_t SizeOf(const void* from) {
  size_t size;
  std::memcpy(&size, from, sizeof(size));
  return size;
}

enum class StructFit {
  kKnown,        // all of it was read
  kWrongSize,    // smaller than in its first release, or of an absurd size
  kUnknownField  // a field that this version does not know is not zero
};

// Copies a struct of the other side, of `size` bytes. Fields that it lacks are zero in *to.
template <class Struct>
StructFit CopyStruct(const void* from, size_t size, Struct* to) {
  *to = {};
  if (size < kMinimumBytes<Struct> || size > kMaxStructBytes) return StructFit::kWrongSize;
  const auto* bytes = static_cast<const std::byte*>(from);
  const bool all_zero =
      size <= sizeof(Struct) || std::all_of(bytes + sizeof(Struct), bytes + size,
                                            [](std::byte byte) { return byte == std::byte{0}; });
  if (!all_zero) return StructFit::kUnknownField;
  std::memcpy(to, from, std::min(size, sizeof(Struct)));
  to->struct_size = sizeof(Struct);
  return StructFit::kKnown;
}

// Writes the fields of `from` to the other side's struct as far as that one has them. Its
// struct_size stays.
template <class Struct>
void WriteStruct(const Struct& from, Struct* to) {
  constexpr size_t kHead = sizeof(from.struct_size);
  std::memcpy(reinterpret_cast<std::byte*>(to) + kHead,
              reinterpret_cast<const std::byte*>(&from) + kHead,
              std::min(SizeOf(to), sizeof(Struct)) - kHead);
}

// Returns element `index` of an array of the other side, whose elements are as far apart as the
// struct_size of the first one says.
template <class Struct>
const Struct* ElementOf(const Struct* array, uint32_t index) {
  return reinterpret_cast<const Struct*>(reinterpret_cast<const std::byte*>(array) +
                                         size_t{index} * SizeOf(array));
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_STRUCTS_H_
