#include "client/local/mapping.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "client/base/error.h"
#include "kvstore/read/pages.h"

namespace pqcached::client {

pqc_status Mapping::Map(int descriptor, size_t size_bytes, MappingAccess access, const char* name,
                        std::shared_ptr<Mapping>* mapping) {
  struct Closer {
    int descriptor;
    ~Closer() {
      if (descriptor >= 0) close(descriptor);
    }
  } const closer{descriptor};
  struct stat status;
  // An access beyond the end of the file would raise SIGBUS.
  if (descriptor < 0 || fstat(descriptor, &status) != 0 || size_bytes == 0 ||
      static_cast<uint64_t>(status.st_size) < size_bytes) {
    return Fail(PQC_INTERNAL, name, "the sidecar's memory is smaller than the announced %zu bytes",
                size_bytes);
  }
  const int protection = access == MappingAccess::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  std::byte* const data = kvstore::MapMemory(descriptor, size_bytes, protection);
  if (data == nullptr) {
    return Fail(PQC_INTERNAL, name, "%zu bytes cannot be mapped: %s", size_bytes,
                std::strerror(errno));
  }
  mapping->reset(new Mapping(data, size_bytes));
  return PQC_OK;
}

Mapping::~Mapping() { kvstore::UnmapMemory(data_, size_bytes_); }

}  // namespace pqcached::client
