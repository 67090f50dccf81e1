// KeptImage: a copy of all memory that a keeper keeps, to be changed and restored.
#ifndef PQCACHED_TESTS_KVSTORE_RECORDS_KEPT_IMAGE_H_
#define PQCACHED_TESTS_KVSTORE_RECORDS_KEPT_IMAGE_H_

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "kvstore/memory/memfd.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore::testing {

struct KeptImage {
  static constexpr size_t kPageBytes = 4096;
  using Page = std::array<std::byte, kPageBytes>;
  struct Memory {
    size_t size_bytes = 0;
    std::map<size_t, Page> pages;  // by offset; those that are zero are left out
  };

  std::map<std::string, Memory> memories;

  explicit KeptImage(const MemoryKeeper& keeper) {
    for (const std::string& name : keeper.Names()) {
      const FileDescriptor kept = keeper.Take(name);
      Memory& memory = memories[name];
      memory.size_bytes = SizeOf(kept);
      const auto mapping = Mapping::Map(kept, memory.size_bytes, Mapping::Access::kRead);
      if (!mapping.ok()) std::abort();
      for (size_t offset = 0; offset + kPageBytes <= memory.size_bytes; offset += kPageBytes) {
        Page page;
        std::memcpy(page.data(), mapping->data() + offset, kPageBytes);
        if (page != Page{}) memory.pages[offset] = page;
      }
    }
  }

  // Returns whether all of it is kept again.
  bool Restore(MemoryKeeper& keeper) const {
    for (const auto& [name, memory] : memories) {
      const auto made = keeper.CreateMemory(name.c_str(), memory.size_bytes);
      if (!made.ok() || !keeper.Keep(name, made->get()).ok()) return false;
      const auto mapping = Mapping::Map(*made, memory.size_bytes, Mapping::Access::kReadWrite);
      if (!mapping.ok()) return false;
      for (const auto& [offset, page] : memory.pages) {
        std::memcpy(mapping->data() + offset, page.data(), kPageBytes);
      }
    }
    return true;
  }
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_RECORDS_KEPT_IMAGE_H_
