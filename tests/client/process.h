// Child processes and folders of tests. Everything ends with its object.
#ifndef PQCACHED_TESTS_CLIENT_PROCESS_H_
#define PQCACHED_TESTS_CLIENT_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace pqcached::testing {

// A new folder, removed with all that is in it.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// A running program, with its standard output read by lines; killed at the end.
class Process {
 public:
  explicit Process(const std::vector<std::string>& command);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // The next line without its newline; empty at the end of the output.
  std::string ReadLine();
  // Reads lines until one equals `line`; false at the end of the output.
  bool WaitForLine(const std::string& line);
  pid_t pid() const { return pid_; }
  // SIGKILL, and waits for the end.
  void Kill();
  void Signal(int signal) const;
  // Waits for the end by itself; -1 when a signal did it.
  int Wait();

 private:
  int output_ = -1;
  pid_t pid_ = -1;
  std::string buffer_;
};

// Whether SIGSTOP has taken effect on every thread of a process.
bool AllThreadsAreStopped(pid_t process);

struct Outcome {
  int exit_code = -1;
  std::string output;  // standard output and error
};
Outcome RunProgram(const std::vector<std::string>& command);

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_PROCESS_H_
