// A store that passes everything on, and lets a test stand in the way of single calls.
#ifndef PQCACHED_TESTS_SERVICE_RPC_HOOKED_STORE_H_
#define PQCACHED_TESTS_SERVICE_RPC_HOOKED_STORE_H_

#include <functional>
#include <memory>
#include <utility>

#include "kvstore/store.h"

namespace pqcached::service {

using kvstore::TokenNames;

// Set before the server starts; called on its threads.
struct StoreHooks {
  std::function<void()> before_top_k = [] {};
  std::function<void()> before_create_sequence = [] {};
  std::function<void()> before_ingest = [] {};
  std::function<void()> after_begin_ingest = [] {};
  std::function<void(const kvstore::BuildSpec&)> before_build = [](const auto&) {};
  // Stands for the progress of a build: passes `progress` on as it likes.
  std::function<bool(const kvstore::BuildProgress&,
                     const std::function<bool(const kvstore::BuildProgress&)>& pass_on)>
      on_progress = [](const auto& progress, const auto& pass_on) { return pass_on(progress); };
};

class HookedStore final : public kvstore::Store {
 public:
  HookedStore(std::unique_ptr<kvstore::Store> store, const StoreHooks& hooks)
      : store_(std::move(store)), hooks_(hooks) {}

  absl::StatusOr<kvstore::OpenedCache> OpenCache(std::string_view tenant,
                                                 const kvstore::CacheSpec& spec,
                                                 std::string_view session) override {
    return store_->OpenCache(tenant, spec, session);
  }
  absl::StatusOr<kvstore::CreatedSequence> CreateSequence(
      std::string_view tenant, uint64_t cache_id, const kvstore::SequenceSpec& spec) override {
    hooks_.before_create_sequence();
    return store_->CreateSequence(tenant, cache_id, spec);
  }
  absl::StatusOr<kvstore::CreatedSequence> ForkSequence(std::string_view tenant,
                                                        uint64_t sequence_id, uint64_t token_count,
                                                        std::string_view session) override {
    return store_->ForkSequence(tenant, sequence_id, token_count, session);
  }
  absl::StatusOr<uint64_t> MatchPrefix(std::string_view tenant, uint64_t cache_id,
                                       const TokenNames& names,
                                       std::string_view extra_key) override {
    return store_->MatchPrefix(tenant, cache_id, names, extra_key);
  }
  absl::StatusOr<std::vector<kvstore::PrefixKey>> PrefixKeys(
      std::string_view tenant, uint64_t cache_id, const TokenNames& names,
      std::string_view extra_key) const override {
    return store_->PrefixKeys(tenant, cache_id, names, extra_key);
  }
  absl::StatusOr<bool> HasEvents(std::string_view tenant, uint64_t cache_id,
                                 const kvstore::EventPosition& position) const override {
    return store_->HasEvents(tenant, cache_id, position);
  }
  absl::StatusOr<std::vector<kvstore::CacheEvent>> ReadEvents(std::string_view tenant,
                                                              uint64_t cache_id,
                                                              kvstore::EventPosition& position,
                                                              size_t most) override {
    return store_->ReadEvents(tenant, cache_id, position, most);
  }
  absl::Status NameTokens(std::string_view tenant, uint64_t sequence_id, uint64_t first_position,
                          const TokenNames& names) override {
    return store_->NameTokens(tenant, sequence_id, first_position, names);
  }
  absl::Status CheckNames(std::string_view tenant, uint64_t sequence_id, uint64_t first_position,
                          const TokenNames& names) const override {
    return store_->CheckNames(tenant, sequence_id, first_position, names);
  }
  absl::StatusOr<uint64_t> SuspendSequence(std::string_view tenant, uint64_t sequence_id) override {
    return store_->SuspendSequence(tenant, sequence_id);
  }
  absl::StatusOr<uint64_t> ResumeSequence(std::string_view tenant, uint64_t sequence_id) override {
    return store_->ResumeSequence(tenant, sequence_id);
  }
  absl::StatusOr<kvstore::SessionMemory> OpenLocalSession(std::string_view tenant,
                                                          std::string_view session,
                                                          uint64_t boot_word) override {
    return store_->OpenLocalSession(tenant, session, boot_word);
  }
  std::shared_ptr<const void> AdoptStaging(std::string_view tenant,
                                           kvstore::FileDescriptor ring) override {
    return store_->AdoptStaging(tenant, std::move(ring));
  }
  absl::StatusOr<kvstore::SharedMemory> OpenPool(std::string_view tenant, std::string_view session,
                                                 uint64_t cache_id) override {
    return store_->OpenPool(tenant, session, cache_id);
  }
  absl::Status HoldPool(std::string_view tenant, std::string_view session,
                        uint64_t cache_id) override {
    return store_->HoldPool(tenant, session, cache_id);
  }
  absl::StatusOr<kvstore::SharedMemory> OpenStaging(std::string_view tenant,
                                                    std::string_view session, uint64_t slot_bytes,
                                                    uint32_t slot_count) override {
    return store_->OpenStaging(tenant, session, slot_bytes, slot_count);
  }
  absl::StatusOr<kvstore::StagedBytes> ClaimStaging(
      std::string_view session, const kvstore::StagingReference& reference) override {
    return store_->ClaimStaging(session, reference);
  }
  absl::StatusOr<kvstore::AttachedSequence> Attach(std::string_view tenant, uint64_t sequence_id,
                                                   std::string_view session,
                                                   const kvstore::LeaseState& lease) override {
    return store_->Attach(tenant, sequence_id, session, lease);
  }
  absl::StatusOr<kvstore::VersionedImage> RefreshLease(std::string_view session,
                                                       const kvstore::LeaseState& lease) override {
    return store_->RefreshLease(session, lease);
  }
  absl::Status Detach(std::string_view session, uint64_t lease_id) override {
    return store_->Detach(session, lease_id);
  }
  std::vector<kvstore::LeaseInfo> ListLeases(std::string_view tenant) override {
    return store_->ListLeases(tenant);
  }
  kvstore::RecoveryReport Recovery() const override { return store_->Recovery(); }
  absl::Status KeepSession(const kvstore::KeptSession& session) override {
    return store_->KeepSession(session);
  }
  std::vector<kvstore::KeptSession> KeptSessions() const override { return store_->KeptSessions(); }
  uint32_t EndQuarantineExcept(const kvstore::CacheFilter& may_be_mapped) override {
    return store_->EndQuarantineExcept(may_be_mapped);
  }
  absl::StatusOr<kvstore::ExportedSequence> ExportSequence(
      std::string_view tenant, uint64_t sequence_id, const kvstore::ImagePlace& place) override {
    return store_->ExportSequence(tenant, sequence_id, place);
  }
  absl::StatusOr<kvstore::ImportedSequence> ImportSequence(
      std::string_view tenant, uint64_t cache_id, const kvstore::ImagePlace& place) override {
    return store_->ImportSequence(tenant, cache_id, place);
  }
  absl::Status PlanPoolMove(uint64_t cache_id) override { return store_->PlanPoolMove(cache_id); }
  kvstore::StoreStats Stats(std::string_view tenant) override { return store_->Stats(tenant); }
  bool WaitIdle(kvstore::SteadyTime deadline) override { return store_->WaitIdle(deadline); }
  void ApplyMemoryLimits() override { store_->ApplyMemoryLimits(); }
  absl::StatusOr<kvstore::Admission> Admit(std::string_view tenant, uint64_t cache_id,
                                           const kvstore::AdmitSpec& spec) override {
    return store_->Admit(tenant, cache_id, spec);
  }
  absl::Status PinSequence(std::string_view tenant, uint64_t sequence_id,
                           absl::Duration ttl) override {
    return store_->PinSequence(tenant, sequence_id, ttl);
  }
  void SetTenantQuotas(kvstore::TenantQuotas quotas) override {
    store_->SetTenantQuotas(std::move(quotas));
  }
  absl::StatusOr<kvstore::DroppedCache> DropCache(std::string_view tenant, uint64_t cache_id,
                                                  bool force) override {
    return store_->DropCache(tenant, cache_id, force);
  }
  absl::StatusOr<kvstore::OpenedCache> OpenPageCache(std::string_view tenant,
                                                     const kvstore::PageCacheSpec& spec,
                                                     std::string_view session) override {
    return store_->OpenPageCache(tenant, spec, session);
  }
  absl::StatusOr<std::vector<kvstore::PageOutcome>> PutPages(
      std::string_view tenant, uint64_t cache_id,
      std::span<const kvstore::PageSource> pages) override {
    return store_->PutPages(tenant, cache_id, pages);
  }
  absl::StatusOr<std::vector<kvstore::FoundPage>> FindPages(std::string_view tenant,
                                                            uint64_t cache_id,
                                                            std::span<const std::string_view> keys,
                                                            absl::Duration lease) override {
    return store_->FindPages(tenant, cache_id, keys, lease);
  }
  absl::StatusOr<kvstore::ErasedTenant> EraseTenant(std::string_view tenant,
                                                    absl::Duration patience) override {
    return store_->EraseTenant(tenant, patience);
  }
  absl::Status EvictSequence(std::string_view tenant, uint64_t sequence_id) override {
    return store_->EvictSequence(tenant, sequence_id);
  }
  absl::Status DropSequence(std::string_view tenant, uint64_t sequence_id) override {
    return store_->DropSequence(tenant, sequence_id);
  }
  uint32_t DropSession(std::string_view session) override { return store_->DropSession(session); }
  absl::StatusOr<uint64_t> TruncateSequence(std::string_view tenant, uint64_t sequence_id,
                                            uint64_t token_count, uint64_t own_lease) override {
    return store_->TruncateSequence(tenant, sequence_id, token_count, own_lease);
  }
  absl::StatusOr<std::unique_ptr<kvstore::IngestTransaction>> BeginIngest(
      std::string_view tenant, uint64_t sequence_id) override {
    hooks_.before_ingest();
    auto ingest = store_->BeginIngest(tenant, sequence_id);
    hooks_.after_begin_ingest();
    return ingest;
  }
  absl::StatusOr<uint64_t> Append(std::string_view tenant, uint64_t sequence_id,
                                  uint64_t first_position,
                                  std::span<const kvstore::LayerRows> layers) override {
    return store_->Append(tenant, sequence_id, first_position, layers);
  }
  absl::Status ClosePrefill(std::string_view tenant, uint64_t sequence_id) override {
    return store_->ClosePrefill(tenant, sequence_id);
  }
  absl::Status BuildIndex(
      std::string_view tenant, uint64_t sequence_id, const kvstore::BuildSpec& spec,
      const std::function<bool(const kvstore::BuildProgress&)>& progress) override {
    hooks_.before_build(spec);
    return store_->BuildIndex(tenant, sequence_id, spec, [&](const kvstore::BuildProgress& each) {
      return hooks_.on_progress(each, progress);
    });
  }
  absl::StatusOr<kvstore::Selected> TopK(std::string_view tenant, uint64_t sequence_id,
                                         const kvstore::Query& query,
                                         const kvstore::Selection& selection) override {
    hooks_.before_top_k();
    return store_->TopK(tenant, sequence_id, query, selection);
  }
  absl::StatusOr<kvstore::SelectedPages> TopPages(std::string_view tenant, uint64_t sequence_id,
                                                  const kvstore::Query& query,
                                                  const kvstore::Selection& selection,
                                                  const kvstore::PageTerms& terms) override {
    return store_->TopPages(tenant, sequence_id, query, selection, terms);
  }
  absl::StatusOr<kvstore::Scores> Score(std::string_view tenant, uint64_t sequence_id,
                                        const kvstore::Query& query,
                                        const kvstore::IndexDescriptor& index,
                                        kvstore::TokenRange tokens) override {
    return store_->Score(tenant, sequence_id, query, index, tokens);
  }
  absl::StatusOr<kvstore::Rows> FetchBlocks(std::string_view tenant, uint64_t sequence_id,
                                            uint32_t layer, kvstore::TokenRange tokens,
                                            kvstore::RowPart part) override {
    return store_->FetchBlocks(tenant, sequence_id, layer, tokens, part);
  }
  absl::StatusOr<kvstore::Rows> FetchTokens(std::string_view tenant, uint64_t sequence_id,
                                            uint32_t layer, std::span<const uint32_t> positions,
                                            kvstore::RowPart part) override {
    return store_->FetchTokens(tenant, sequence_id, layer, positions, part);
  }
  absl::StatusOr<kvstore::Attention> Attend(std::string_view tenant, uint64_t sequence_id,
                                            const kvstore::Query& query,
                                            const kvstore::Selection& selection,
                                            bool want_positions) override {
    return store_->Attend(tenant, sequence_id, query, selection, want_positions);
  }
  absl::StatusOr<kvstore::Attention> AttendPositions(std::string_view tenant, uint64_t sequence_id,
                                                     const kvstore::Query& query,
                                                     std::span<const uint32_t> positions,
                                                     uint32_t count) override {
    return store_->AttendPositions(tenant, sequence_id, query, positions, count);
  }
  absl::StatusOr<kvstore::Attention> AttendRange(
      std::string_view tenant, uint64_t sequence_id, const kvstore::Query& query,
      kvstore::TokenRange tokens, const std::function<bool()>& is_cancelled) override {
    return store_->AttendRange(tenant, sequence_id, query, tokens, is_cancelled);
  }
  std::vector<kvstore::CacheInfo> ListCaches(std::string_view tenant) override {
    return store_->ListCaches(tenant);
  }
  absl::StatusOr<std::vector<kvstore::SequenceInfo>> ListSequences(std::string_view tenant,
                                                                   uint64_t cache_id) override {
    return store_->ListSequences(tenant, cache_id);
  }
  absl::StatusOr<kvstore::SequenceInfo> DescribeSequence(std::string_view tenant,
                                                         uint64_t sequence_id) override {
    return store_->DescribeSequence(tenant, sequence_id);
  }

 private:
  const std::unique_ptr<kvstore::Store> store_;
  const StoreHooks& hooks_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_RPC_HOOKED_STORE_H_
