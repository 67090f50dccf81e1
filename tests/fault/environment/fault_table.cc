#include "fault_table.h"

namespace pqcached::testing {

std::span<const FaultRow> FaultRows() {
  static const std::vector<FaultRow> rows = {
      {Fault::kTmpfsPools,
       "`pool_directory` on a full tmpfs: pools",
       "Calls that need pages are RESOURCE_EXHAUSTED, at each of their allocations "
       "(`AllocationFaultsTest`). Other calls go on",
       {"short_of_memory"},
       "VolumeFaultsTest.FullTmpfsPools"},
      {Fault::kTmpfsRecords,
       "`pool_directory` on a full tmpfs: records",
       "New sequences and long lists of segments are RESOURCE_EXHAUSTED. The control memory of new "
       "sessions is anonymous",
       {"short_of_memory"},
       "VolumeFaultsTest.FullTmpfsRecords"},
      {Fault::kDiskPools,
       "`pool_directory` on a full disk",
       "As on a tmpfs, and the next worker recovers from the full disk",
       {"short_of_memory", "recovered"},
       "VolumeFaultsTest.FullDiskPools"},
      {Fault::kDiskLog,
       "`log_file` on a full disk",
       "No call notices it. Lines are lost, and counted in the first line that has room again",
       {"log_lines_lost"},
       "VolumeFaultsTest.FullDiskLog"},
      {Fault::kControlGroup1,
       "other processes fill the control group (version 1)",
       "Calls that need memory are RESOURCE_EXHAUSTED while less than 64 MiB are left. At the "
       "limit the kernel kills the process with the highest `oom_score_adj`",
       {"short_of_memory"},
       "MemoryFaultsTest.ControlGroupOfVersion1"},
      {Fault::kControlGroup2,
       "other processes fill the control group (version 2)",
       "Likewise, with `memory.max` and `memory.high`",
       {"short_of_memory"},
       "MemoryFaultsTest.ControlGroupOfVersion2"},
      {Fault::kHugePages,
       "`pool_directory` on hugetlbfs without free pages",
       "New caches are RESOURCE_EXHAUSTED. The pages of open ones are reserved",
       {"short_of_memory"},
       "MemoryFaultsTest.HugePagesExhausted"},
      {Fault::kDescriptors,
       "no descriptors are left",
       "New connections wait. Calls that need a descriptor of the worker, or of the supervisor, "
       "are RESOURCE_EXHAUSTED. Open sessions go on",
       {"cannot_accept", "short_of_descriptors"},
       "ProcessFaultsTest.DescriptorsExhausted"},
      {Fault::kStoppedSupervisor,
       "the supervisor is stopped for 10 s",
       "Sessions go on. New sessions and caches are UNAVAILABLE. The supervisor does not count its "
       "own pause against the worker",
       {"session_not_kept", "supervisor_paused"},
       "ProcessFaultsTest.SupervisorStopped"},
      {Fault::kStoppedWorker,
       "the worker is stopped",
       "Calls end at their deadlines. After a short stop the worker goes on; after "
       "`watchdog_timeout` it is killed, and the next one recovers",
       {"worker_paused", "worker_killed", "recovered"},
       "ProcessFaultsTest.WorkerStopped"},
      {Fault::kStoppedClient,
       "a client with leases is stopped",
       "Others go on. After `lease_timeout` its leases are revoked; it attaches again when it "
       "continues",
       {"leases_expired"},
       "ProcessFaultsTest.ClientStopped"},
      {Fault::kClockJump,
       "the wall clock jumps",
       "No deadline, lease or pin notices it",
       {"clock_jumped"},
       "ProcessFaultsTest.ClockJumps"},
      {Fault::kTwoDaemons,
       "a second daemon with the same socket or `pool_directory`",
       "The second one ends with 1 (socket), or waits until the directory is free (directory). The "
       "first one goes on",
       {"not_started", "configuration_refused"},
       "ProcessFaultsTest.TwoDaemons"},
  };
  return rows;
}

const FaultRow& RowOf(Fault fault) { return FaultRows()[static_cast<size_t>(fault)]; }

std::string FaultTable() {
  std::string table = "| fault | consequence | `event=` in the log | test |\n|---|---|---|---|\n";
  for (const FaultRow& row : FaultRows()) {
    std::string events;
    for (const std::string& event : row.events) {
      events += (events.empty() ? "`" : ", `") + event + "`";
    }
    table +=
        "| " + row.name + " | " + row.consequence + " | " + events + " | `" + row.test + "` |\n";
  }
  return table;
}

}  // namespace pqcached::testing
