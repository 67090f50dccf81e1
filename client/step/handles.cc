#include "client/step/handles.h"

#include "client/step/offload.h"
#include "client/step/sender.h"
#include "client/step/step.h"

namespace pqcached::client {

ScratchPool::Loan::Loan(ScratchPool& pool) : pool_(&pool) {
  {
    const base::MutexLock lock(&pool_->mutex_);
    if (!pool_->idle_.empty()) {
      scratch_ = std::move(pool_->idle_.back());
      pool_->idle_.pop_back();
    }
  }
  if (!scratch_) scratch_ = std::make_unique<Scratch>();
}

ScratchPool::Loan& ScratchPool::Loan::operator=(Loan&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(scratch_, other.scratch_);
  return *this;
}

ScratchPool::Loan::~Loan() {
  if (!scratch_) return;
  const base::MutexLock lock(&pool_->mutex_);
  pool_->idle_.push_back(std::move(scratch_));
}

ClientState::ClientState() : steps(std::make_unique<StepPool>()) {}
ClientState::~ClientState() { Close(); }

void ClientState::Close() {
  step_worker.Stop();
  sender.reset();
  offload.reset();
  if (local) local->Close();
  remote.reset();
}

ChangeScope::ChangeScope(pqc_sequence* sequence, Packed packed) : lock_(*sequence->state) {
  SequenceState& state = *sequence->state;
  ClientState& client = *state.cache->client;
  status_ = lock_.status();
  if (status_ == PQC_OK) status_ = GetRemote(client, &remote_);
  if (status_ == PQC_OK && state.in_step) {
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

pqc_status Report(pqc_status status, const RefusalBuffer& error,
                  std::initializer_list<HeaderName> names) {
  if (status == PQC_OK) return PQC_OK;
  RefusalBuffer own = error;
  SetRefusal(&own, HeaderPathOf(error.field, names).c_str(), error.text);
  return Fail(status, own);
}

}  // namespace pqcached::client
