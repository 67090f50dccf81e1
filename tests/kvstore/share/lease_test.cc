// Leases: a client reads mapped memory while its sequence grows, is rolled back, dropped, and while
// others want the memory. What it may still look at never changes.
#include "kvstore/share/lease.h"

#include <atomic>
#include <thread>

#include "tests/kvstore/share/lease_fixture.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::Floats;
using ::testing::HasSubstr;
using testing::kTenant;
using testing::LayerModel;
using testing::MappedClient;
using testing::TestSequence;

void ExpectMappedRowsMatch(const MappedClient& client, TestSequence& sequence) {
  EXPECT_EQ(client.words().token_count.load(), sequence.tokens());
  for (const LayerModel& model : sequence.layers()) {
    ASSERT_EQ(client.Rows(model.group, model.group.layers.front(), model.tokens),
              model.Rows(0, model.tokens));
  }
}

size_t UsedBytes(TestSequence& sequence) {
  return sequence.store().ListCaches(kTenant).front().used_bytes;
}

TEST(Lease, WhatIsMappedIsWhatIsStored) {
  TestSequence sequence;
  sequence.Ingest(300);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  EXPECT_EQ(client.page().boot_word.load(), 77u);
  EXPECT_EQ(client.words().lease_id.load(), client.lease().lease_id);
  EXPECT_EQ(client.words().version.load(), client.lease().known_version);
  EXPECT_EQ(client.attachment().header.sequence_id, sequence.id());
  ExpectMappedRowsMatch(client, sequence);
}

TEST(Lease, CodesAreMappedToo) {
  TestSequence sequence;
  sequence.Ingest(300);
  sequence.Build(testing::Pq(2, 4));
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  ASSERT_EQ(client.attachment().header.index_count, 1u);
  const LayerGroup& group = sequence.layers().front().group;
  const LayerShape shape{.dtype = group.dtype,
                         .key_dim = group.key_dim,
                         .value_dim = group.value_dim,
                         .kv_heads = group.kv_heads,
                         .query_heads = group.query_heads,
                         .row_bytes = group.row_bytes()};
  MappedLayer mapped;
  ASSERT_EQ(MappedLayer::Make(client.attachment(), 3, shape, 0, client.pool(), &mapped), "");
  EXPECT_TRUE(mapped.ready());
  for (const SegmentView& segment : mapped.View(300).segments) {
    EXPECT_EQ(segment.index_data->index, testing::Pq(2, 4));
    EXPECT_EQ(segment.codebook->codebook_generation, segment.index_data->codebook_generation);
  }
}

TEST(Lease, NewTokensOfTheTailNeedNoNewAttachment) {
  TestSequence sequence;
  sequence.Ingest(130);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  const uint32_t wake = client.page().wake_word.load();
  sequence.Append(20);
  EXPECT_EQ(client.words().version.load(), client.lease().known_version);
  EXPECT_GT(client.page().wake_word.load(), wake);
  ExpectMappedRowsMatch(client, sequence);
  const auto newer = sequence.store().RefreshLease("client#1", client.lease());
  ASSERT_TRUE(newer.ok());
  EXPECT_TRUE(newer->image.empty());
}

TEST(Lease, ANewSegmentIsANewVersion) {
  TestSequence sequence;
  sequence.Ingest(130);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  const uint64_t first = client.lease().known_version;
  sequence.Append(200);
  EXPECT_GT(client.words().version.load(), first);
  ASSERT_TRUE(client.Refresh().ok());
  EXPECT_EQ(client.words().version.load(), client.lease().known_version);
  ExpectMappedRowsMatch(client, sequence);
}

TEST(Lease, AcknowledgedVersionsAreLetGo) {
  TestSequence sequence;
  sequence.Ingest(10);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  for (int i = 0; i < 5; ++i) {
    sequence.Append(128);
    ASSERT_TRUE(client.Refresh().ok());
    EXPECT_LE(sequence.store().ListLeases(kAllTenants).front().version_count, 2u);
  }
  ASSERT_TRUE(client.Refresh().ok());
  const LeaseInfo info = sequence.store().ListLeases(kAllTenants).front();
  EXPECT_EQ(info.version_count, 1u);
  EXPECT_EQ(info.bytes, UsedBytes(sequence));
  EXPECT_EQ(info.session, "client#1");
  EXPECT_GE(info.age_seconds, 0.0);
}

TEST(Lease, WhoNeverAcknowledgesIsStopped) {
  TestSequence sequence;
  sequence.Ingest(10);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  LeaseState lease{.lease_id = client.lease().lease_id, .known_version = 0};
  uint64_t newest = 0;
  absl::Status status;
  for (size_t i = 0; status.ok() && i <= Lease::kMaxVersions; ++i) {
    sequence.Append(128);
    const auto image = sequence.store().RefreshLease("client#1", lease);
    status = image.status();
    if (image.ok()) newest = image->version;
  }
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  lease.known_version = newest;
  EXPECT_TRUE(sequence.store().RefreshLease("client#1", lease).ok());
}

TEST(Lease, ARollBackByAnotherRevokesAndLeavesTheBytes) {
  TestSequence sequence;
  sequence.Ingest(128);
  sequence.Append(60);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  const LayerModel before = sequence.layers().front();
  sequence.Truncate(150);
  EXPECT_TRUE(client.words().flags.load() & LeaseWords::kRevoked);
  sequence.Append(60);  // other rows at the same positions
  EXPECT_EQ(client.Rows(before.group, 1, before.tokens), before.Rows(0, before.tokens));
  sequence.ExpectRowsMatch();
  EXPECT_TRUE(sequence.store().ListLeases(kAllTenants).front().revoked);
  const auto again = sequence.store().Attach(kTenant, sequence.id(), "client#1", client.lease());
  EXPECT_EQ(again.status().code(), StatusCode::kFailedPrecondition);
  const auto newer = sequence.store().RefreshLease("client#1", client.lease());
  ASSERT_TRUE(newer.ok());
  EXPECT_TRUE(newer->image.empty());
  EXPECT_TRUE(client.Detach().ok());
  EXPECT_TRUE(client.Attach(sequence.id()).ok());
  ExpectMappedRowsMatch(client, sequence);
}

TEST(Lease, AVersionThatWasNotDeliveredBeforeARevocationIsNotDeliveredAfterwards) {
  TestSequence sequence;
  sequence.Ingest(128);
  sequence.Append(60);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  sequence.Append(128);  // a new segment, and with it a new version
  ASSERT_GT(client.words().version.load(), client.lease().known_version);
  sequence.Truncate(150);
  ASSERT_TRUE(client.words().flags.load() & LeaseWords::kRevoked);
  const auto newer = sequence.store().RefreshLease("client#1", client.lease());
  ASSERT_TRUE(newer.ok()) << newer.status();
  EXPECT_EQ(newer->version, 0u);
  EXPECT_TRUE(newer->image.empty());
}

TEST(Lease, ARollBackOfItsHolderKeepsIt) {
  TestSequence sequence;
  sequence.Ingest(128);
  sequence.Append(60);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  MappedClient other(sequence.store(), sequence.cache_id(), "client#2");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  ASSERT_TRUE(other.Attach(sequence.id()).ok());
  const LayerModel before = sequence.layers().front();
  const auto count =
      sequence.store().TruncateSequence(kTenant, sequence.id(), 150, client.lease().lease_id);
  ASSERT_TRUE(count.ok()) << count.status();
  for (LayerModel& model : sequence.layers()) model.Truncate(150);
  EXPECT_EQ(client.words().flags.load(), 0u);
  EXPECT_EQ(client.words().token_count.load(), 150u);
  EXPECT_TRUE(other.words().flags.load() & LeaseWords::kRevoked);
  sequence.Append(60);
  ASSERT_TRUE(client.Refresh().ok());
  ExpectMappedRowsMatch(client, sequence);
  EXPECT_EQ(other.Rows(before.group, 1, before.tokens), before.Rows(0, before.tokens));
}

TEST(Lease, ItsHoldersRollBacksAloneMoveNothing) {
  TestSequence sequence;
  sequence.Ingest(128);
  sequence.Append(60);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  const uint64_t version = client.words().version.load();
  const size_t used = UsedBytes(sequence);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(sequence.store()
                    .TruncateSequence(kTenant, sequence.id(), 150, client.lease().lease_id)
                    .ok());
    for (LayerModel& model : sequence.layers()) model.Truncate(150);
    sequence.Append(8);
  }
  EXPECT_EQ(client.words().version.load(), version);
  EXPECT_EQ(UsedBytes(sequence), used);
  ExpectMappedRowsMatch(client, sequence);
}

TEST(Lease, SuspensionRevokesAndResumptionSaysSo) {
  TestSequence sequence;
  sequence.Ingest(128);
  sequence.Append(60);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  const LayerModel before = sequence.layers().front();
  ASSERT_TRUE(sequence.store().SuspendSequence(kTenant, sequence.id()).ok());
  EXPECT_EQ(client.words().flags.load(), LeaseWords::kRevoked | LeaseWords::kSuspended);
  EXPECT_EQ(sequence.store().Attach(kTenant, sequence.id(), "client#1", {}).status().code(),
            StatusCode::kFailedPrecondition);
  ASSERT_TRUE(sequence.store().ResumeSequence(kTenant, sequence.id()).ok());
  EXPECT_EQ(client.words().flags.load(), LeaseWords::kRevoked);
  // Revoked or not, what it may look at is not written again.
  sequence.Truncate(150);
  sequence.Append(60);
  EXPECT_EQ(client.Rows(before.group, 1, before.tokens), before.Rows(0, before.tokens));
  ASSERT_TRUE(client.Detach().ok());
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  ExpectMappedRowsMatch(client, sequence);
}

TEST(Lease, AnExpiredOneIsRevokedAndKeepsItsBytesUntilItIsLetGo) {
  StoreOptions options = testing::SmallOptions();
  options.lease_timeout = absl::Nanoseconds(1);
  TestSequence sequence(testing::SmallSpec(), options);
  sequence.Ingest(128);
  sequence.Append(60);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  const LayerModel before = sequence.layers().front();
  while (client.words().flags.load() == 0) std::this_thread::yield();  // nothing asks for it
  EXPECT_TRUE(sequence.store().ListLeases(kAllTenants).front().revoked);
  EXPECT_EQ(sequence.store().Stats(kAllTenants).revoked_lease_count, 1u);
  EXPECT_EQ(client.words().flags.load(), LeaseWords::kRevoked);
  sequence.Truncate(140);
  sequence.Append(60);  // other rows at the same positions
  EXPECT_EQ(client.Rows(before.group, 1, before.tokens), before.Rows(0, before.tokens));
  ASSERT_TRUE(sequence.store().DropSequence(kTenant, sequence.id()).ok());
  sequence.NewSequence();
  sequence.Ingest(188);
  EXPECT_EQ(client.Rows(before.group, 1, before.tokens), before.Rows(0, before.tokens));
  EXPECT_GT(sequence.store().ListLeases(kAllTenants).front().bytes, 0u);
  const size_t used_bytes = UsedBytes(sequence);
  ASSERT_TRUE(client.Detach().ok());
  EXPECT_LT(UsedBytes(sequence), used_bytes);
}

TEST(Lease, OneThatIsRefreshedInTimeStays) {
  StoreOptions options = testing::SmallOptions();
  options.lease_timeout = absl::Hours(1);
  TestSequence sequence(testing::SmallSpec(), options);
  sequence.Ingest(128);
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  ASSERT_TRUE(client.Refresh().ok());
  EXPECT_FALSE(sequence.store().ListLeases(kAllTenants).front().revoked);
}

TEST(Lease, AForksLeaseKeepsTheSharedTailToo) {
  TestSequence sequence;
  sequence.Ingest(128);
  sequence.Append(60);
  const auto fork = sequence.store().ForkSequence(kTenant, sequence.id(), 170, "session");
  ASSERT_TRUE(fork.ok()) << fork.status();
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(fork->sequence_id).ok());
  const LayerModel before = sequence.layers().front();
  sequence.Truncate(140);
  sequence.Append(60);
  ASSERT_TRUE(sequence.store().DropSequence(kTenant, fork->sequence_id).ok());
  sequence.Truncate(130);
  sequence.Append(60);
  EXPECT_EQ(client.Rows(before.group, 1, 170), before.Rows(0, 170));
}

// A pool so small that what is dropped is needed at once.
TEST(Lease, ADroppedSequencesBytesStayUntilDetachWhateverOthersWant) {
  CacheSpec spec = testing::SmallSpec();
  spec.capacity_bytes = size_t{2} << 20;
  TestSequence sequence(spec);
  sequence.Ingest(300);
  const uint64_t dropped = sequence.id();
  MappedClient client(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(dropped).ok());
  const std::vector<LayerModel> before = sequence.layers();
  const size_t used = UsedBytes(sequence);
  ASSERT_TRUE(sequence.store().DropSequence(kTenant, dropped).ok());
  EXPECT_TRUE(client.words().flags.load() & LeaseWords::kRevoked);
  EXPECT_EQ(UsedBytes(sequence), used);
  EXPECT_EQ(sequence.store().ListLeases(kAllTenants).front().bytes, used);

  const auto fill = [&] {  // returns how many sequences of one segment fit
    int count = 0;
    const LayerModel& model = before.front();
    const Floats keys = sequence.RandomKeys(model, 1);
    const Floats values = sequence.RandomValues(model, 1);
    for (absl::Status status; status.ok() && count < 100; ++count) {
      const auto id =
          sequence.store().CreateSequence(kTenant, sequence.cache_id(), {.session = "greedy"});
      const std::vector<LayerRows> rows = {
          {.layer = 1, .keys = keys.view(), .values = values.view()},
          {.layer = 3, .keys = keys.view(), .values = values.view()}};
      status = sequence.store().Append(kTenant, id->sequence_id, 0, rows).status();
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kResourceExhausted) << status;
    }
    sequence.store().DropSession("greedy");
    return count;
  };
  const int beside = fill();
  for (const LayerModel& model : before) {
    EXPECT_EQ(client.Rows(model.group, model.group.layers.front(), model.tokens),
              model.Rows(0, model.tokens));
  }
  EXPECT_TRUE(client.Detach().ok());
  EXPECT_EQ(UsedBytes(sequence), 0u);
  EXPECT_GT(fill(), beside);
}

TEST(Lease, TheEndOfASessionTellsItsClientAndFreesEverything) {
  TestSequence sequence;
  sequence.Ingest(300);
  auto client = std::make_unique<MappedClient>(sequence.store(), sequence.cache_id(), "client#1");
  ASSERT_TRUE(client->Attach(sequence.id()).ok());
  ASSERT_TRUE(sequence.store().OpenStaging(kTenant, "client#1", 1 << 20, 2).ok());
  EXPECT_EQ(sequence.store().Stats(kAllTenants).staging_bytes, size_t{2} << 20);
  EXPECT_EQ(sequence.store().Stats(kAllTenants).lease_count, 1u);
  ASSERT_TRUE(sequence.store().DropSequence(kTenant, sequence.id()).ok());
  EXPECT_EQ(sequence.store().Stats(kAllTenants).revoked_lease_count, 1u);
  EXPECT_GT(UsedBytes(sequence), 0u);
  const uint32_t wake = client->page().wake_word.load();
  sequence.store().DropSession("client#1");
  EXPECT_EQ(client->page().boot_word.load(), 0u);
  EXPECT_GT(client->page().wake_word.load(), wake);
  EXPECT_EQ(UsedBytes(sequence), 0u);
  EXPECT_EQ(sequence.store().Stats(kAllTenants).staging_bytes, 0u);
  EXPECT_TRUE(sequence.store().ListLeases(kAllTenants).empty());
  EXPECT_EQ(client->Detach().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(client->Attach(sequence.id()).code(), StatusCode::kNotFound);
}

TEST(Lease, TheStoresEndTellsClients) {
  auto sequence = std::make_unique<TestSequence>();
  sequence->Ingest(10);
  auto control = sequence->store().OpenLocalSession("tenant", "client#1", 5);
  ASSERT_TRUE(control.ok());
  const testing::ReadMapping mapped(std::move(control->control));
  const auto& page = *reinterpret_cast<const ControlPage*>(mapped.data());
  EXPECT_EQ(page.boot_word.load(), 5u);
  sequence.reset();
  EXPECT_EQ(page.boot_word.load(), 0u);
}

TEST(Lease, LimitsAndForeignLeasesAreRefused) {
  StoreOptions options = testing::SmallOptions();
  options.max_leases = 2;
  TestSequence sequence(testing::SmallSpec(), options);
  sequence.Ingest(10);
  Store& store = sequence.store();
  MappedClient client(store, sequence.cache_id(), "client#1");
  MappedClient other(store, sequence.cache_id(), "client#2");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  const auto code = [&](std::string_view session, const LeaseState& lease) {
    return store.Attach(kTenant, sequence.id(), session, lease).status().code();
  };
  EXPECT_EQ(code("client#2", client.lease()), StatusCode::kNotFound);
  EXPECT_EQ(code("stranger", {}), StatusCode::kFailedPrecondition);
  EXPECT_EQ(code("client#1", {.lease_id = client.lease().lease_id, .known_version = 9}),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(store.RefreshLease("client#2", client.lease()).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(store.Detach("client#2", client.lease().lease_id).code(), StatusCode::kNotFound);
  EXPECT_EQ(store.Attach("tenant-2", sequence.id(), "client#2", {}).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(store.OpenPool("tenant-2", "", sequence.cache_id()).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(store.HoldPool("tenant-2", "client#1", sequence.cache_id()).code(),
            StatusCode::kNotFound);
  EXPECT_EQ(store.HoldPool(kTenant, "stranger", sequence.cache_id()).code(),
            StatusCode::kFailedPrecondition);
  const auto another = store.CreateSequence(kTenant, sequence.cache_id(), {.session = "session"});
  EXPECT_EQ(store.Attach(kTenant, another->sequence_id, "client#1", client.lease()).status().code(),
            StatusCode::kInvalidArgument);

  const auto second = store.Attach(kTenant, sequence.id(), "client#1", {});
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(code("client#1", {}), StatusCode::kResourceExhausted);
  ASSERT_TRUE(client.Detach().ok());
  EXPECT_EQ(client.words().lease_id.load(), 0u);
  EXPECT_EQ(client.Detach().code(), StatusCode::kNotFound);
  const auto third = store.Attach(kTenant, sequence.id(), "client#1", {});
  ASSERT_TRUE(third.ok());
  EXPECT_NE(third->word_index, second->word_index);
  EXPECT_EQ(client.words(third->word_index).lease_id.load(), third->lease_id);
}

// Every number of the row at position p is p, so that a reader knows what must be there.
class NumberedSequence {
 public:
  NumberedSequence() : id_(sequence_.id()) {}
  TestSequence& base() { return sequence_; }
  uint64_t id() const { return id_; }

  absl::Status Append(uint32_t first, uint32_t tokens) {
    const Floats keys = Numbers(first, tokens, 32);
    const Floats values = Numbers(first, tokens, 40);
    const std::vector<LayerRows> rows = {
        {.layer = 1, .keys = keys.view(), .values = values.view()},
        {.layer = 3, .keys = keys.view(), .values = values.view()}};
    return sequence_.store().Append(kTenant, id_, first, rows).status();
  }

 private:
  static Floats Numbers(uint32_t first, uint32_t tokens, uint32_t dim) {
    Floats floats{.shape = {tokens, 2, dim}, .data = {}};
    for (uint32_t token = 0; token < tokens; ++token) {
      floats.data.insert(floats.data.end(), 2 * dim, static_cast<float>(first + token));
    }
    return floats;
  }

  TestSequence sequence_;
  const uint64_t id_;
};

TEST(Lease, AReaderOfTheWordsSeesEveryAnnouncedRow) {
  NumberedSequence sequence;
  ASSERT_TRUE(sequence.Append(0, 1).ok());
  MappedClient client(sequence.base().store(), sequence.base().cache_id(), "client#1");
  ASSERT_TRUE(client.Attach(sequence.id()).ok());
  const LayerGroup group = sequence.base().layers().front().group;
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (uint32_t first = 1; first < 1500; first += 7) {
      EXPECT_TRUE(sequence.Append(first, 7).ok());
    }
    done = true;
  });
  uint32_t reads = 0;
  for (bool last = false; !last;) {
    last = done.load();
    const uint32_t tokens = client.words().token_count.load(std::memory_order_acquire);
    if (client.words().version.load(std::memory_order_acquire) != client.lease().known_version) {
      ASSERT_TRUE(client.Refresh().ok());
      last = false;
      continue;
    }
    const std::vector<float> rows = client.Rows(group, 3, tokens);
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(rows[i], static_cast<float>(i / 72 % tokens)) << tokens;
    }
    ++reads;
  }
  writer.join();
  EXPECT_GT(reads, 0u);
}

TEST(Lease, AttachingDetachingAndEndingMeetWritersAtWork) {
  NumberedSequence sequence;
  ASSERT_TRUE(sequence.Append(0, 1).ok());
  Store& store = sequence.base().store();
  std::atomic<bool> dropping = false;
  std::atomic<bool> done = false;
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&, i] {
      for (int round = 0; !done.load() || round < 3; ++round) {
        MappedClient client(store, sequence.base().cache_id(),
                            "client#" + std::to_string(i) + "." + std::to_string(round));
        const absl::Status attached = client.Attach(sequence.id());
        if (!attached.ok()) {
          EXPECT_TRUE(dropping.load()) << attached;
          for (const LeaseInfo& lease : store.ListLeases(kAllTenants)) {
            EXPECT_NE(lease.session, client.session()) << "what nobody was told of is held";
          }
          return;
        }
        const absl::Status refreshed = client.Refresh();
        EXPECT_TRUE(refreshed.ok() || dropping.load()) << refreshed;
        EXPECT_TRUE(round % 2 == 0 || client.Detach().ok());
        store.DropSession(client.session());
        EXPECT_EQ(client.page().boot_word.load(), 0u);
      }
    });
  }
  for (uint32_t first = 1; first < 1000; first += 9) {
    EXPECT_TRUE(sequence.Append(first, 9).ok());
    if (first % 5 == 0) {
      EXPECT_TRUE(store.TruncateSequence(kTenant, sequence.id(), first + 9).ok());
    }
  }
  dropping = true;
  EXPECT_TRUE(store.DropSequence(kTenant, sequence.id()).ok());
  done = true;
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(store.ListLeases(kAllTenants).empty());
  EXPECT_EQ(UsedBytes(sequence.base()), 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
