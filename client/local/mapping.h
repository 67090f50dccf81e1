// Mapping is memory of the sidecar, mapped into this process for as long as the object lives.
//
// Thread-safe, apart from SetHold. The sidecar may change the mapped bytes at any time.
#ifndef PQCACHED_CLIENT_LOCAL_MAPPING_H_
#define PQCACHED_CLIENT_LOCAL_MAPPING_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

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

  // Sets what HoldPages calls; before others use the object.
  void SetHold(std::function<pqc_status()> hold) { hold_ = std::move(hold); }
  // Makes the sidecar keep the pages of this memory, a pool, in place until the session ends.
  // Called before the memory is page-locked, because a device goes on reading a page that it has
  // locked when the sidecar has replaced that page.
  //
  // Errors: PQC_UNIMPLEMENTED  an older sidecar, or memory that is no pool
  pqc_status HoldPages() const { return hold_ ? hold_() : PQC_UNIMPLEMENTED; }

 private:
  Mapping(std::byte* data, size_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* const data_;
  const size_t size_bytes_;
  std::function<pqc_status()> hold_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_MAPPING_H_
