#include "service/base/line_sink.h"

#include <spdlog/details/log_msg.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace pqcached::service {
namespace {

// A difference of the clocks is a jump from this size on, beyond the share of the elapsed time by
// which NTP may adjust the rate of the wall clock.
constexpr double kLeastJumpSeconds = 1;
constexpr double kAdjustedShare = 1e-3;

}  // namespace

void LineSink::sink_it_(const spdlog::details::log_msg& message) {
  if (lost_lines_ > 0) {
    const std::string text =
        absl::StrCat("warning event=log_lines_lost lines=", lost_lines_, " message=\"",
                     error_ == 0 ? "" : std::strerror(error_), "\"");
    if (!WriteOwn(message, text)) {
      ++lost_lines_;
      return;
    }
    lost_lines_ = 0;
  }
  if (const double seconds = TakeJump().count(); seconds != 0) {
    const std::string text =
        absl::StrCat("warning event=clock_jumped seconds=", seconds,
                     " message=\"the wall clock was set, or the machine was suspended\"");
    if (!WriteOwn(message, text)) ++lost_lines_;
  }
  if (!WriteLine(message)) ++lost_lines_;
}

bool LineSink::WriteOwn(const spdlog::details::log_msg& message, absl::string_view text) {
  spdlog::details::log_msg own(message);
  own.payload = spdlog::string_view_t(text.data(), text.size());
  return WriteLine(own);
}

bool LineSink::WriteLine(const spdlog::details::log_msg& message) {
  spdlog::memory_buf_t line;
  if (torn_) line.push_back('\n');
  formatter_->format(message, line);
  return WriteBytes({line.data(), line.size()});
}

bool LineSink::WriteBytes(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = write(file_.get(), bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      error_ = wrote < 0 ? errno : ENOSPC;
      return false;
    }
    bytes.remove_prefix(static_cast<size_t>(wrote));
    torn_ = !bytes.empty();
  }
  return true;
}

std::chrono::duration<double> LineSink::TakeJump() {
  const spdlog::log_clock::time_point wall = spdlog::log_clock::now();
  const Clock::time_point steady = Clock::now();
  const std::chrono::duration<double> elapsed = steady - steady_;
  const std::chrono::duration<double> jump = (wall - wall_) - elapsed;
  wall_ = wall;
  steady_ = steady;
  const double least = kLeastJumpSeconds + kAdjustedShare * elapsed.count();
  return std::abs(jump.count()) < least ? std::chrono::duration<double>::zero() : jump;
}

}  // namespace pqcached::service
