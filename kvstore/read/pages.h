// Pages of shared memory: makes them huge where possible, reports their size, and faults them in.
//
// Linux gives shared memory 4 KiB pages by default (transparent_hugepage/shmem_enabled is `never`).
// Their first touch runs at 0.4 to 1.3 GB/s, and reading a row at a random place in a large pool
// spends more time on the TLB miss than on the bytes. Linux 6.1 and later makes a huge page of a
// range on demand (MADV_COLLAPSE), under every value of that setting except `deny`. This runs at
// the speed of clearing the memory as long as little of the range is present.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_READ_PAGES_H_
#define PQCACHED_KVSTORE_READ_PAGES_H_

#include <cstddef>
#include <span>

namespace pqcached::kvstore {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Maps the first size_bytes (> 0) of the descriptor's memory as shared, with the protection of
// mmap(2). The caller unmaps it with UnmapMemory. Returns null, with errno set, when the kernel
// refuses.
//
// A mapping of kHugePageBytes or more begins at a multiple of kHugePageBytes: a huge page is one
// page table entry only where addresses have the same alignment as offsets of the memory.
std::byte* MapMemory(int descriptor, size_t size_bytes, int protection);
void UnmapMemory(std::byte* data, size_t size_bytes);

struct Population {
  bool present = true;  // false: the kernel refused a page (a full file system)
  bool huge = false;  // every aligned kHugePageBytes is a huge page now, and there is at least one
};

// Faults the memory in and preserves its bytes, even while other threads or processes read and
// write them; with huge pages where the machine has free ones, with small pages elsewhere. Before
// Linux 5.14, a page that the kernel refuses is a SIGBUS.
Population PopulatePages(std::span<std::byte> memory);

// Maps the pages of memory that is mapped for reading, and whose pages are present, into this
// process. Without an effect before Linux 5.14.
void PopulateForReading(std::span<const std::byte> memory);

// Requests huge pages for the first use of memory that is mapped from the descriptor. Returns the
// page size in bytes that the memory gets without PopulatePages.
size_t AdviseHugePages(int descriptor, std::span<std::byte> memory);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_PAGES_H_
