#include "service/base/log.h"

#include <fcntl.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/spdlog.h>

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "service/base/line_sink.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

struct NamedLevel {
  absl::string_view name;
  spdlog::level::level_enum level;
};
constexpr std::array kLevels = {
    NamedLevel{"trace", spdlog::level::trace}, NamedLevel{"debug", spdlog::level::debug},
    NamedLevel{"info", spdlog::level::info},   NamedLevel{"warning", spdlog::level::warn},
    NamedLevel{"error", spdlog::level::err},   NamedLevel{"critical", spdlog::level::critical},
    NamedLevel{"off", spdlog::level::off},
};

std::optional<spdlog::level::level_enum> FindLevel(absl::string_view name) {
  for (const NamedLevel& each : kLevels) {
    if (each.name == name) return each.level;
  }
  return std::nullopt;
}

absl::Status UnknownLevel(absl::string_view name) {
  return InvalidArgument(
      "level", absl::StrCat("'", name,
                            "' must be one of trace, debug, info, warning, error, critical, off"));
}

bool NeedsQuotes(absl::string_view value) {
  if (value.empty()) return true;
  for (const char c : value) {
    if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c == 0x7f) return true;
  }
  return false;
}

std::string LineOf(absl::string_view level, absl::string_view event,
                   std::initializer_list<LogField> fields) {
  std::string line = absl::StrCat(level, " event=", event);
  for (const LogField& field : fields) {
    if (NeedsQuotes(field.value)) {
      absl::StrAppend(&line, " ", field.key, "=\"", absl::CEscape(field.value), "\"");
    } else {
      absl::StrAppend(&line, " ", field.key, "=", field.value);
    }
  }
  return line;
}

// Opens the file, and makes its folder; standard error when `file` is empty.
absl::StatusOr<kvstore::FileDescriptor> OpenFile(const std::string& file) {
  if (!file.empty()) {
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(file).parent_path(), ignored);
  }
  kvstore::FileDescriptor opened(
      file.empty() ? fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)
                   : open(file.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  if (opened.valid() || file.empty()) return opened;
  return NotFound("log_file", absl::StrCat(file, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Log>> Log::Open(absl::string_view level, const std::string& file) {
  const auto parsed = FindLevel(level);
  if (!parsed) return UnknownLevel(level);
  absl::StatusOr<kvstore::FileDescriptor> opened = OpenFile(file);
  if (!opened.ok()) return opened.status();
  const auto sink = std::make_shared<LineSink>(*std::move(opened));
  sink->set_formatter(std::make_unique<spdlog::pattern_formatter>(
      "ts=%Y-%m-%dT%H:%M:%S.%eZ level=%v", spdlog::pattern_time_type::utc));
  auto logger = std::make_shared<spdlog::logger>("pqcached", sink);
  logger->set_level(*parsed);
  auto audit = std::make_shared<spdlog::logger>("pqcached-audit", sink);
  audit->set_level(spdlog::level::trace);
  return std::unique_ptr<Log>(new Log(std::move(logger), std::move(audit)));
}

Log::Log(std::shared_ptr<spdlog::logger> logger, std::shared_ptr<spdlog::logger> audit)
    : logger_(std::move(logger)), audit_(std::move(audit)) {}
Log::~Log() = default;

void Log::Write(LogLevel level, absl::string_view event,
                std::initializer_list<LogField> fields) const {
  const auto spdlog_level = kLevels[static_cast<size_t>(level)].level;
  if (!logger_->should_log(spdlog_level)) return;
  const auto name = spdlog::level::to_string_view(spdlog_level);
  logger_->log(spdlog_level,
               spdlog::string_view_t(LineOf({name.data(), name.size()}, event, fields)));
}

void Log::Audit(absl::string_view event, std::initializer_list<LogField> fields) const {
  audit_->log(spdlog::level::info, spdlog::string_view_t(LineOf("audit", event, fields)));
}

void Log::Debug(absl::string_view event, std::initializer_list<LogField> fields) const {
  Write(LogLevel::kDebug, event, fields);
}
void Log::Info(absl::string_view event, std::initializer_list<LogField> fields) const {
  Write(LogLevel::kInfo, event, fields);
}
void Log::Warning(absl::string_view event, std::initializer_list<LogField> fields) const {
  Write(LogLevel::kWarning, event, fields);
}
void Log::Error(absl::string_view event, std::initializer_list<LogField> fields) const {
  Write(LogLevel::kError, event, fields);
}

absl::StatusOr<std::string> Log::SetLevel(absl::string_view level) {
  const auto parsed = FindLevel(level);
  if (!parsed) return UnknownLevel(level);
  std::string previous;
  for (const NamedLevel& each : kLevels) {
    if (each.level == logger_->level()) previous = std::string(each.name);
  }
  logger_->set_level(*parsed);
  return previous;
}

}  // namespace pqcached::service
