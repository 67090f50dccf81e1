#include "client/ctl/table.h"

#include <algorithm>
#include <cstdio>

namespace pqcached::ctl {
namespace {

bool IsNumber(const std::string& text) {
  return !text.empty() && (text[0] >= '0' && text[0] <= '9');
}

}  // namespace

std::string Table::ToText() const {
  const size_t columns = rows_[0].size();
  std::vector<size_t> widths(columns, 0);
  std::vector<bool> right(columns, true);
  for (size_t row = 0; row < rows_.size(); ++row) {
    for (size_t column = 0; column < columns; ++column) {
      const std::string& cell = rows_[row][column];
      widths[column] = std::max(widths[column], cell.size());
      if (row > 0 && !IsNumber(cell)) right[column] = false;
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line;
    for (size_t column = 0; column < columns; ++column) {
      if (column > 0) line += "  ";
      const std::string padding(widths[column] - row[column].size(), ' ');
      line += right[column] ? padding + row[column] : row[column] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string FormatBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string FormatSeconds(uint64_t seconds) {
  const uint64_t minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
  if (days > 0) return std::to_string(days) + "d " + std::to_string(hours % 24) + "h";
  if (hours > 0) return std::to_string(hours) + "h " + std::to_string(minutes % 60) + "m";
  if (minutes > 0) return std::to_string(minutes) + "m " + std::to_string(seconds % 60) + "s";
  return std::to_string(seconds) + "s";
}

}  // namespace pqcached::ctl
