#include "client/step/offload.h"

#include <algorithm>
#include <cstdio>
#include <new>
#include <utility>

#include "client/base/error.h"

namespace pqcached::client {

Offload::~Offload() {
  {
    const base::MutexLock lock(&mutex_);
    stop_ = true;
    for (auto& [sequence, progress] : sequences_) progress.is_wanted = false;
  }
  done_.SignalAll();
  worker_.Stop();
}

void Offload::Add(Job job) {
  try {
    const base::MutexLock lock(&mutex_);
    Progress& progress = sequences_[job.sequence.get()];
    jobs_.push_back(std::move(job));
    try {
      worker_.Run([this] { RunNext(); });
    } catch (...) {
      job = std::move(jobs_.back());
      jobs_.pop_back();
      throw;
    }
    ++progress.waiting_count;
  } catch (...) {  // the job was not queued, and the stream may still write to its slot
    if (!job.steps->WaitPacked(job.filled.slot.number()).ok()) job.filled.slot.Lose();
    throw;
  }
}

pqc_status Offload::Report(const Progress& progress) {
  if (progress.status == PQC_OK) return PQC_OK;
  return PrefixText(
      "rows of an earlier pqc_gpu_ingest",
      client::Report(
          progress.status, progress.error,
          {{"rows[0]", ""}, {"names.begin", "options.names_begin"}, {"names", "options"}}));
}

pqc_status Offload::Check(const SequenceState& sequence) {
  const base::MutexLock lock(&mutex_);
  const auto found = sequences_.find(&sequence);
  return found == sequences_.end() ? PQC_OK : Report(found->second);
}

pqc_status Offload::Flush(const SequenceState& sequence, Clock::time_point deadline) {
  const base::MutexLock lock(&mutex_);
  const auto is_done = [&]() PQCACHED_REQUIRES(mutex_) {
    const auto found = sequences_.find(&sequence);
    return stop_ || found == sequences_.end() || found->second.waiting_count == 0;
  };
  if (!done_.WaitUntil(&mutex_, deadline, is_done)) {
    return Fail(PQC_DEADLINE_EXCEEDED, "", "rows of earlier pqc_gpu_ingest are not stored in time");
  }
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end()) return PQC_OK;
  const pqc_status status = Report(found->second);
  if (found->second.waiting_count == 0) sequences_.erase(found);
  return status;
}

void Offload::RemoveSequence(const SequenceState& sequence) {
  const base::MutexLock lock(&mutex_);
  const auto found = sequences_.find(&sequence);
  if (found == sequences_.end()) return;
  if (found->second.waiting_count == 0) {
    sequences_.erase(found);
  } else {  // the device may still be writing to its slots
    found->second.is_wanted = false;
  }
}

void Offload::Drain(const gpu::Steps* steps) {
  const base::MutexLock lock(&mutex_);
  done_.Wait(&mutex_, [&]() PQCACHED_REQUIRES(mutex_) {
    return current_steps_ != steps &&
           std::ranges::none_of(jobs_, [&](const Job& job) { return job.steps == steps; });
  });
}

bool Offload::IsWanted(const SequenceState& sequence) {
  const base::MutexLock lock(&mutex_);
  const Progress& progress = sequences_.at(&sequence);
  return progress.is_wanted && progress.status == PQC_OK;
}

void Offload::RunNext() {
  Job job;
  {
    const base::MutexLock lock(&mutex_);
    job = std::move(jobs_.front());
    jobs_.pop_front();
    current_steps_ = job.steps;
  }
  const std::shared_ptr<SequenceState> sequence = job.sequence;
  RefusalBuffer error;
  pqc_status status = PQC_OK;
  try {
    status = Finish(std::move(job), &error);
  } catch (const std::bad_alloc&) {
    status = PQC_RESOURCE_EXHAUSTED;
    SetRefusal(&error, "", "the client is out of memory");
  }
  CompleteJob(*sequence, status, error);
}

pqc_status Offload::Finish(Job job, RefusalBuffer* error) {
  const gpu::Outcome packed = job.steps->WaitPacked(job.filled.slot.number());
  if (!packed.ok()) {
    job.filled.slot.Lose();
    SetRefusal(error, "", packed.text);
    return PQC_INTERNAL;
  }
  if (!IsWanted(*job.sequence)) return PQC_OK;
  const pqc_row_options names = job.names.view();
  if (!job.names.empty()) job.rows.names = &names;
  return CommitSlot(remote_, job.sequence->sequence_id, job.rows, job.filled, error);
}

void Offload::CompleteJob(const SequenceState& sequence, pqc_status status,
                          const RefusalBuffer& error) {
  {
    const base::MutexLock lock(&mutex_);
    current_steps_ = nullptr;
    const auto found = sequences_.find(&sequence);
    Progress& progress = found->second;
    if (status != PQC_OK && progress.status == PQC_OK) {
      progress.status = status;
      progress.error = error;
    }
    const bool is_reported = progress.status == PQC_OK || !progress.is_wanted;
    if (--progress.waiting_count == 0 && is_reported) sequences_.erase(found);
  }
  done_.SignalAll();
}

}  // namespace pqcached::client
