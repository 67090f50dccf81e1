// The ends of the objects of FakeVerbs.
#include <unistd.h>

#include <algorithm>

#include "tests/service/rdma/fake_objects.h"
#include "tests/service/rdma/fake_verbs.h"

namespace pqcached::service::rdma {

void FakeVerbs::Destroy(rdma_event_channel* channel) {
  for (const FakeId* id : ids_) {
    if (id->channel == channel) violations_.push_back("an event channel with ids");
  }
  channels_.erase(static_cast<Channel*>(channel));
  close(channel->fd);
  delete static_cast<Channel*>(channel);
}

void FakeVerbs::Destroy(rdma_cm_id* id) {
  auto* const gone = static_cast<FakeId*>(id);
  Part(*gone);
  if (gone->pair != nullptr) {
    for (const Window* window : windows_) {
      if (window->region != nullptr && window->pair == gone->pair.get()) {
        violations_.push_back("a queue pair with windows");
      }
    }
    std::erase_if(held_, [gone](const HeldRead& read) { return read.pair == gone->pair.get(); });
    std::erase_if(static_cast<Queue*>(gone->pair->send_cq)->completions,
                  [gone](const auto& each) { return each.first == gone->pair.get(); });
  }
  auto& events = static_cast<Channel*>(id->channel)->events;
  std::erase_if(events, [id](const ConnectionEvent& event) { return event.id == id; });
  ids_.erase(gone);
  delete gone;
}

void FakeVerbs::Destroy(ibv_pd* pd) {
  for (const Region* region : regions_) {
    if (region->pd == pd) violations_.push_back("a domain with regions");
  }
  for (const Window* window : windows_) {
    if (window->pd == pd) violations_.push_back("a domain with windows");
  }
  for (const FakeId* id : ids_) {
    if (id->pair != nullptr && id->pair->pd == pd) violations_.push_back("a domain with pairs");
  }
  domains_.erase(pd);
  delete pd;
}

void FakeVerbs::Destroy(ibv_mr* region) {
  for (const Window* window : windows_) {
    if (window->region == region) violations_.push_back("a region with windows");
  }
  regions_.erase(static_cast<Region*>(region));
  delete static_cast<Region*>(region);
}

void FakeVerbs::Destroy(ibv_mw* window) {
  windows_.erase(static_cast<Window*>(window));
  delete static_cast<Window*>(window);
}

void FakeVerbs::Destroy(ibv_comp_channel* channel) {
  for (const Queue* queue : queues_) {
    if (queue->channel == channel) violations_.push_back("a completion channel with queues");
  }
  completion_channels_.erase(channel);
  close(channel->fd);
  delete channel;
}

void FakeVerbs::Destroy(ibv_cq* queue) {
  for (const FakeId* id : ids_) {
    if (id->pair != nullptr && id->pair->send_cq == queue) {
      violations_.push_back("a completion queue with pairs");
    }
  }
  queues_.erase(static_cast<Queue*>(queue));
  delete static_cast<Queue*>(queue);
}

}  // namespace pqcached::service::rdma
