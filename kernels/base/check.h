// PQC_CHECK(condition) stops the program when the condition is false.
//
// It checks the REQUIRES clauses of kernels: a false condition is a bug of the caller, and no peer
// or file can cause it. Kernels neither log nor throw, so the check traps.
#ifndef PQCACHED_KERNELS_BASE_CHECK_H_
#define PQCACHED_KERNELS_BASE_CHECK_H_

#define PQC_CHECK(condition)       \
  do {                             \
    if (!(condition)) [[unlikely]] \
      __builtin_trap();            \
  } while (false)

#endif  // PQCACHED_KERNELS_BASE_CHECK_H_
