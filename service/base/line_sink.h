// LineSink writes the lines of a log to a descriptor, and survives a full disk.
//
// A line that cannot be written whole is lost, and counted. The next line that can be written
// follows one that names the loss (event=log_lines_lost). A line also names each jump of the wall
// clock (event=clock_jumped), because the times of the lines around it cannot be compared.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_BASE_LINE_SINK_H_
#define PQCACHED_SERVICE_BASE_LINE_SINK_H_

#include <spdlog/common.h>
#include <spdlog/sinks/base_sink.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "absl/strings/string_view.h"
#include "kvstore/local_session.h"

namespace pqcached::service {

class LineSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  // `file` is open for appending.
  explicit LineSink(kvstore::FileDescriptor file) : file_(std::move(file)) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override;
  void flush_() override {}

 private:
  using Clock = std::chrono::steady_clock;

  // Writes a line of the sink itself with the time of `message`. Returns false when it is lost.
  bool WriteOwn(const spdlog::details::log_msg& message, absl::string_view text);
  bool WriteLine(const spdlog::details::log_msg& message);
  bool WriteBytes(absl::string_view bytes);
  // Returns the time by which the wall clock has moved more than the steady clock since the last
  // call.
  std::chrono::duration<double> TakeJump();

  const kvstore::FileDescriptor file_;
  uint64_t lost_lines_ = 0;
  int error_ = 0;      // the errno of the last loss
  bool torn_ = false;  // the file ends with a part of a line
  spdlog::log_clock::time_point wall_ = spdlog::log_clock::now();
  Clock::time_point steady_ = Clock::now();
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_LINE_SINK_H_
