// Log writes one line per event: time, level, `event=name`, then key=value pairs. Values with
// spaces are quoted.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_BASE_LOG_H_
#define PQCACHED_SERVICE_BASE_LOG_H_

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include "absl/strings/string_view.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace spdlog {
class logger;
}

namespace pqcached::service {

struct LogField {
  // `value` is anything that absl::StrCat takes.
  template <class Value>
  LogField(absl::string_view field_key, const Value& field_value)
      : key(field_key), value(absl::StrCat(field_value)) {}

  absl::string_view key;
  std::string value;
};

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kCritical, kOff };

class Log {
 public:
  // Opens the log. An empty `file` means standard error.
  //
  // Errors: kInvalidArgument  the level is unknown
  //         kNotFound         the file cannot be opened
  static absl::StatusOr<std::unique_ptr<Log>> Open(absl::string_view level,
                                                   const std::string& file);
  ~Log();

  void Write(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields) const;
  void Debug(absl::string_view event, std::initializer_list<LogField> fields) const;
  void Info(absl::string_view event, std::initializer_list<LogField> fields) const;
  void Warning(absl::string_view event, std::initializer_list<LogField> fields) const;
  void Error(absl::string_view event, std::initializer_list<LogField> fields) const;

  // Writes a line of the level "audit", which no setting silences: what an operator has changed.
  void Audit(absl::string_view event, std::initializer_list<LogField> fields) const;

  // Sets the level and returns the previous one. Lines of Audit have none.
  //
  // Errors: kInvalidArgument  the level is unknown
  absl::StatusOr<std::string> SetLevel(absl::string_view level);

 private:
  Log(std::shared_ptr<spdlog::logger> logger, std::shared_ptr<spdlog::logger> audit);

  // Both write to the same sink; shared because spdlog requires it.
  const std::shared_ptr<spdlog::logger> logger_;
  const std::shared_ptr<spdlog::logger> audit_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_LOG_H_
