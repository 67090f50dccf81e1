// A recorded call: one line of the file that libpqcached_client writes when PQCACHED_RECORD names
// it.
#ifndef PQCACHED_CLIENT_CONFORM_CALL_H_
#define PQCACHED_CLIENT_CONFORM_CALL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pqcached/status.h"

namespace pqcached::conform {

struct StepItem {
  uint64_t sequence = 0;
  uint64_t position = 0;
  uint64_t length = 0;
};

struct LayerTokens {
  uint64_t layer = 0;
  std::optional<uint64_t> tokens;
};

struct RecordedCall {
  size_t line = 0;
  uint64_t pid = 0;
  std::optional<uint64_t> forked_from;  // the process that opened the record, if it is another one
  std::optional<uint64_t> format;       // in the first line of a process, which is no call
  uint64_t thread = 0;
  uint64_t begin = 0;           // place among the beginnings and ends of calls of the process
  std::optional<uint64_t> end;  // nullopt = had not returned when the line was written
  uint64_t begin_us = 0;
  uint64_t end_us = 0;
  std::string name;
  pqc_status status = PQC_OK;
  std::string field;
  uint64_t retry_ms = 0;
  std::map<std::string, uint64_t, std::less<>> handles;  // addresses by argument; 0 = NULL
  std::map<std::string, uint64_t, std::less<>> numbers;
  std::vector<uint64_t> sequences;
  std::vector<uint64_t> reordered;
  std::vector<StepItem> items;
  std::vector<LayerTokens> layers;
  std::string arguments;  // all that is recorded of them: calls with the same text are repetitions

  // Returns an argument; nullopt when it is not recorded.
  std::optional<uint64_t> Number(std::string_view key) const;
};

// The version of the lines that this program reads.
inline constexpr uint64_t kFormat = 1;

// Reads a line. Returns "" and sets *call, or returns what is wrong with the line. Keys that are
// not known are ignored.
std::string ReadCall(std::string_view text, RecordedCall* call);

// Returns "line N", where the record has the call.
std::string InLine(const RecordedCall& call);

}  // namespace pqcached::conform

#endif  // PQCACHED_CLIENT_CONFORM_CALL_H_
