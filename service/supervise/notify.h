// Notifier sends messages and descriptors to the process's supervisor, by the protocol of systemd's
// sd_notify.
//
// pqcached's supervisor is the receiver for its worker, and systemd for the supervisor. Datagrams
// to the socket that $NOTIFY_SOCKET names report the state of the service. The receiver holds
// descriptors that are sent along (FDSTORE) beyond the end of this process, and passes them to the
// next process as descriptors 3 and up ($LISTEN_FDS, $LISTEN_FDNAMES). That makes the notifier a
// DescriptorKeeper.
//
// Thread-safe. No lock is held while a message is sent.
#ifndef PQCACHED_SERVICE_SUPERVISE_NOTIFY_H_
#define PQCACHED_SERVICE_SUPERVISE_NOTIFY_H_

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
#include "absl/time/time.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/mutex.h"
#include "service/base/environment.h"

namespace pqcached::service {

using KeptDescriptors = std::map<std::string, kvstore::FileDescriptor, std::less<>>;
using KeptMappings = std::map<std::string, kvstore::Mapping, std::less<>>;

// Field of an FDSTORE message: "1" asks pqcached's supervisor to map the descriptor's memory and to
// hold the mapping.
inline constexpr char kMapField[] = "PQCACHED_MAP";
// Variable that pqcached's supervisor sets to "1": it answers a barrier with the name of a
// descriptor by a byte on the barrier's socket, if it holds this descriptor. The mere end of a
// barrier proves nothing, because the kernel ends it too when the receiver has no free descriptor.
inline constexpr char kConfirmsVariable[] = "PQCACHED_CONFIRMS_KEPT";
// Field of a worker's message: "1" asks pqcached's supervisor to replace it, as SIGHUP does.
inline constexpr char kRestartField[] = "PQCACHED_RESTART";

// Number of the first descriptor that a supervisor passes to this process.
inline constexpr int kFirstListenDescriptor = 3;

class Notifier final : public kvstore::DescriptorKeeper {
 public:
  struct Options {
    std::string socket;                 // the receiver's path, or "@name" of an abstract socket
    KeptDescriptors kept = {};          // descriptors that an earlier process stored
    size_t max_kept = 65536;            // most descriptors that the receiver holds
    size_t max_name_bytes = 120 << 10;  // all names together: they return in one variable
    absl::Duration timeout = absl::Seconds(5);  // longest wait for the receiver to accept a message
    bool confirms = false;                      // the receiver does what kConfirmsVariable says
  };

  // Creates a notifier from the environment: NOTIFY_SOCKET, FDSTORE, kConfirmsVariable and, if
  // LISTEN_PID names this process, LISTEN_FDS and LISTEN_FDNAMES. Returns null without
  // NOTIFY_SOCKET. Closes passed descriptors whose name is invalid or occurred before.
  //
  // REQUIRES: called once, before this process opens descriptors of its own.
  // Errors: kInvalidArgument  NOTIFY_SOCKET, LISTEN_FDS
  static absl::StatusOr<std::unique_ptr<Notifier>> FromEnvironment(
      const Environment& environment, absl::Duration timeout = absl::Seconds(5));
  explicit Notifier(Options options);

  // Sets the mappings that this process has inherited from a supervisor that keeps mappings, too.
  //
  // REQUIRES: called before this object is shared.
  void Inherit(KeptMappings mappings);

  // Sends a message of one or more lines: "READY=1", "STATUS=...".
  //
  // Errors: kUnavailable
  absl::Status Send(absl::string_view message) const;

  // See DescriptorKeeper.
  absl::Status Keep(std::string_view name, int descriptor) override;
  bool supports_mappings() const override { return keeps_mappings_; }
  absl::Status KeepMapped(std::string_view name, int descriptor) override;
  kvstore::Mapping TakeMapping(std::string_view name) override;
  absl::Status Release(std::string_view name) override;
  kvstore::FileDescriptor Take(std::string_view name) const override;
  std::vector<std::string> Names() const override;

  // Stores the descriptor like Keep, but does not wait until the receiver holds it.
  absl::Status Forward(std::string_view name, int descriptor);

  // Returns duplicates of all stored descriptors, which also stay stored here and at the receiver.
  KeptDescriptors DuplicateAll();

 private:
  // Stores the descriptor and sends it. `fields` holds further lines of the message, each with its
  // line end.
  absl::Status Store(std::string_view name, int descriptor, absl::string_view fields, bool wait);
  absl::Status SendWith(absl::string_view message, int descriptor) const;
  // Waits until the receiver has processed all earlier messages. Errors: kUnavailable;
  // kResourceExhausted when it does not hold the descriptor `name`, and confirms what it holds.
  absl::Status Barrier(absl::string_view name) const;

  const Options options_;  // without `kept`
  const kvstore::FileDescriptor socket_;
  bool keeps_mappings_ = false;
  mutable kvstore::Mutex mutex_;
  KeptDescriptors kept_ ABSL_GUARDED_BY(mutex_);
  KeptMappings mappings_ ABSL_GUARDED_BY(mutex_);
  size_t name_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Returns the time within which the receiver expects WATCHDOG=1, from WATCHDOG_USEC and
// WATCHDOG_PID; zero = no watchdog.
absl::Duration WatchdogTimeout(const Environment& environment);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_NOTIFY_H_
