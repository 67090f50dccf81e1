// Who may have how much: quotas, admission, limits of the machine; and what is left in one piece.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvstore/memory/free_map.h"
#include "kvstore/memory/pool.h"
#include "tests/kvstore/evict/pressure_fixture.h"

namespace pqcached::kvstore {
namespace {

using ::testing::AllOf;
using testing::ContentOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kSegmentBytes;
using testing::kTenant;
using testing::PoolOf;
using testing::Pq;
using testing::PressureOptions;
using testing::PressureStore;
using testing::Prompt;
using ::testing::SizeIs;
using testing::SmallOptions;

// ---- FreeMap

// What the allocator itself would say, extent by extent from the longest down.
bool Grants(RunAllocator runs, const std::vector<size_t>& sizes_bytes) {
  std::vector<size_t> sizes = sizes_bytes;
  std::sort(sizes.rbegin(), sizes.rend());
  return std::all_of(sizes.begin(), sizes.end(), [&](size_t size) {
    return runs.Allocate(static_cast<uint32_t>(UnitsFor(size))).has_value();
  });
}

TEST(FreeMap, AgreesWithTheAllocatorAboutWhatWouldFit) {
  for (const uint32_t unit_count : {1u, 3u, 64u, 100u, 255u}) {
    std::mt19937 random(unit_count);
    RunAllocator runs(unit_count);
    std::vector<UnitRange> held;
    int fitting = 0;
    for (int step = 0; step < 2000; ++step) {
      const auto count = static_cast<uint32_t>(1 + random() % 8);
      if (const auto unit = random() % 3 > 0 ? runs.Allocate(count) : std::nullopt; unit) {
        held.push_back({.begin = *unit, .count = count});
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        runs.Free(held.back());
        held.pop_back();
      }
      FreeMap free(runs, unit_count * kMinExtentBytes);
      RunAllocator freed = runs;
      for (size_t i = 0; i < held.size(); i += 1 + random() % 3) {
        freed.Free(held[i]);
        free.Free(held[i]);
      }
      std::vector<size_t> sizes(1 + random() % 6);
      for (size_t& size : sizes) size = 1 + random() % (8 * kMinExtentBytes);
      const ExtentDemand demand(sizes);
      ASSERT_EQ(free.Fits(demand), Grants(freed, sizes));
      ASSERT_EQ(free.Fits(demand), free.ShortfallBytes(demand) == 0);
      ASSERT_EQ(free.used_bytes(), freed.used_units() * kMinExtentBytes);
      ASSERT_EQ(free.largest_free_bytes(), freed.longest_run() * kMinExtentBytes);
      fitting += free.Fits(demand) ? 1 : 0;
    }
    EXPECT_GT(fitting, 0);
  }
}

// A plan may name memory that was allocated after the copy was made.
TEST(FreeMap, IsNotChangedByFreeUnits) {
  RunAllocator runs(10);
  ASSERT_EQ(runs.Allocate(2), 8u);
  FreeMap free(runs, 10 * kMinExtentBytes);
  free.Free({.begin = 2, .count = 3});
  free.Free({.begin = 7, .count = 2});
  EXPECT_EQ(free.used_bytes(), 2 * kMinExtentBytes);
  free.Free({.begin = 8, .count = 2});
  EXPECT_EQ(free.used_bytes(), 0u);
}

TEST(FreeMap, CountsTheLimitBesideTheSpace) {
  RunAllocator runs(10);
  ASSERT_TRUE(runs.Allocate(2).has_value());
  const FreeMap free(runs, 5 * kMinExtentBytes);
  const std::vector<size_t> three(3, kMinExtentBytes);
  const std::vector<size_t> four(4, kMinExtentBytes);
  EXPECT_TRUE(free.Fits(ExtentDemand(three)));
  EXPECT_EQ(free.ShortfallBytes(ExtentDemand(four)), kMinExtentBytes);
}

TEST(FreeMap, DemandBeyondAllNumbersNeverFits) {
  ExtentDemand demand;
  demand.Add(size_t{1} << 40, ~uint64_t{0});
  EXPECT_EQ(demand.bytes(), SIZE_MAX);
  EXPECT_FALSE(FreeMap(RunAllocator(8), SIZE_MAX).Fits(demand));
}

// ---- Fragmentation

// Sizes as a cache asks for them: rows of prefill and tail segments, codes, codebooks. They come and go
// in any order, which is the worst that can happen: the sequences of a cache go whole.
//
// The most that was free at a refusal is the extreme of some thousand refusals, and differs by 0.1
// between seeds. The averages do not, so they have the narrow bounds.
TEST(Fragmentation, IsBoundedAndFreeingEverythingMergesToOnePiece) {
  constexpr size_t kCapacity = size_t{1024} * kMinExtentBytes;
  constexpr size_t kSizes[] = {1,       40'000,  65'536,  65'537,   200'000,
                               262'144, 590'000, 900'000, 1'048'576};
  struct Held {
    std::vector<Extent> extents;
    size_t asked_bytes;
  };
  // Shares of the pool when a request was refused that all of it would have fit.
  double most_free = 0;
  double sum_free = 0;
  double sum_asked = 0;
  int refused = 0;
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    auto pool = *Pool::Create({.capacity_bytes = kCapacity});
    std::mt19937 random(seed);
    std::vector<Held> held;
    size_t asked_bytes = 0;
    for (int step = 0; step < 20'000; ++step) {
      if (random() % 2 == 0) {
        const size_t count = 1 + random() % 4;
        const size_t size = kSizes[random() % std::size(kSizes)];
        const std::vector<size_t> sizes(count, size);
        auto extents = pool->Allocate(sizes);
        const size_t free_bytes = pool->usage().free_bytes;
        if (extents.ok()) {
          asked_bytes += count * size;
          held.push_back({.extents = *std::move(extents), .asked_bytes = count * size});
        } else if (ExtentDemand(sizes).bytes() <= free_bytes) {
          ++refused;
          const double free = static_cast<double>(free_bytes) / static_cast<double>(kCapacity);
          most_free = std::max(most_free, free);
          sum_free += free;
          sum_asked += static_cast<double>(asked_bytes) / static_cast<double>(kCapacity);
        }
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        asked_bytes -= held.back().asked_bytes;
        held.pop_back();
      }
      const PoolUsage usage = pool->usage();
      ASSERT_EQ(usage.used_bytes + usage.free_bytes, kCapacity);
    }
    held.clear();
    EXPECT_EQ(pool->usage().largest_free_bytes, kCapacity);
  }
  ASSERT_GT(refused, 500);
  RecordProperty("most_free", std::to_string(most_free));
  RecordProperty("mean_free", std::to_string(sum_free / refused));
  RecordProperty("mean_asked", std::to_string(sum_asked / refused));
  // tests/FIGURES.md quotes these.
  EXPECT_LT(most_free, 0.35);
  EXPECT_LT(sum_free / refused, 0.11);
  EXPECT_GT(sum_asked / refused, 0.80);
}

// ---- Quotas

StoreOptions QuotaOptions() {
  StoreOptions options = SmallOptions();
  options.max_pool_bytes = 64 * kSegmentBytes;
  options.tenant_quotas.by_tenant["small"] = {.guaranteed_bytes = 0,
                                              .max_bytes = 8 * kSegmentBytes};
  options.tenant_quotas.by_tenant["sure"] = {.guaranteed_bytes = 16 * kSegmentBytes};
  return options;
}

absl::Status Open(Store& store, const std::string& tenant, const std::string& name,
                  size_t segments) {
  CacheSpec spec = PoolOf(segments);
  spec.name = name;
  return store.OpenCache(tenant, spec).status();
}

TEST(TenantQuota, LimitsTheCachesOfATenantTogether) {
  auto store = *Store::Create(QuotaOptions());
  EXPECT_TRUE(Open(*store, "small", "a", 5).ok());
  const absl::Status refused = Open(*store, "small", "b", 4);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("quota of tenant small"),
                    HasSubstr(std::to_string(kSegmentBytes) + " bytes short")));
  EXPECT_TRUE(Open(*store, "small", "b", 3).ok());
  EXPECT_TRUE(Open(*store, "small", "b", 3).ok());  // it is open
}

TEST(TenantQuota, NobodyElseTakesWhatATenantIsGuaranteed) {
  auto store = *Store::Create(QuotaOptions());
  EXPECT_TRUE(Open(*store, "greedy", "a", 40).ok());
  const absl::Status refused = Open(*store, "greedy", "b", 9);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("guaranteed"));
  EXPECT_TRUE(Open(*store, "sure", "a", 10).ok());
  EXPECT_TRUE(Open(*store, "greedy", "b", 8).ok());
  EXPECT_FALSE(Open(*store, "greedy", "c", 1).ok());
  EXPECT_TRUE(Open(*store, "sure", "b", 6).ok());
  EXPECT_FALSE(Open(*store, "sure", "c", 1).ok());  // the machine is full
}

TEST(CacheQuota, IsTheLimitOfItsPool) {
  CacheSpec spec = PoolOf(8);
  spec.quota_bytes = 3 * kSegmentBytes;
  PressureStore shared(1);
  spec.name = "with quota";
  const auto cache = shared.store->OpenCache(kTenant, spec);
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_EQ(cache->capacity_bytes, 8 * kSegmentBytes);
  EXPECT_EQ(cache->limit_bytes, 3 * kSegmentBytes);
  shared.cache_id = cache->cache_id;
  shared.Fill(Prompt(1, 256));
  const CreatedSequence other = shared.Create();
  const absl::Status refused = testing::AppendContent(*shared.store, other.sequence_id,
                                                      shared.group, 0, ContentOf(Prompt(2, 129)))
                                   .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("quota_bytes is"));
  spec.name = "other";
  spec.quota_bytes = spec.capacity_bytes + 1;
  EXPECT_EQ(shared.store->OpenCache(kTenant, spec).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// ---- Admission

// Takes what was admitted, for a prompt whose tokens are announced; returns the first error.
absl::Status Take(testing::SharingStore& shared, uint64_t prefill, uint64_t output,
                  const IndexDescriptor& index) {
  const CreatedSequence made = shared.Create(Prompt(1, prefill));
  Store& store = *shared.store;
  const testing::Content content = ContentOf(Prompt(1, prefill + output));
  const auto [id, group] = std::pair(made.sequence_id, shared.group);
  if (prefill > 0) {
    auto count = testing::IngestContent(store, id, group, 0, std::span(content).first(prefill));
    if (!count.ok()) return count.status();
  }
  if (prefill > 0 && index.kind == IndexKind::kPq) {
    absl::Status status = store.BuildIndex(kTenant, id, {.index = index, .iterations = 1}, {});
    if (!status.ok()) return status;
  }
  if (output == 0) return absl::OkStatus();
  return testing::AppendContent(store, id, group, prefill, std::span(content).subspan(prefill))
      .status();
}

// The pool is exactly as large as what was admitted. Without a build nothing closes the prefill, whose
// last segment then takes the first tokens of the output.
void ExpectAdmissionIsExact(const StoreOptions& options, uint64_t prefill, uint64_t output,
                            const IndexDescriptor& index) {
  SCOPED_TRACE(absl::StrCat(options.segment_tokens, ": ", prefill, " + ", output));
  CacheSpec spec = PoolOf(512);
  spec.default_index = index;
  testing::SharingStore large(spec, options);
  const AdmitSpec asked{.prefill_tokens = prefill, .output_tokens = output};
  const auto fits = large.store->Admit(kTenant, large.cache_id, asked);
  ASSERT_TRUE(fits.ok()) << fits.status();
  EXPECT_EQ(fits->verdict, Verdict::kFitsNow);
  spec.capacity_bytes = fits->needed_bytes;
  testing::SharingStore exact(spec, options);
  EXPECT_EQ(exact.store->Admit(kTenant, exact.cache_id, asked)->verdict, Verdict::kFitsNow);
  const absl::Status taken = Take(exact, prefill, output, index);
  EXPECT_TRUE(taken.ok()) << taken;
  if (index.kind == IndexKind::kPq) {
    EXPECT_EQ(exact.used_bytes(), fits->needed_bytes);
  }
  spec.capacity_bytes = fits->needed_bytes - kMinExtentBytes;
  testing::SharingStore small(spec, options);
  const auto never = small.store->Admit(kTenant, small.cache_id, asked);
  EXPECT_EQ(never->verdict, Verdict::kExceedsCapacity);
  EXPECT_EQ(never->shortfall_bytes, kMinExtentBytes);
  EXPECT_EQ(never->limit_bytes, spec.capacity_bytes);
}

TEST(Admit, AsksForWhatAllocationTakes) {
  StoreOptions long_segments = testing::SmallOptions();
  long_segments.segment_tokens = 1024;
  for (const IndexDescriptor& index : {IndexDescriptor{}, Pq(2, 4)}) {
    for (const uint64_t prefill : {1u, 127u, 128u, 129u, 300u, 700u}) {
      for (const uint64_t output : {0u, 1u, 128u, 129u}) {
        ExpectAdmissionIsExact(testing::SmallOptions(), prefill, output, index);
      }
    }
    for (const uint64_t prefill : {300u, 1023u, 1300u, 1500u}) {
      ExpectAdmissionIsExact(long_segments, prefill, 128, index);
    }
  }
}

TEST(Admit, TellsWhatWouldHaveToGo) {
  StoreOptions options = PressureOptions();
  PressureStore shared(8, options);
  const auto admit = [&](uint64_t tokens) {
    const auto admission =
        shared.store->Admit(kTenant, shared.cache_id, {.prefill_tokens = tokens});
    EXPECT_TRUE(admission.ok()) << admission.status();
    return *admission;
  };
  shared.Serve(Prompt(1, 513));
  const uint64_t used = shared.Fill(Prompt(2, 100));
  EXPECT_EQ(admit(0).verdict, Verdict::kFitsNow);
  EXPECT_EQ(admit(3 * 128).verdict, Verdict::kFitsNow);
  const Admission after = admit(5 * 128);
  EXPECT_EQ(after.verdict, Verdict::kFitsAfterEviction);
  EXPECT_EQ(after.bytes_to_evict, 2 * kSegmentBytes);
  const Admission later = admit(8 * 128);
  EXPECT_EQ(later.verdict, Verdict::kRetryable);
  EXPECT_EQ(later.shortfall_bytes, kSegmentBytes);
  const Admission never = admit(9 * 128);
  EXPECT_EQ(never.verdict, Verdict::kExceedsCapacity);
  EXPECT_EQ(never.shortfall_bytes, kSegmentBytes);
  EXPECT_EQ(never.limit_bytes, 8 * kSegmentBytes);
  // It was asked, not done.
  EXPECT_EQ(*shared.store->MatchPrefix(kTenant, shared.cache_id, Prompt(1, 513), ""), 512u);
  EXPECT_TRUE(shared.Read(used).ok());
  shared.Fill(Prompt(3, 5 * 128));  // as promised
}

TEST(Admit, NamesWhatIsWrong) {
  PressureStore shared(8);
  Store& store = *shared.store;
  EXPECT_EQ(store.Admit(kTenant, 99, {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store.Admit("other", shared.cache_id, {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store.Admit(kTenant, shared.cache_id, {.index = Pq(3, 4)}).status().code(),
            absl::StatusCode::kInvalidArgument);
  for (const AdmitSpec& spec : {AdmitSpec{.prefill_tokens = ~uint64_t{0}},
                                AdmitSpec{.prefill_tokens = kMaxSequenceTokens, .output_tokens = 1},
                                AdmitSpec{.output_tokens = ~uint64_t{0}}}) {
    EXPECT_EQ(store.Admit(kTenant, shared.cache_id, spec).status().code(),
              absl::StatusCode::kOutOfRange);
  }
  const auto most = store.Admit(kTenant, shared.cache_id, {.prefill_tokens = kMaxSequenceTokens});
  EXPECT_EQ(most->verdict, Verdict::kExceedsCapacity);
}

// ---- Limits of the machine

// A store that sees the control group of a directory, as if of a machine.
class LimitedStore {
 public:
  explicit LimitedStore(size_t segments, size_t idle_reserve_bytes = size_t{1} << 30) {
    std::string pattern = (std::filesystem::temp_directory_path() / "limited_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    std::filesystem::create_directories(root_ / "proc/self");
    std::filesystem::create_directories(root_ / "sys/fs/cgroup");
    Write("proc/self/cgroup", "0::/\n");
    Write("sys/fs/cgroup/cgroup.controllers", "memory\n");
    Set(size_t{1} << 40, 0);
    StoreOptions options = PressureOptions();
    options.memory_root = root_.string();
    options.idle_reserve_bytes = idle_reserve_bytes;
    shared_ = std::make_unique<PressureStore>(segments, options);
  }
  ~LimitedStore() { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::ofstream(root_ / path) << text;
  }
  void Set(size_t high_bytes, size_t used_bytes) {
    Write("sys/fs/cgroup/memory.high", std::to_string(high_bytes) + "\n");
    Write("sys/fs/cgroup/memory.current", std::to_string(used_bytes) + "\n");
  }
  void Follow() { shared_->store->ApplyMemoryLimits(); }
  PressureStore& shared() { return *shared_; }
  size_t present_bytes() { return present_bytes(shared_->cache_id); }
  size_t present_bytes(uint64_t cache_id) {
    const auto pool = shared_->store->OpenPool(kTenant, "", cache_id);
    struct stat status = {};
    EXPECT_EQ(fstat(pool->descriptor.get(), &status), 0);
    return static_cast<size_t>(status.st_blocks) * 512;
  }

 private:
  std::filesystem::path root_;
  std::unique_ptr<PressureStore> shared_;
};

TEST(MemoryLimit, OpenCacheHonoursTheGroup) {
  LimitedStore limited(8);
  limited.Set(4 * kSegmentBytes, kSegmentBytes);
  CacheSpec spec = PoolOf(4);
  spec.name = "second";
  const absl::Status refused = limited.shared().store->OpenCache(kTenant, spec).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("bytes short"));
}

TEST(MemoryLimit, ALoweredLimitEvictsWhatIsRetainedAndGivesItsPagesBack) {
  LimitedStore limited(8);
  PressureStore& shared = limited.shared();
  shared.Serve(Prompt(1, 513));
  const uint64_t used = shared.Fill(Prompt(2, 2 * 128));
  const size_t before = limited.present_bytes();
  ASSERT_GE(before, 8 * kSegmentBytes);
  limited.Follow();  // nothing is short
  EXPECT_EQ(limited.present_bytes(), before);
  EXPECT_EQ(shared.Retained().front().token_count, 512u);

  const size_t excess = before - 3 * kSegmentBytes;
  limited.Set(size_t{1} << 30, (size_t{1} << 30) + excess);
  limited.Follow();
  EXPECT_LE(limited.present_bytes(), before - excess);
  testing::ExpectContent(*shared.store, used, shared.group, ContentOf(Prompt(2, 2 * 128)));

  // The pool may grow no further than what is there.
  const CreatedSequence other = shared.Create();
  const auto grow = [&] {
    return testing::AppendContent(*shared.store, other.sequence_id, shared.group, 0,
                                  ContentOf(Prompt(3, 5 * 128)))
        .status();
  };
  const absl::Status refused = grow();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("memory is short"));

  limited.Set(size_t{1} << 40, 0);
  limited.Follow();
  EXPECT_TRUE(grow().ok());
  testing::ExpectContent(*shared.store, used, shared.group, ContentOf(Prompt(2, 2 * 128)));
}

// The bound of store.h, as the kernel counts the pages.
TEST(MemoryLimit, MemoryOfDroppedSequencesReturnsToTheMachine) {
  constexpr size_t kReserveBytes = size_t{4} << 20;
  LimitedStore limited(200, kReserveBytes);
  PressureStore& shared = limited.shared();
  EXPECT_GE(limited.present_bytes(), kReserveBytes / 2);
  const uint64_t kept = shared.Fill(Prompt(1, 2 * 128));
  const uint64_t dropped = shared.Fill(Prompt(2, 150 * 128));
  ASSERT_GE(limited.present_bytes(), 152 * kSegmentBytes);
  ASSERT_TRUE(shared.store->EvictSequence(kTenant, dropped).ok());
  const size_t used_bytes = shared.used_bytes();
  EXPECT_LE(used_bytes, 2 * kSegmentBytes);
  const size_t allowed_bytes = used_bytes + used_bytes / 5 + kReserveBytes;
  // More than three calls while the thread that touches the reserve is still at work.
  for (int call = 0; call < 10'000 && limited.present_bytes() > allowed_bytes; ++call) {
    limited.Follow();
  }
  EXPECT_LE(limited.present_bytes(), allowed_bytes);
  testing::ExpectContent(*shared.store, kept, shared.group, ContentOf(Prompt(1, 2 * 128)));
}

// The same bound over several caches, of which most are empty.
TEST(MemoryLimit, IdleCachesKeepOneReserveTogether) {
  constexpr size_t kReserveBytes = size_t{16} << 20;
  LimitedStore limited(200, kReserveBytes);
  PressureStore& shared = limited.shared();
  std::vector<uint64_t> empty;
  for (const char* const name : {"second", "third", "fourth", "fifth"}) {
    CacheSpec spec = PoolOf(200);
    spec.name = name;
    const auto cache = shared.store->OpenCache(kTenant, spec);
    ASSERT_TRUE(cache.ok()) << cache.status();
    empty.push_back(cache->cache_id);
  }
  const auto empty_bytes = [&] {
    size_t bytes = 0;
    for (const uint64_t cache : empty) bytes += limited.present_bytes(cache);
    return bytes;
  };
  EXPECT_GE(empty_bytes(), kReserveBytes / 4);
  shared.Fill(Prompt(1, 2 * 128));
  const size_t used_bytes = shared.used_bytes();
  const size_t allowed_bytes = used_bytes + used_bytes / 5 + kReserveBytes;
  // More than three calls while the threads that touch the reserve are still at work.
  for (int call = 0; call < 10'000; ++call) {
    limited.Follow();
    if (limited.present_bytes() <= allowed_bytes && empty_bytes() == 0) break;
  }
  EXPECT_LE(limited.present_bytes(), allowed_bytes);
  EXPECT_EQ(empty_bytes(), 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
