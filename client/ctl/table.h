// Table formats cells as human-readable columns. A column whose cells are all numbers is aligned
// right.
// Single-thread.
#ifndef PQCACHED_CLIENT_CTL_TABLE_H_
#define PQCACHED_CLIENT_CTL_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pqcached::ctl {

class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}

  // Adds a row; it must have as many cells as the header.
  void Add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  bool empty() const { return rows_.size() == 1; }
  // Returns lines that end with a newline and have no trailing blanks.
  std::string ToText() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Returns, for example, "12.5 MiB".
std::string FormatBytes(uint64_t bytes);
// Returns, for example, "1d 2h", "3m 20s" or "12s".
std::string FormatSeconds(uint64_t seconds);

}  // namespace pqcached::ctl

#endif  // PQCACHED_CLIENT_CTL_TABLE_H_
