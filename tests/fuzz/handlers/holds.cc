// Calls that hold sequences in place, look at them, or evict them.
#include <cstring>

#include "kvstore/read/attachment.h"
#include "pqcached/v1/admin.pb.h"
#include "tests/fuzz/handlers/calls.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using absl::StatusCode;

constexpr kvstore::LayerShape kShape = {.dtype = kernels::DType::kF16,
                                        .key_dim = kKeyElements,
                                        .value_dim = kValueElements,
                                        .kv_heads = 1,
                                        .query_heads = kQueryHeadCount,
                                        .row_bytes = sizeof(Row)};

// Takes a newer attachment, for the tokens that the sequence has now.
void TakeImage(const Tenant& tenant, const Sequence& one, const v1::Attachment& from,
               Lease* lease) {
  if (from.image().empty()) return;
  const std::span<const char> image(from.image());
  const std::string wrong =
      kvstore::ParseAttachment(std::as_bytes(image), tenant.pool.size_bytes(), &lease->attachment);
  if (!wrong.empty()) Found("an attachment: " + wrong);
  lease->version = from.version();
  lease->content = one.content;
  if (lease->attachment.header.token_count != one.content.size()) {
    Found("an attachment has another count of tokens");
  }
}

}  // namespace

v1::LeaseState World::LeaseStateOf(const Tenant& tenant, uint64_t sequence_id) const {
  v1::LeaseState state;
  for (const Lease& lease : tenant.leases) {
    if (lease.sequence_id != sequence_id || lease.is_loose) continue;
    state.set_lease_id(lease.id);
    state.set_known_version(lease.version);
  }
  return state;
}

void World::CompareLease(const Tenant& tenant, const Lease& lease) {
  if (lease.is_loose || lease.content.empty()) return;
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    kvstore::MappedLayer mapped;
    const std::string wrong =
        kvstore::MappedLayer::Make(lease.attachment, kStoredLayers[layer], kShape,
                                   kvstore::kMaxIndexes, tenant.pool.data(), &mapped);
    if (!wrong.empty()) Found("mapped memory: " + wrong);
    const kvstore::LayerView view = mapped.View(static_cast<uint32_t>(lease.content.size()));
    if (view.token_count() != lease.content.size()) Found("tokens are missing in mapped memory");
    for (const kvstore::SegmentView& segment : view.segments) {
      for (uint32_t i = 0; i < segment.token_count; ++i) {
        const Row& row = tenant.rows.row(layer, lease.content[segment.first_position + i]);
        if (std::memcmp(segment.rows[0] + i * sizeof(Row), row.data(), sizeof(Row)) != 0) {
          Found("memory under a lease has changed");
        }
      }
    }
  }
}

// Takes a lease, or refreshes the one that there is.
void Attach(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (one == nullptr || one->is_loose || one->is_live) return;
  v1::AttachRequest request;
  request.set_sequence_id(one->id);
  *request.mutable_lease() = world.LeaseStateOf(tenant, one->id);
  const bool refreshes = request.lease().lease_id() != 0;
  if (!refreshes && tenant.HasLease(one->id)) return;  // a loose one
  v1::AttachResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (result.is_changed && result.status.ok()) {
    Lease loose;
    loose.id = response.lease_id();
    loose.is_loose = true;
    const auto is_it = [&](const Lease& each) { return each.id == loose.id; };
    const bool is_new = std::none_of(tenant.leases.begin(), tenant.leases.end(), is_it);
    if (is_new) tenant.leases.push_back(std::move(loose));
  }
  if (refreshes && absl::IsFailedPrecondition(result.status)) return;  // revoked
  if (!world.Expect(tenant, result, request, ExpectedOf(*one), /*may_lack=*/true)) return;
  if (!refreshes) {
    tenant.leases.emplace_back();
    tenant.leases.back().id = response.lease_id();
    tenant.leases.back().sequence_id = one->id;
  }
  for (Lease& lease : tenant.leases) {
    if (lease.id != response.lease_id()) continue;
    TakeImage(tenant, *one, response.attachment(), &lease);
    world.CompareLease(tenant, lease);
  }
}

void Detach(World& world, Tenant& tenant, Bytes& bytes) {
  if (tenant.leases.empty()) return;
  const size_t i = bytes.Below(tenant.leases.size());
  world.CompareLease(tenant, tenant.leases[i]);
  v1::DetachRequest request;
  request.set_lease_id(tenant.leases[i].id);
  v1::DetachResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (tenant.leases[i].is_loose && !result.status.ok()) return;
  if (!world.Expect(tenant, result, request, StatusCode::kOk)) return;
  tenant.leases.erase(tenant.leases.begin() + static_cast<ptrdiff_t>(i));
}

void Admit(World& world, Tenant& tenant, Bytes& bytes) {
  v1::AdmitRequest request;
  request.set_cache_id(tenant.cache_id);
  request.set_token_count(uint64_t{bytes.Byte()} * 16);
  request.set_output_token_count(bytes.Byte());
  v1::AdmitResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, StatusCode::kOk)) return;
  if (response.verdict() == v1::VERDICT_UNSPECIFIED) Found("no verdict");
}

void Pin(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (one == nullptr || one->is_loose) return;
  const bool pins = bytes.Byte() % 2 == 1;
  v1::PinRequest request;
  request.set_sequence_id(one->id);
  request.set_ttl_ms(pins ? 3'600'000 : 0);
  v1::PinResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (world.Expect(tenant, result, request, StatusCode::kOk, /*may_lack=*/true)) {
    one->is_pinned = pins;
  }
}

void Evict(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (one == nullptr || one->is_loose) return;
  v1::EvictRequest request;
  request.set_sequence_id(one->id);
  v1::EvictResponse response;
  const uint64_t id = one->id;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  const auto is_loose = [](const Lease& each) { return each.is_loose; };
  const bool unsure = std::any_of(tenant.leases.begin(), tenant.leases.end(), is_loose);
  const bool is_held = one->is_pinned || tenant.HasLease(id);
  const bool refused = absl::IsFailedPrecondition(result.status);
  if (refused && !is_held && (unsure || one->is_live)) return;
  const StatusCode expected = is_held ? StatusCode::kFailedPrecondition : StatusCode::kOk;
  if (world.Expect(tenant, result, request, expected)) tenant.Forget(id);
}

void OpenCache(World& world, Tenant& tenant, Bytes& bytes) {
  v1::OpenCacheRequest request = world.CacheOf();
  v1::OpenCacheResponse response;
  // What it may open stays until the sidecar ends.
  static const uint8_t kUnchanged[] = {0};
  Bytes none(kUnchanged, sizeof(kUnchanged));
  const World::Result result =
      world.Call(tenant, request, &response, world.is_slow() ? bytes : none);
  if (!world.Expect(tenant, result, request, StatusCode::kOk)) return;
  if (response.created() || response.cache_id() != tenant.cache_id)
    Found("a cache is opened twice");
}

// Calls that list and describe, and one of operators.
void Inspect(World& world, Tenant& tenant, Bytes& bytes) {
  const uint8_t kind = bytes.Byte();
  const auto call = [&](auto request, auto response) {
    const World::Result result = world.Call(tenant, request, &response, bytes);
    world.Expect(tenant, result, request, StatusCode::kOk);
  };
  switch (kind % 10) {
    case 0:
      return call(v1::StatsRequest(), v1::StatsResponse());
    case 1:
      return call(v1::ListCachesRequest(), v1::ListCachesResponse());
    case 2:
      return call(v1::ListSequencesRequest(), v1::ListSequencesResponse());
    case 3:
      return call(v1::ListLeasesRequest(), v1::ListLeasesResponse());
    case 4:
      return call(v1::GetServerInfoRequest(), v1::GetServerInfoResponse());
    case 5: {
      v1::SetLogLevelRequest level;
      level.set_level("off");
      return call(level, v1::SetLogLevelResponse());
    }
    case 6:
      return call(v1::ListSessionsRequest(), v1::ListSessionsResponse());
    case 7:
      return call(v1::ListTenantLimitsRequest(), v1::ListTenantLimitsResponse());
    case 8:
      return call(v1::ListIndexTypesRequest(), v1::ListIndexTypesResponse());
    default:
      const Sequence* one = Choose(tenant, bytes);
      if (one == nullptr || one->is_loose) return;
      v1::DescribeSequenceRequest describe;
      describe.set_sequence_id(one->id);
      return call(describe, v1::DescribeSequenceResponse());
  }
}

}  // namespace pqcached::fuzz
