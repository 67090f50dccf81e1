// The two ends of transfers over real verbs, in processes of their own. A socket pair between them
// stands for the connection that the callers of a source and of a pull have.
#ifndef PQCACHED_TESTS_RDMA_ENDS_H_
#define PQCACHED_TESTS_RDMA_ENDS_H_

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "service/rdma/pull.h"
#include "service/rdma/source.h"
#include "service/rdma/verbs.h"
#include "service/rdma/watch.h"

namespace pqcached::service::rdma {

// Addresses of the two devices that run.sh makes.
inline const std::string kFirstAddress = "10.77.0.1";
inline const std::string kSecondAddress = "10.77.0.2";

enum class FrameKind : uint32_t { kOffer, kKeys, kRevoke };

struct Plan {
  std::vector<size_t> sizes;  // of the extents
  std::vector<std::string> source_addresses = {kSecondAddress};
  std::vector<std::string> pull_addresses = {kFirstAddress};
  bool use_windows = true;
  uint32_t connection_count = 2;
};

// Returns the bytes of extent `index`, which both processes know.
std::vector<std::byte> BytesOfExtent(size_t index, size_t size);

// A source with one pull. It sends the offer and the keys.
class SourceEnd {
 public:
  // Ends the process when RDMA does not work.
  SourceEnd(boost::asio::io_context& io, Verbs& verbs, int control, const Plan& plan);

  const std::optional<absl::Status>& end() const { return end_; }
  bool is_released() const { return lease_.use_count() == 1; }
  size_t keys_sent() const { return keys_sent_; }

 private:
  const int control_;
  std::vector<std::vector<std::byte>> bytes_;
  std::shared_ptr<int> lease_ = std::make_shared<int>();
  std::unique_ptr<Source> source_;
  Token token_ = {};
  size_t keys_sent_ = 0;
  std::optional<absl::Status> end_;
  std::optional<Watch> watch_;
};

// A pull of what a SourceEnd offers.
class PullEnd {
 public:
  PullEnd(boost::asio::io_context& io, Verbs& verbs, int control, const Plan& plan);

  // Called with the keys before they are used.
  std::function<void(std::vector<Key>& keys)> on_keys = [](auto&) {};

  const std::optional<absl::Status>& end() const { return end_; }
  const std::vector<uint32_t>& arrived() const { return arrived_; }
  bool has_all_bytes() const;
  bool is_released() const { return memory_.use_count() == 1; }

 private:
  void TakeFrame();

  boost::asio::io_context& io_;
  Verbs& verbs_;
  const int control_;
  const Plan plan_;
  std::vector<std::vector<std::byte>> bytes_;
  std::shared_ptr<int> memory_ = std::make_shared<int>();
  std::shared_ptr<Pull> pull_;
  std::vector<uint32_t> arrived_;
  std::optional<absl::Status> end_;
  std::optional<Watch> watch_;
};

enum class Role { kSource, kPull };

// A process with one end, which is killed when the object goes. It executes this program again: a
// fork must not use devices that its parent has opened.
class Child {
 public:
  Child(Role role, const Plan& plan);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int control() const { return control_; }
  void Kill();

 private:
  int control_ = -1;
  pid_t process_ = -1;
};

// Is called first by main. Runs the end of a Child and exits, where the arguments are those of one.
void RunIfChild(int argc, char** argv);

void SendFrame(int control, FrameKind kind, const void* content, size_t bytes);

// Runs handlers until `is_done`, at most for a minute.
bool RunUntil(boost::asio::io_context& io, const std::function<bool()>& is_done);

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_TESTS_RDMA_ENDS_H_
