// The faults of the environment that the sidecar survives: the table of service/README.md, of which
// each row has its test.
#ifndef PQCACHED_TESTS_FAULT_ENVIRONMENT_FAULT_TABLE_H_
#define PQCACHED_TESTS_FAULT_ENVIRONMENT_FAULT_TABLE_H_

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace pqcached::testing {

enum class Fault {
  kTmpfsPools,
  kTmpfsRecords,
  kDiskPools,
  kDiskLog,
  kControlGroup1,
  kControlGroup2,
  kHugePages,
  kDescriptors,
  kStoppedSupervisor,
  kStoppedWorker,
  kStoppedClient,
  kClockJump,
  kTwoDaemons,
};
inline constexpr size_t kFaultCount = static_cast<size_t>(Fault::kTwoDaemons) + 1;

struct FaultRow {
  Fault fault;
  std::string name;
  std::string consequence;          // for calls and clients, during the fault and after it
  std::vector<std::string> events;  // of the log
  std::string test;                 // SUITE.NAME
};

// By fault.
std::span<const FaultRow> FaultRows();
const FaultRow& RowOf(Fault fault);

// The lines of the table in the README.
std::string FaultTable();

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_ENVIRONMENT_FAULT_TABLE_H_
