// Exit statuses of the program. Its supervisor decides by that of a worker.
#ifndef PQCACHED_SERVICE_BASE_EXIT_CODE_H_
#define PQCACHED_SERVICE_BASE_EXIT_CODE_H_

namespace pqcached::service {

inline constexpr int kExitFailed = 1;     // could not start or run
inline constexpr int kExitBadConfig = 2;  // command line or configuration
inline constexpr int kExitNoMemory = 3;   // too little memory to start: another start may succeed

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_EXIT_CODE_H_
