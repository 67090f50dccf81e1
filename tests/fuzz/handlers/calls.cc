#include "tests/fuzz/handlers/calls.h"

#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using absl::StatusCode;

// Reads and changes a sequence of the other tenant, which must not exist for this one.
void ReachOver(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* foreign = Choose(world.Other(tenant), bytes);
  if (foreign == nullptr) return;
  const auto expect = [&](const google::protobuf::Message& request, const absl::Status& status) {
    if (status.code() != StatusCode::kNotFound) {
      Found(request.GetDescriptor()->name() + " of another tenant: " + status.ToString());
    }
  };
  service::DirectSidecar& sidecar = world.sidecar();
  const uint64_t id = foreign->id;
  v1::FetchBlocksRequest fetch;
  fetch.set_sequence_id(id);
  fetch.set_layer(kStoredLayers[0]);
  fetch.add_ranges()->set_end(1);
  v1::FetchBlocksResponse fetched;
  expect(fetch, sidecar.Call(tenant.client, fetch, &fetched));
  v1::AppendRequest append;
  v1::SequenceAppend* item = append.add_items();
  item->set_sequence_id(id);
  item->set_first_position(foreign->content.size());
  const uint32_t content[] = {1};
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    SetRows(tenant.rows, layer, content, false, item->add_rows());
  }
  v1::AppendResponse appended;
  expect(append, sidecar.Call(tenant.client, append, &appended));
  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(id);
  v1::TruncateSequenceResponse truncated;
  expect(truncate, sidecar.Call(tenant.client, truncate, &truncated));
  v1::AttachRequest attach;
  attach.set_sequence_id(id);
  v1::AttachResponse attached;
  expect(attach, sidecar.Call(tenant.client, attach, &attached));
  v1::ForkSequenceRequest fork;
  fork.set_sequence_id(id);
  v1::ForkSequenceResponse forked;
  expect(fork, sidecar.Call(tenant.client, fork, &forked));
  v1::DropSequenceRequest drop;
  drop.set_sequence_id(id);
  v1::DropSequenceResponse dropped;
  expect(drop, sidecar.Call(tenant.client, drop, &dropped));
}

void EndSession(World& world, Tenant& tenant, Bytes& bytes) {
  if (!world.is_slow()) return ReachOver(world, tenant, bytes);
  world.ReplaceSession(tenant);
}

void Restart(World& world, Tenant& tenant, Bytes& bytes) {
  if (!world.is_slow()) return ReachOver(world, tenant, bytes);
  world.Restart();
}

}  // namespace

Sequence* Choose(Tenant& tenant, Bytes& bytes) {
  if (tenant.sequences.empty()) return nullptr;
  return &tenant.sequences[bytes.Below(tenant.sequences.size())];
}

StatusCode ExpectedOf(const Sequence& sequence) {
  return sequence.is_suspended ? StatusCode::kFailedPrecondition : StatusCode::kOk;
}

void CallOne(World& world, Tenant& tenant, uint8_t number, Bytes& bytes) {
  using Function = void (*)(World&, Tenant&, Bytes&);
  static constexpr Function kFunctions[] = {
      Create,  Append,       Ingest,      Commit,      RacedCommit, Truncate, Fork,  Drop,
      Suspend, Resume,       FetchBlocks, FetchTokens, TopK,        Attend,   Score, Match,
      Build,   ClosePrefill, Attach,      Detach,      Admit,       Pin,      Evict, OpenCache,
      Inspect, EndSession,   Restart,     AttendRange, Pages};
  static_assert(std::size(kFunctions) == static_cast<size_t>(CallKind::kCount));
  kFunctions[number % std::size(kFunctions)](world, tenant, bytes);
}

}  // namespace pqcached::fuzz
