// Implements pqc_sequences_reorder.
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "client/abi/sequence_handles.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/local/sequence.h"
#include "client/step/handles.h"
#include "client/step/preparer.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kMaxSequences = 256;
constexpr uint32_t kForkSequencesVersion = 11;  // of Remote

// What a reordering does to the sequences.
struct Plan {
  std::vector<bool> is_kept;    // per sequence
  std::vector<uint32_t> forks;  // the new sequences that are forks
  std::vector<ForkItem> items;  // per fork
  std::vector<uint64_t> dropped_ids;
};

pqc_status CheckArguments(pqc_sequence** sequences, uint32_t count, const uint32_t* from,
                          uint32_t new_count, pqc_sequence** reordered) {
  if (!sequences) return Fail(PQC_INVALID_ARGUMENT, "sequences", "must not be NULL");
  if (!from) return Fail(PQC_INVALID_ARGUMENT, "from", "must not be NULL");
  if (!reordered) return Fail(PQC_INVALID_ARGUMENT, "reordered", "must not be NULL");
  if (count < 1 || count > kMaxSequences) {
    return Fail(PQC_INVALID_ARGUMENT, "count", "%u, must be 1 to %u", count, kMaxSequences);
  }
  if (new_count < 1 || new_count > kMaxSequences) {
    return Fail(PQC_INVALID_ARGUMENT, "new_count", "%u, must be 1 to %u", new_count, kMaxSequences);
  }
  for (uint32_t i = 0; i < count; ++i) {
    const FieldPath field = FieldPath::Of("sequences[%u]", i);
    if (!sequences[i]) return Fail(PQC_INVALID_ARGUMENT, field, "must not be NULL");
    if (sequences[i]->state->cache != sequences[0]->state->cache) {
      return Fail(PQC_INVALID_ARGUMENT, field, "of another cache than sequences[0]");
    }
    for (uint32_t j = 0; j < i; ++j) {
      if (sequences[j] != sequences[i]) continue;
      return Fail(PQC_INVALID_ARGUMENT, field, "listed twice, first in sequences[%u]", j);
    }
  }
  for (uint32_t i = 0; i < new_count; ++i) {
    if (from[i] < count) continue;
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("from[%u]", i), "%u, must be below %u", from[i],
                count);
  }
  return PQC_OK;
}

Plan MakePlan(pqc_sequence** sequences, uint32_t count, const uint32_t* from, uint32_t new_count) {
  Plan plan;
  plan.is_kept.resize(count);
  for (uint32_t i = 0; i < new_count; ++i) {
    if (plan.is_kept[from[i]]) {
      plan.forks.push_back(i);
      plan.items.push_back({.parent_id = sequences[from[i]]->state->sequence_id});
    }
    plan.is_kept[from[i]] = true;
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (!plan.is_kept[i]) plan.dropped_ids.push_back(sequences[i]->state->sequence_id);
  }
  return plan;
}

// Reports a refused fork, which the sidecar names by its number among the forks.
pqc_status ReportFork(pqc_status status, RefusalBuffer error, const Plan& plan) {
  const std::string_view field = error.field;
  for (size_t i = 0; i < plan.forks.size(); ++i) {
    if (!field.starts_with(FieldPath::Of("items[%zu]", i).c_str())) continue;
    const std::string text = error.text;
    SetRefusal(&error, FieldPath::Of("from[%u]", plan.forks[i]).c_str(), text.c_str());
    break;
  }
  return Report(status, error);
}

// Forks and drops by one RPC each. Drops the forks again when one of them fails.
pqc_status ForkOneByOne(Remote& remote, Plan& plan) {
  RefusalBuffer error;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    ForkItem& item = plan.items[i];
    const pqc_status status =
        remote.ForkSequence(item.parent_id, 0, &item.child_id, &item.child_token_count, &error);
    if (status == PQC_OK) continue;
    RefusalBuffer ignored;
    for (size_t j = 0; j < i; ++j) remote.DropSequence(plan.items[j].child_id, &ignored);
    SetRefusal(&error, FieldPath::Of("items[%zu]", i).c_str(), std::string(error.text).c_str());
    return ReportFork(status, error, plan);
  }
  for (const uint64_t id : plan.dropped_ids) remote.DropSequence(id, &error);
  return PQC_OK;
}

pqc_status ForkAndDrop(const ClientState& client, Plan& plan) {
  if (plan.items.empty() && plan.dropped_ids.empty()) return PQC_OK;
  Remote& remote = *client.remote;
  if (client.remote_version < kForkSequencesVersion) return ForkOneByOne(remote, plan);
  RefusalBuffer error;
  const pqc_status status = remote.ForkSequences(
      plan.items.data(), static_cast<uint32_t>(plan.items.size()), plan.dropped_ids.data(),
      static_cast<uint32_t>(plan.dropped_ids.size()), &error);
  if (status == PQC_UNIMPLEMENTED) return ForkOneByOne(remote, plan);  // an older sidecar
  return ReportFork(status, error, plan);
}

pqc_status Reorder(pqc_sequence** sequences, uint32_t count, const uint32_t* from,
                   uint32_t new_count, pqc_sequence** reordered) {
  RETURN_IF_ERROR(CheckArguments(sequences, count, from, new_count, reordered));
  std::vector<std::unique_ptr<ChangeScope>> changing;
  for (uint32_t i = 0; i < count; ++i) {
    changing.push_back(std::make_unique<ChangeScope>(sequences[i]));
    if (const pqc_status status = changing.back()->status(); status != PQC_OK) {
      return PrefixField(FieldPath::Of("sequences[%u]", i), status);
    }
  }
  Plan plan = MakePlan(sequences, count, from, new_count);
  const ClientState& client = *sequences[0]->state->cache->client;
  std::vector<std::unique_ptr<pqc_sequence>> children;
  for (size_t i = 0; i < plan.forks.size(); ++i) {
    children.push_back(NewHandle(sequences[0]->state->cache));
  }
  RETURN_IF_ERROR(ForkAndDrop(client, plan));
  std::vector<pqc_sequence*> result(new_count);
  for (size_t i = 0; i < plan.forks.size(); ++i) {
    const SequenceState& parent = *sequences[from[plan.forks[i]]]->state;
    Adopt(plan.items[i].child_id, plan.items[i].child_token_count, *children[i]);
    children[i]->state->live_index = parent.live_index;
    children[i]->state->prefill_open = parent.prefill_open.load();
    if (client.local) client.preparer->Request(children[i]->state, {});
    result[plan.forks[i]] = children[i].release();
  }
  changing.clear();  // before handles are freed
  for (uint32_t i = 0; i < new_count; ++i) {
    if (!result[i]) result[i] = sequences[from[i]];
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (!plan.is_kept[i]) Forget(std::unique_ptr<pqc_sequence>(sequences[i]));
  }
  std::copy(result.begin(), result.end(), reordered);
  ClearLastError();
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

extern "C" pqc_status pqc_sequences_reorder(pqc_sequence** sequences, uint32_t count,
                                            const uint32_t* from, uint32_t new_count,
                                            pqc_sequence** reordered) {
  return pqcached::client::RecordedCall(
      "pqc_sequences_reorder",
      [&](pqcached::client::CallRecord& call) {
        call.Handles("sequences", sequences, count).Opens("reordered", reordered, new_count);
      },
      [&] { return pqcached::client::Reorder(sequences, count, from, new_count, reordered); });
}
