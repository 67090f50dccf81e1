// Which sanitizer this is compiled for: GCC says so by macros, Clang by features. Defines GCC's macros for both.
#ifndef PQCACHED_TESTS_SANITIZERS_H_
#define PQCACHED_TESTS_SANITIZERS_H_

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer) && !defined(__SANITIZE_THREAD__)
#define __SANITIZE_THREAD__ 1
#endif
#endif

#endif  // PQCACHED_TESTS_SANITIZERS_H_
