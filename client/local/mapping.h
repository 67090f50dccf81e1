// Mapping is memory of the sidecar, mapped into this process for as long as the object lives.
//
// Immutable; thread-safe. The sidecar may change the mapped bytes at any time.
#ifndef PQCACHED_CLIENT_LOCAL_MAPPING_H_
#define PQCACHED_CLIENT_LOCAL_MAPPING_H_

#include <cstddef>
#include <memory>

#include "pqcached/client.h"

namespace pqcached::client {

enum class MappingAccess { kRead, kReadWrite };

class Mapping {
 public:
  // Takes ownership of the descriptor and closes it. `name` is used in error texts.
  //
  // Errors: PQC_INTERNAL  the descriptor has fewer bytes than `size_bytes`, or cannot be mapped
  static pqc_status Map(int descriptor, size_t size_bytes, MappingAccess access, const char* name,
                        std::shared_ptr<Mapping>* mapping);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  Mapping(std::byte* data, size_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* const data_;
  const size_t size_bytes_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_MAPPING_H_
