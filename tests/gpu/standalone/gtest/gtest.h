// The part of GoogleTest that the tests of the device use, for machines that have only CMake, a C++ compiler and nvcc.
//
// Same names and meaning; where GoogleTest is installed, it is used instead. Single-thread.
#ifndef PQCACHED_TESTS_GPU_STANDALONE_GTEST_GTEST_H_
#define PQCACHED_TESTS_GPU_STANDALONE_GTEST_GTEST_H_

#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace testing {

// What happened in the test that runs.
struct Outcome {
  bool failed = false;
  bool failed_fatally = false;
  bool skipped = false;
};
inline Outcome& CurrentOutcome() {
  static Outcome outcome;
  return outcome;
}

class Test {
 public:
  virtual ~Test() = default;
  virtual void SetUp() {}
  virtual void TearDown() {}
  virtual void TestBody() = 0;
  static bool HasFatalFailure() { return CurrentOutcome().failed_fatally; }
};

template <typename T>
struct TestParamInfo {
  T param;
};

struct RegisteredTest {
  std::string name;
  std::function<std::unique_ptr<Test>()> make;
};
inline std::vector<RegisteredTest>& AllTests() {
  static std::vector<RegisteredTest> tests;
  return tests;
}
template <typename T>
bool Register(const char* suite, const char* name) {
  AllTests().push_back({std::string(suite) + "." + name, [] { return std::make_unique<T>(); }});
  return true;
}

// Collects what is streamed into an assertion.
class Message {
 public:
  template <typename T>
  Message& operator<<(const T& value) {
    text_ << value;
    return *this;
  }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
};

enum class Severity { kNonFatal, kFatal, kSkip };

class Report {
 public:
  Report(Severity severity, const char* file, int line, std::string what)
      : severity_(severity), file_(file), line_(line), what_(std::move(what)) {}
  void operator=(const Message& message) const {
    std::printf("%s:%d: %s %s\n", file_, line_, what_.c_str(), message.text().c_str());
    Outcome& outcome = CurrentOutcome();
    outcome.skipped = outcome.skipped || severity_ == Severity::kSkip;
    outcome.failed = outcome.failed || severity_ != Severity::kSkip;
    outcome.failed_fatally = outcome.failed_fatally || severity_ == Severity::kFatal;
  }

 private:
  Severity severity_;
  const char* file_;
  int line_;
  std::string what_;
};

template <typename T>
std::string Show(const T& value) {
  if constexpr (requires(std::ostringstream & out) { out << value; }) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else {
    return "(a value)";
  }
}

// "" or what is wrong.
template <typename Compare, typename A, typename B>
std::string Wrong(Compare compare, const char* sign, const char* a_text, const char* b_text,
                  const A& a, const B& b) {
  if (compare(a, b)) return "";
  return std::string(a_text) + " " + sign + " " + b_text + ", but they are " + Show(a) + " and " +
         Show(b) + ".";
}

inline int RunAllTests() {
  int failed_count = 0;
  int skipped_count = 0;
  for (const RegisteredTest& registered : AllTests()) {
    CurrentOutcome() = {};
    const std::unique_ptr<Test> test = registered.make();
    test->SetUp();
    if (!CurrentOutcome().skipped && !CurrentOutcome().failed_fatally) test->TestBody();
    test->TearDown();
    const Outcome outcome = CurrentOutcome();
    failed_count += outcome.failed ? 1 : 0;
    skipped_count += outcome.skipped ? 1 : 0;
    std::printf("[%s] %s\n",
                outcome.failed    ? "FAILED"
                : outcome.skipped ? "SKIPPED"
                                  : "OK",
                registered.name.c_str());
  }
  std::printf("%zu tests, %d failed, %d skipped\n", AllTests().size(), failed_count, skipped_count);
  return failed_count == 0 ? 0 : 1;
}

}  // namespace testing

#define PQC_TEST_CLASS(suite, name) suite##_##name##_Test
#define PQC_TEST(suite, name, base)                                    \
  class PQC_TEST_CLASS(suite, name) : public base {                    \
   public:                                                             \
    void TestBody() override;                                          \
  };                                                                   \
  [[maybe_unused]] static const bool suite##_##name##_registered =     \
      ::testing::Register<PQC_TEST_CLASS(suite, name)>(#suite, #name); \
  void PQC_TEST_CLASS(suite, name)::TestBody()
#define TEST(suite, name) PQC_TEST(suite, name, ::testing::Test)
#define TEST_F(suite, name) PQC_TEST(suite, name, suite)

#define PQC_EXPECT(wrong)                                                             \
  if (const std::string pqc_what = (wrong); pqc_what.empty()) {                       \
  } else                                                                              \
    ::testing::Report(::testing::Severity::kNonFatal, __FILE__, __LINE__, pqc_what) = \
        ::testing::Message()
#define PQC_ASSERT(wrong)                                                                 \
  if (const std::string pqc_what = (wrong); pqc_what.empty()) {                           \
  } else                                                                                  \
    return ::testing::Report(::testing::Severity::kFatal, __FILE__, __LINE__, pqc_what) = \
               ::testing::Message()
#define PQC_COMPARE(sign, a, b)                                                                  \
  ::testing::Wrong([](const auto& pqc_a, const auto& pqc_b) { return pqc_a sign pqc_b; }, #sign, \
                   #a, #b, a, b)
#define PQC_TRUE(condition) (condition) ? std::string() : std::string(#condition " is false.")
#define PQC_NEAR(a, b, limit)                                                       \
  ::testing::Wrong(                                                                 \
      [&](const auto& pqc_a, const auto& pqc_b) {                                   \
        return std::abs(static_cast<double>(pqc_a) - static_cast<double>(pqc_b)) <= \
               static_cast<double>(limit);                                          \
      },                                                                            \
      "is near", #a, #b, a, b)

#define EXPECT_EQ(a, b) PQC_EXPECT(PQC_COMPARE(==, a, b))
#define EXPECT_NE(a, b) PQC_EXPECT(PQC_COMPARE(!=, a, b))
#define EXPECT_LT(a, b) PQC_EXPECT(PQC_COMPARE(<, a, b))
#define EXPECT_LE(a, b) PQC_EXPECT(PQC_COMPARE(<=, a, b))
#define EXPECT_GT(a, b) PQC_EXPECT(PQC_COMPARE(>, a, b))
#define EXPECT_GE(a, b) PQC_EXPECT(PQC_COMPARE(>=, a, b))
#define EXPECT_TRUE(condition) PQC_EXPECT(PQC_TRUE(condition))
#define EXPECT_FALSE(condition) PQC_EXPECT(PQC_TRUE(!(condition)))
#define EXPECT_NEAR(a, b, limit) PQC_EXPECT(PQC_NEAR(a, b, limit))
#define ASSERT_EQ(a, b) PQC_ASSERT(PQC_COMPARE(==, a, b))
#define ASSERT_NE(a, b) PQC_ASSERT(PQC_COMPARE(!=, a, b))
#define ASSERT_LT(a, b) PQC_ASSERT(PQC_COMPARE(<, a, b))
#define ASSERT_LE(a, b) PQC_ASSERT(PQC_COMPARE(<=, a, b))
#define ASSERT_GT(a, b) PQC_ASSERT(PQC_COMPARE(>, a, b))
#define ASSERT_TRUE(condition) PQC_ASSERT(PQC_TRUE(condition))
#define ASSERT_FALSE(condition) PQC_ASSERT(PQC_TRUE(!(condition)))
#define ASSERT_NEAR(a, b, limit) PQC_ASSERT(PQC_NEAR(a, b, limit))
#define GTEST_SKIP()                                                                     \
  return ::testing::Report(::testing::Severity::kSkip, __FILE__, __LINE__, "skipped:") = \
             ::testing::Message()

#endif  // PQCACHED_TESTS_GPU_STANDALONE_GTEST_GTEST_H_
