// TorchPeer: a Python process with PyTorch beside the bench, that times one piece of work when it is asked to.
#ifndef PQCACHED_TESTS_GPU_BENCH_TORCH_PEER_H_
#define PQCACHED_TESTS_GPU_BENCH_TORCH_PEER_H_

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace pqcached::bench {

class TorchPeer {
 public:
  // Starts torch_peer.py for `work` ("select" or "sdpa") over `token_count` tokens.
  TorchPeer(const std::string& work, uint32_t token_count);
  ~TorchPeer();
  TorchPeer(const TorchPeer&) = delete;
  TorchPeer& operator=(const TorchPeer&) = delete;

  // Why it cannot be timed here; "" when it can.
  const std::string& why_absent() const { return why_absent_; }

  // Seconds of device time of one piece of work.
  double Time();

 private:
  std::string ReadLine();

  pid_t process_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
  std::string why_absent_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_GPU_BENCH_TORCH_PEER_H_
