#include "tests/gpu/bench/torch_peer.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/gpu/bench/bench.h"

namespace pqcached::bench {

TorchPeer::TorchPeer(const std::string& work, uint32_t token_count) {
  int to[2];
  int from[2];
  if (pipe2(to, O_CLOEXEC) != 0) throw Absent("no pipe for PyTorch");
  if (pipe2(from, O_CLOEXEC) != 0) {
    (void)close(to[0]);
    (void)close(to[1]);
    throw Absent("no pipe for PyTorch");
  }
  const std::string tokens = std::to_string(token_count);
  process_ = fork();
  if (process_ == 0) {
    (void)dup2(to[0], STDIN_FILENO);
    (void)dup2(from[1], STDOUT_FILENO);
    execlp("python3", "python3", PQCACHED_TORCH_PEER, work.c_str(), tokens.c_str(), nullptr);
    _exit(127);
  }
  (void)close(to[0]);
  (void)close(from[1]);
  to_ = fdopen(to[1], "w");
  from_ = fdopen(from[0], "r");
  const std::string line = ReadLine();
  if (line != "ready") why_absent_ = line.empty() ? "python3 did not start" : line;
}

TorchPeer::~TorchPeer() {
  if (to_ != nullptr) (void)std::fclose(to_);  // ends its loop
  if (from_ != nullptr) (void)std::fclose(from_);
  if (process_ > 0) (void)waitpid(process_, nullptr, 0);
}

std::string TorchPeer::ReadLine() {
  char line[512];
  if (from_ == nullptr || std::fgets(line, sizeof line, from_) == nullptr) return "";
  std::string text(line);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

double TorchPeer::Time() {
  if (std::fputs("time\n", to_) < 0 || std::fflush(to_) != 0) throw Absent("PyTorch ended");
  const std::string line = ReadLine();
  const double seconds = std::atof(line.c_str());
  if (!(seconds > 0.0)) throw Absent("PyTorch: " + line);
  return seconds;
}

}  // namespace pqcached::bench
