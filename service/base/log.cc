#include "service/base/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <optional>

#include "absl/strings/escaping.h"
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

}  // namespace

absl::StatusOr<std::unique_ptr<Log>> Log::Open(absl::string_view level, const std::string& file) {
  const auto parsed = FindLevel(level);
  if (!parsed) return UnknownLevel(level);
  try {
    spdlog::sink_ptr sink;
    if (file.empty()) {
      sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    } else {
      sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(file);
    }
    auto logger = std::make_shared<spdlog::logger>("pqcached", std::move(sink));
    logger->set_level(*parsed);
    logger->flush_on(spdlog::level::trace);
    logger->set_pattern("ts=%Y-%m-%dT%H:%M:%S.%eZ level=%l %v", spdlog::pattern_time_type::utc);
    return std::unique_ptr<Log>(new Log(std::move(logger)));
  } catch (const spdlog::spdlog_ex& error) {
    return NotFound("log_file", absl::StrCat(error.what()));
  }
}

Log::Log(std::shared_ptr<spdlog::logger> logger) : logger_(std::move(logger)) {}
Log::~Log() = default;

void Log::Write(LogLevel level, absl::string_view event,
                std::initializer_list<LogField> fields) const {
  const auto spdlog_level = kLevels[static_cast<size_t>(level)].level;
  if (!logger_->should_log(spdlog_level)) return;
  std::string line = absl::StrCat("event=", event);
  for (const LogField& field : fields) {
    if (NeedsQuotes(field.value)) {
      absl::StrAppend(&line, " ", field.key, "=\"", absl::CEscape(field.value), "\"");
    } else {
      absl::StrAppend(&line, " ", field.key, "=", field.value);
    }
  }
  logger_->log(spdlog_level, spdlog::string_view_t(line));
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
