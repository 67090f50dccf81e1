// The pages of shared memory: where they can be huge, how large they are, and how they come to be present.
//
// By default Linux gives shared memory pages of 4 KiB (transparent_hugepage/shmem_enabled is `never`).
// Their first touch runs at 0.4 to 1.3 GB/s, and of a row that is read somewhere in a large pool the miss
// of the TLB costs more than the bytes. From 6.1 on Linux makes a huge page of a range on demand
// (MADV_COLLAPSE), whatever that setting says but `deny`: at the speed of clearing the memory, while
// little of the range is present.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_READ_PAGES_H_
#define PQCACHED_KVSTORE_READ_PAGES_H_

#include <cstddef>
#include <span>

namespace pqcached::kvstore {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// A shared mapping of the first size_bytes (> 0) behind the descriptor, with the protection of mmap(2); the
// caller's, to give to munmap. Null, with errno set, when the kernel refuses.
//
// One of kHugePageBytes and more begins at a multiple of them: a huge page is one entry of the page table
// only where addresses begin as offsets of the memory do.
std::byte* MapMemory(int descriptor, size_t size_bytes, int protection);

// Makes the memory present and keeps its bytes, whoever reads and writes them meanwhile; in huge pages where
// the machine has them to give, in small ones elsewhere. Returns whether all that can lie in huge pages
// (whole kHugePageBytes from a multiple of them on) now does; false when there is none.
bool TouchPages(std::span<std::byte> memory);

// Asks for huge pages at the first use of memory that is mapped from the descriptor. Returns the size of the
// pages that it gets without TouchPages.
size_t AdvisePages(int descriptor, std::span<std::byte> memory);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_PAGES_H_
