// Notifier: this process's line to whoever supervises it, by the protocol of systemd's sd_notify.
//
// The supervisor of pqcached speaks it to its worker, and systemd to the supervisor. Datagrams to the
// socket that $NOTIFY_SOCKET names say how the service is; descriptors that go along (FDSTORE) are held
// by the other side beyond the end of this process, and come back to the next one from descriptor 3 on
// ($LISTEN_FDS, $LISTEN_FDNAMES). That makes it a DescriptorKeeper.
//
// Thread-safe. No lock is held while something is sent.
#ifndef PQCACHED_SERVICE_NOTIFY_H_
#define PQCACHED_SERVICE_NOTIFY_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvstore/keeper.h"
#include "service/config.h"

namespace pqcached::service {

using KeptDescriptors = std::map<std::string, kvstore::FileDescriptor, std::less<>>;
using KeptMappings = std::map<std::string, kvstore::Mapping, std::less<>>;

// "1" asks a supervisor of pqcached to map what it keeps.
inline constexpr char kMapField[] = "PQCACHED_MAP";

// The first of the descriptors that a supervisor hands over.
inline constexpr int kFirstListenDescriptor = 3;

class Notifier final : public kvstore::DescriptorKeeper {
 public:
  struct Options {
    std::string socket;                 // path, or "@name" of an abstract one
    KeptDescriptors kept = {};          // that an earlier process left
    size_t max_kept = 65536;            // descriptors that the other side holds at once
    size_t max_name_bytes = 120 << 10;  // all names together: they come back in one variable
    absl::Duration timeout = absl::Seconds(5);  // for the other side to take a message
  };

  // As the environment says: NOTIFY_SOCKET, and where they are meant for this process LISTEN_FDS,
  // LISTEN_FDNAMES, FDSTORE. Null without NOTIFY_SOCKET. Descriptors without a name that can be kept,
  // and doubles, are closed.
  //
  // REQUIRES: called once, before this process opens descriptors of its own.
  // Errors: kInvalidArgument  NOTIFY_SOCKET, LISTEN_FDS
  static absl::StatusOr<std::unique_ptr<Notifier>> FromEnvironment(
      const Environment& environment, absl::Duration timeout = absl::Seconds(5));
  explicit Notifier(Options options);

  // The other side keeps mappings, too; this process has these of it.
  // REQUIRES: called before this object is shared.
  void Inherit(KeptMappings mappings);

  // "READY=1", "STATUS=..." and so on, several in lines. Errors: kUnavailable
  absl::Status Send(absl::string_view message) const;

  // See DescriptorKeeper.
  absl::Status Keep(std::string_view name, int descriptor) override;
  bool keeps_mappings() const override { return keeps_mappings_; }
  absl::Status KeepMapped(std::string_view name, int descriptor) override;
  kvstore::Mapping TakeMapping(std::string_view name) override;
  absl::Status Release(std::string_view name) override;
  kvstore::FileDescriptor Take(std::string_view name) const override;
  std::vector<std::string> Names() const override;

  // As Keep, without waiting until it is held.
  absl::Status Forward(std::string_view name, int descriptor);

  // Lets what an earlier process left go out of this object; it stays kept by the other side.
  KeptDescriptors TakeAll();

 private:
  // `fields`: more of the message's lines, each with its end.
  absl::Status Store(std::string_view name, int descriptor, absl::string_view fields, bool wait);
  absl::Status SendWith(absl::string_view message, int descriptor) const;
  // Returns when the other side has taken all that was sent before.
  absl::Status Barrier() const;

  const Options options_;  // without `kept`
  const kvstore::FileDescriptor socket_;
  bool keeps_mappings_ = false;
  mutable absl::Mutex mutex_;
  KeptDescriptors kept_ ABSL_GUARDED_BY(mutex_);
  KeptMappings mappings_ ABSL_GUARDED_BY(mutex_);
  size_t name_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// How often the other side wants to hear WATCHDOG=1; zero = never. From WATCHDOG_USEC, WATCHDOG_PID.
absl::Duration WatchdogTimeout(const Environment& environment);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_NOTIFY_H_
