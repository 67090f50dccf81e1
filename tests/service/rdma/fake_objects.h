// Objects of FakeVerbs: those of the C libraries with the state that a device has.
#ifndef PQCACHED_TESTS_SERVICE_RDMA_FAKE_OBJECTS_H_
#define PQCACHED_TESTS_SERVICE_RDMA_FAKE_OBJECTS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "tests/service/rdma/fake_verbs.h"

namespace pqcached::service::rdma {

struct FakeVerbs::Channel : rdma_event_channel {
  std::deque<ConnectionEvent> events;
};

struct FakeVerbs::Region : ibv_mr {
  int access = 0;
};

struct FakeVerbs::Window : ibv_mw {
  Region* region = nullptr;  // null: invalid
  FakeQueuePair* pair = nullptr;
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint32_t key = 0;
};

struct FakeVerbs::Queue : ibv_cq {
  std::deque<std::pair<FakeQueuePair*, ibv_wc>> completions;
  bool is_armed = false;
  size_t entries = 0;
};

struct FakeQueuePair : ibv_qp {
  FakeId* owner = nullptr;
  uint32_t depth = 0;
  uint32_t posted = 0;
  bool is_broken = false;
};

struct FakeId : rdma_cm_id {
  FakeVerbs* host = nullptr;
  FakeDevice* device = nullptr;
  FakeId* peer = nullptr;
  bool is_listener = false;
  bool is_connected = false;
  bool is_passive = false;
  std::string to;
  uint16_t port = 0;  // of a listener, or to which an active id connects
  std::unique_ptr<FakeQueuePair> pair;
};

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_TESTS_SERVICE_RDMA_FAKE_OBJECTS_H_
