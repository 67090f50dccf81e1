// Lines of a record, written by hand.
#ifndef PQCACHED_TESTS_CLIENT_CONFORM_RECORD_TEXT_H_
#define PQCACHED_TESTS_CLIENT_CONFORM_RECORD_TEXT_H_

#include <cstdint>
#include <string>

namespace pqcached::testing {

// A record of one process, which grows call by call. Each call begins when the one before it has
// ended, 1 ms later, unless it is put into another one.
class RecordText {
 public:
  explicit RecordText(const std::string& head = R"({"pid":7,"record":1})") { text_ = head + "\n"; }

  // `arguments` and `result` are JSON members: R"("sequence":"0x5")".
  RecordText& Ok(const std::string& name, const std::string& arguments) {
    return Add(name, arguments, R"("status":"OK")");
  }
  RecordText& Failed(const std::string& name, const std::string& arguments,
                     const std::string& status, const std::string& field = "",
                     uint64_t retry_ms = 0) {
    return Add(name, arguments,
               "\"status\":\"" + status + "\",\"field\":\"" + field +
                   "\",\"retry_ms\":" + std::to_string(retry_ms));
  }
  // Two calls of two threads: the second one begins and ends during the first one.
  RecordText& Nested(const std::string& outer, const std::string& outer_arguments,
                     const std::string& inner, const std::string& inner_arguments) {
    const uint64_t begin = ++place_;
    thread_ = 2;
    Ok(inner, inner_arguments);
    thread_ = 1;
    Line(outer, outer_arguments, begin, R"("status":"OK")");
    return *this;
  }
  // A call that was written before it began.
  RecordText& Unreturned(const std::string& name, const std::string& arguments) {
    ++place_;
    text_ += Head() + ",\"begin\":" + std::to_string(place_) + ",\"begin_us\":" + Micros(place_) +
             ",\"call\":\"" + name + "\"," + arguments + "}\n";
    return *this;
  }
  RecordText& Raw(const std::string& line) {
    text_ += line + "\n";
    return *this;
  }
  // Later lines are of another process.
  RecordText& InProcess(const std::string& members) {
    process_ = members;
    return *this;
  }
  RecordText& After(uint64_t ms) {
    pause_us_ += 1000 * ms;
    return *this;
  }

  const std::string& text() const { return text_; }

 private:
  RecordText& Add(const std::string& name, const std::string& arguments,
                  const std::string& result) {
    Line(name, arguments, ++place_, result);
    return *this;
  }
  void Line(const std::string& name, const std::string& arguments, uint64_t begin,
            const std::string& result) {
    const uint64_t end = ++place_;
    text_ += Head() + ",\"begin\":" + std::to_string(begin) + ",\"end\":" + std::to_string(end) +
             ",\"begin_us\":" + Micros(begin) + ",\"end_us\":" + Micros(end) + ",\"call\":\"" +
             name + "\"," + arguments + "," + result + "}\n";
  }
  std::string Head() const { return "{" + process_ + ",\"thread\":" + std::to_string(thread_); }
  std::string Micros(uint64_t place) const { return std::to_string(1000 * place + pause_us_); }

  std::string text_;
  std::string process_ = R"("pid":7)";
  uint64_t place_ = 0;
  uint64_t pause_us_ = 0;
  uint64_t thread_ = 1;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_CONFORM_RECORD_TEXT_H_
