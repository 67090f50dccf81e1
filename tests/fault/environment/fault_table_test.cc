// service/README.md has the table of the tests. PQCACHED_UPDATE_README=1 writes it there.
#include "fault_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace pqcached::testing {
namespace {

constexpr char kBegin[] = "<!-- tests/fault/environment/fault_table.cc writes this table -->\n";
constexpr char kEnd[] = "<!-- end of the table -->\n";

TEST(FaultTableTest, HasARowForEachFault) {
  ASSERT_EQ(FaultRows().size(), kFaultCount);
  for (size_t i = 0; i < kFaultCount; ++i) {
    EXPECT_EQ(static_cast<size_t>(FaultRows()[i].fault), i);
    EXPECT_FALSE(FaultRows()[i].events.empty()) << FaultRows()[i].name;
  }
}

TEST(FaultTableTest, IsTheOneOfTheReadme) {
  std::stringstream text;
  text << std::ifstream(PQCACHED_SERVICE_README).rdbuf();
  std::string readme = text.str();
  const size_t begin = readme.find(kBegin);
  const size_t end = readme.find(kEnd);
  ASSERT_NE(begin, std::string::npos);
  ASSERT_NE(end, std::string::npos);
  const size_t first = begin + sizeof(kBegin) - 1;
  if (std::getenv("PQCACHED_UPDATE_README") != nullptr) {
    readme.replace(first, end - first, FaultTable());
    std::ofstream(PQCACHED_SERVICE_README) << readme;
    return;
  }
  EXPECT_EQ(readme.substr(first, end - first), FaultTable())
      << "write it with PQCACHED_UPDATE_README=1 and this test";
}

}  // namespace
}  // namespace pqcached::testing
