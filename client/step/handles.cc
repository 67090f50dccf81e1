#include "client/step/handles.h"

#include "client/base/operations.h"
#include "client/step/offload.h"
#include "client/step/preparer.h"
#include "client/step/read_backend.h"
#include "client/step/sender.h"
#include "client/step/step.h"

namespace pqcached::client {

ClientState::ClientState() : steps(std::make_unique<StepPool>()) {}
ClientState::~ClientState() { Close(); }

void ClientState::Start() {
  sender = std::make_unique<Sender>(*remote, local ? &local->staging() : nullptr);
  offload = std::make_unique<Offload>(*remote);
  preparer = std::make_unique<Preparer>(*this);
  reads = local ? MakeMappedReads(*this) : MakeRemoteReads(*this);
  events = local ? local->events() : std::make_shared<Events>();
  operations = std::make_unique<Operations>();
}

void ClientState::Close() {
  // Operations in progress do not wait for a worker any more.
  if (operations)
    operations->Stop([this] {
      if (local) local->BeginClose();
    });
  step_worker.Stop();
  preparer.reset();
  sender.reset();
  offload.reset();
  if (local) local->Close();
  remote.reset();
  if (events) events->Close();
  const base::MutexLock lock(&device_loads_mutex);
  device_loads.reset();
}

ChangeScope::ChangeScope(pqc_sequence* sequence, Packed packed) : lock_(*sequence) {
  SequenceState& state = *sequence->state;
  ClientState& client = *state.cache->client;
  status_ = lock_.status();
  if (status_ == PQC_OK) status_ = GetRemote(client, &remote_);
  // A step that would begin sets the flag for a moment, also while the sequence is reserved.
  if (status_ == PQC_OK && state.in_step && !lock_.was_reserved()) {
    status_ = Fail(PQC_ABORTED, "sequence", "it is in a step; end that step first");
  }
  if (status_ == PQC_OK) {
    status_ = client.sender->Flush(state, CallDeadline(client.timeout_ms));
  }
  if (status_ == PQC_OK) {
    status_ = packed == Packed::kStored
                  ? client.offload->Flush(state, CallDeadline(client.timeout_ms))
                  : client.offload->Check(state);
  }
}

}  // namespace pqcached::client
