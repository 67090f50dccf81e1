// Plug-ins in a store: an index of a plug-in is built, searched, recovered, left out, switched off.
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

#include "kvstore/plugins/plugin_index.h"
#include "kvstore/plugins/plugin_library.h"
#include "kvstore/read/indexes/index_types.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::AppendContent;
using testing::Content;
using testing::ExpectContent;
using testing::Floats;
using ::testing::HasSubstr;
using testing::IngestContent;
using testing::kTenant;
using testing::MemoryKeeper;
using testing::NumberedContent;
using testing::RandomFloats;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;

const std::string kPlugins = PQCACHED_TEST_PLUGINS;

class Plugins : public ::testing::Test {
 protected:
  Plugins() { Load("copy"); }
  ~Plugins() override {
    world_.reset();
    SetPluginTypes({});
  }

  void Load(const std::string& folder) {
    world_.reset();
    const auto loaded = PluginLibraries::Load(kPlugins + "/" + folder, &keeper_);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    Start();
  }
  void Start() {
    StoreOptions options = SmallOptions();
    options.keeper = &keeper_;
    world_.reset();
    world_.emplace(SmallSpec(), options);
  }
  Store& store() { return *world_->store; }
  const LayerGroup& group() { return world_->group; }

  static IndexDescriptor Copy(uint64_t fault = 0, uint64_t number = 7) {
    IndexDescriptor index;
    const Refusal refusal = MakeIndex("copy",
                                      {{{.name = "fault", .value_name = {}, .number = fault},
                                        {.name = "#1", .value_name = {}, .number = number}}},
                                      "index", &index);
    EXPECT_TRUE(refusal.ok()) << refusal.text;
    return index;
  }

  uint64_t Make(const Content& content, std::optional<LiveIndex> live_index = {}) {
    const auto created = store().CreateSequence(kTenant, world_->cache_id,
                                                {.session = "session", .live_index = live_index});
    EXPECT_TRUE(created.ok()) << created.status();
    const auto count = IngestContent(store(), created->sequence_id, group(), 0, content);
    EXPECT_TRUE(count.ok()) << count.status();
    return created->sequence_id;
  }
  void Append(uint64_t id, Content& content, const Content& added) {
    const auto count = AppendContent(store(), id, group(), content.size(), added);
    ASSERT_TRUE(count.ok()) << count.status();
    content.insert(content.end(), added.begin(), added.end());
  }
  absl::Status Build(uint64_t id, const IndexDescriptor& index) {
    return store().BuildIndex(kTenant, id, {.index = index, .iterations = 2}, {});
  }
  absl::StatusOr<Selected> TopK(uint64_t id, size_t count, const IndexDescriptor& index) {
    std::mt19937_64 random(5);
    const Floats query = RandomFloats(random, {1, group().query_heads, group().key_dim});
    return store().TopK(kTenant, id,
                        {.layer = 1, .query_position = count - 1, .queries = query.view()},
                        {.index = index, .budget_ratio = 0.3});
  }
  void ExpectExact(uint64_t id, size_t count, const IndexDescriptor& index) {
    const auto exact = TopK(id, count, IndexDescriptor{});
    const auto by_index = TopK(id, count, index);
    ASSERT_TRUE(exact.ok() && by_index.ok()) << exact.status() << by_index.status();
    EXPECT_GT(exact->positions.size(), 50u);
    EXPECT_EQ(by_index->positions, exact->positions);
  }

  MemoryKeeper keeper_;
  std::optional<SharingStore> world_;
};

TEST_F(Plugins, AnIndexIsListedNamedAndChecked) {
  const IndexType* const type = FindIndexType("copy");
  ASSERT_NE(type, nullptr);
  EXPECT_EQ(IndexTypes().size(), 5u);
  EXPECT_EQ(NameOf(Copy(0, 9)), "copy fault=0 number=9");
  EXPECT_TRUE(IsBuilt(Copy()));
  EXPECT_EQ(type->ValueOf(DefaultIndex(*type), 1), 7u);
  const auto refusal = [](const IndexDescriptor& index) { return CheckIndex(index, 64, "i"); };
  EXPECT_TRUE(refusal(Copy()).ok());
  EXPECT_EQ(refusal(Copy(0, 13)).text, "number must not be 13");
  EXPECT_EQ(refusal(Copy(5)).text, "the plug-in wants codes of 1025 bytes, must lie in [1, 1024]");
  EXPECT_EQ(refusal(Copy(6)).text, "the plug-in wants codes of 0 bytes, must lie in [1, 1024]");
  EXPECT_THAT(refusal(Copy(7)).text, HasSubstr("4194305 bytes, must be at most 4194304"));
  IndexDescriptor more = Copy();
  SetPluginValue(&more, 2, 1);
  EXPECT_EQ(refusal(more).text, "it has no parameter #2");
  IndexDescriptor zero = Copy();
  SetPluginValue(&zero, 1, 0);
  EXPECT_EQ(refusal(zero).text, "0, must lie in [1, 65535]");
}

TEST_F(Plugins, SelectsByTheLogitsOfThePluginInSegmentsAndAppendedRows) {
  Content content = NumberedContent(1, 700);
  const uint64_t id = Make(content);
  ASSERT_TRUE(Build(id, Copy()).ok());
  ExpectExact(id, content.size(), Copy());
  Append(id, content, NumberedContent(2, 90));
  ExpectExact(id, content.size(), Copy());
  const auto other = TopK(id, content.size(), Copy(0, 8));
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("copy fault=0 number=8"));
}

TEST_F(Plugins, LogitsThatAreNoNumbersSelectTheFirstTokens) {
  const Content content = NumberedContent(1, 300);
  const uint64_t id = Make(content);
  ASSERT_TRUE(Build(id, Copy(4)).ok());
  const auto selected = TopK(id, content.size(), Copy(4));
  ASSERT_TRUE(selected.ok()) << selected.status();
  const size_t k = selected->positions.size() / group().kv_heads;
  for (size_t i = 0; i < k; ++i) EXPECT_EQ(selected->positions[i], i);
  const Floats query{.shape = {1, group().query_heads, group().key_dim},
                     .data = std::vector<float>(group().query_heads * group().key_dim, 1.0f)};
  const auto scores = store().Score(
      kTenant, id, {.layer = 1, .query_position = 299, .queries = query.view()}, Copy(4), {0, 300});
  ASSERT_TRUE(scores.ok()) << scores.status();
  for (const float logit : scores->logits) ASSERT_TRUE(std::isfinite(logit)) << logit;
}

TEST_F(Plugins, ALiveIndexFollowsTheRows) {
  Content content = NumberedContent(1, 500);
  const uint64_t id = Make(content, LiveIndex{.index = Copy()});
  Append(id, content, NumberedContent(2, 200));
  store().WaitIdle(SteadyTime::InfiniteFuture());
  ExpectExact(id, content.size(), Copy());
  Load("copy");
  store().WaitIdle(SteadyTime::InfiniteFuture());
  ExpectExact(id, content.size(), Copy());
}

TEST_F(Plugins, AnIndexIsRecovered) {
  Content content = NumberedContent(1, 600);
  const uint64_t id = Make(content);
  ASSERT_TRUE(Build(id, Copy()).ok());
  Append(id, content, NumberedContent(2, 30));
  for (int restart = 0; restart < 2; ++restart) {
    Load("copy");
    EXPECT_EQ(store().Recovery().dropped_records, 0u);
    ExpectContent(store(), id, group(), content);
    ExpectExact(id, content.size(), Copy());
  }
}

TEST_F(Plugins, WithoutItsPluginRowsAreRecoveredAndTheIndexIsNamed) {
  Content content = NumberedContent(1, 600);
  const uint64_t id = Make(content);
  ASSERT_TRUE(Build(id, Copy()).ok());
  ASSERT_TRUE(Build(id, testing::Pq(2, 4)).ok());
  Content live = NumberedContent(3, 400);
  const uint64_t live_id = Make(live, LiveIndex{.index = Copy()});
  store().WaitIdle(SteadyTime::InfiniteFuture());
  const IndexDescriptor copy = Copy();
  const auto pq = TopK(id, content.size(), testing::Pq(2, 4));
  ASSERT_TRUE(pq.ok());
  for (int restart = 0; restart < 2; ++restart) {
    world_.reset();
    SetPluginTypes({});
    Start();
    if (restart == 0) {
      ASSERT_FALSE(store().Recovery().dropped.empty());
      EXPECT_THAT(store().Recovery().dropped[0],
                  HasSubstr("index copy is left out, because its plug-in is not loaded"));
    }
    EXPECT_EQ(store().Recovery().sequences, 2u);
    ExpectContent(store(), id, group(), content);
    ExpectContent(store(), live_id, group(), live);
    EXPECT_EQ(TopK(id, content.size(), testing::Pq(2, 4))->positions, pq->positions);
    const absl::Status refused = TopK(id, content.size(), copy).status();
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("\"copy\", a plug-in that is not loaded"));
    EXPECT_THAT(std::string(Build(id, copy).message()), HasSubstr("\"copy\""));
  }
  Append(id, content, NumberedContent(4, 100));
  Load("copy");
  ASSERT_TRUE(Build(id, Copy()).ok());
  ExpectExact(id, content.size(), Copy());
}

TEST_F(Plugins, WhereItsPluginIsAnotherOneRowsAreRecoveredAndTheIndexIsNamed) {
  const Content content = NumberedContent(1, 600);
  const uint64_t id = Make(content);
  ASSERT_TRUE(Build(id, Copy(0, 50)).ok());
  const uint64_t live_id = Make(content, LiveIndex{.index = Copy(0, 50)});
  store().WaitIdle(SteadyTime::InfiniteFuture());
  Load("fewer_numbers");
  EXPECT_EQ(store().Recovery().sequences, 2u);
  ASSERT_FALSE(store().Recovery().dropped.empty());
  EXPECT_THAT(store().Recovery().dropped[0],
              HasSubstr("index copy fault=0 number=50 is left out, because its plug-in has no such "
                        "index any more"));
  for (const uint64_t each : {id, live_id}) {
    ExpectContent(store(), each, group(), content);
    ASSERT_TRUE(Build(each, Copy()).ok());
    ExpectExact(each, content.size(), Copy());
  }
}

TEST_F(Plugins, APluginThatThrowsHasCrashed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the store has threads
  const uint64_t id = Make(NumberedContent(1, 600));
  EXPECT_DEATH(static_cast<void>(Build(id, Copy(8))), "");
}

TEST_F(Plugins, ACacheOutlivesThePluginOfItsDefaultIndex) {
  CacheSpec spec = SmallSpec("other");
  spec.default_index = Copy();
  const auto opened = store().OpenCache(kTenant, spec);
  ASSERT_TRUE(opened.ok()) << opened.status();
  world_.reset();
  SetPluginTypes({});
  Start();
  EXPECT_EQ(store().Recovery().caches, 2u);
  EXPECT_EQ(store().Recovery().dropped_records, 0u);
}

TEST_F(Plugins, SwitchedOffItIsSearchedExactlyAndNotBuilt) {
  Content content = NumberedContent(1, 600);
  const uint64_t id = Make(content);
  ASSERT_TRUE(Build(id, Copy(4)).ok());  // selects badly, as long as it is called
  world_.reset();
  auto crashes = PluginCrashes::Open(&keeper_);
  ASSERT_TRUE(crashes.ok());
  for (uint32_t crash = 1; crash <= kMaxPluginCrashes; ++crash) {
    const auto before = PluginLibraries::Load(kPlugins + "/copy", &keeper_);
    ASSERT_TRUE(before.ok());
    EXPECT_FALSE(before->reports()[0].is_off);
    EXPECT_EQ(before->reports()[0].crashes, crash - 1);
    // A search that does not end.
    const auto file = PluginFileNumber(kPlugins + "/copy/copy.so");
    ASSERT_TRUE(file.ok());
    (*crashes)->Find("copy", *file, SteadyTime::Now()).calls->fetch_add(1);
  }
  const auto off = PluginLibraries::Load(kPlugins + "/copy", &keeper_);
  ASSERT_TRUE(off.ok());
  EXPECT_TRUE(off->reports()[0].is_off && off->reports()[0].has_crashed);
  EXPECT_THAT(std::string(FindIndexType("copy")->info().text),
              HasSubstr("switched off after 3 crashes within a minute"));
  Start();
  EXPECT_THAT(store().Recovery().dropped[0],
              HasSubstr("index copy fault=4 number=7 is left out, because its plug-in is switched "
                        "off"));
  ExpectContent(store(), id, group(), content);
  ExpectExact(id, content.size(), Copy(4));
  const absl::Status refused = Build(id, Copy());
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("copy is switched off after 3 crashes"));
  // It stays off, however late the next start is.
  EXPECT_TRUE(PluginLibraries::Load(kPlugins + "/copy", &keeper_)->reports()[0].is_off);
}

TEST(PluginCrashes, ThreeInAMinuteSwitchOffUntilTheFileIsAnotherOne) {
  MemoryKeeper keeper;
  SteadyTime now = SteadyTime::Now();
  const auto crash = [&](uint64_t file, absl::Duration later) {
    auto opened = PluginCrashes::Open(&keeper);
    EXPECT_TRUE(opened.ok());
    now += later;
    const PluginCrashes::Found found = (*opened)->Find("lsh", file, now);
    EXPECT_EQ((*opened)->Find("other", 1, now).crashes, 0u);
    found.calls->fetch_add(1);
    return found;
  };
  EXPECT_FALSE(crash(1, absl::ZeroDuration()).has_crashed);
  EXPECT_EQ(crash(1, absl::Seconds(31)).crashes, 1u);
  EXPECT_EQ(crash(1, absl::Seconds(31)).crashes, 2u);
  EXPECT_EQ(crash(1, absl::Seconds(31)).crashes, 2u);  // the first is older than a minute
  const PluginCrashes::Found third = crash(1, absl::Seconds(1));
  EXPECT_TRUE(third.is_off && third.crashes == 3 && third.has_crashed);
  EXPECT_TRUE(crash(1, absl::Hours(9)).is_off);
  const PluginCrashes::Found replaced = crash(2, absl::Seconds(1));
  EXPECT_FALSE(replaced.is_off || replaced.has_crashed);
}

TEST_F(Plugins, AnIndexIsTrainedOnQueries) {
  const IndexDescriptor index = Copy(0, 99);
  const Content content = NumberedContent(1, 300);
  const uint64_t id = Make(content);
  const absl::Status refused = Build(id, index);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("copy fault=0 number=99 needs query samples"));
  std::mt19937_64 random(8);
  const Floats samples = RandomFloats(random, {3, group().query_heads, group().key_dim});
  for (const uint32_t layer : world_->group.layers) {
    auto ingest = store().BeginIngest(kTenant, id);
    ASSERT_TRUE(ingest.ok());
    ASSERT_TRUE(
        (*ingest)
            ->AddSamples({.layer = layer, .positions = {0, 5, 299}, .queries = samples.view()})
            .ok());
    ASSERT_TRUE((*ingest)->Commit().ok());
  }
  ASSERT_TRUE(Build(id, index).ok());
  // The plug-in adds the sum of the queries' first numbers to its logits.
  const Floats query = RandomFloats(random, {1, group().query_heads, group().key_dim});
  const auto scores = [&](const IndexDescriptor& of) {
    return store().Score(kTenant, id, {.layer = 1, .query_position = 299, .queries = query.view()},
                         of, {0, 300});
  };
  const auto exact = scores({}), coded = scores(index);
  ASSERT_TRUE(exact.ok() && coded.ok()) << coded.status();
  const uint32_t group_size = group().query_heads / group().kv_heads;
  for (uint32_t head = 0; head < group().query_heads; ++head) {
    double sum = 0;
    for (uint32_t position = 0; position < 3; ++position) {
      for (uint32_t g = 0; g < group_size; ++g) {
        const uint32_t of = head / group_size * group_size + g;
        sum += samples.data[(position * group().query_heads + of) * group().key_dim];
      }
    }
    EXPECT_NEAR(coded->logits[head * 300] - exact->logits[head * 300], sum * group().scale(), 1e-3);
  }
}

TEST_F(Plugins, ALibraryOfTheFirstVersionIsReadUpToItsEnd) {
  Load("first_version");
  const Content content = NumberedContent(1, 300);
  const uint64_t id = Make(content);
  ASSERT_TRUE(Build(id, Copy(0, 99)).ok());  // its train_on_queries aborts
  ExpectExact(id, 300, Copy(0, 99));
}

TEST(PluginLibraries, AnotherVersionIsRefusedByNameAndOthersByTheirFault) {
  const auto refusal = [](const std::string& folder) {
    return std::string(PluginLibraries::Load(folder, nullptr).status().message());
  };
  const std::string wrong = refusal(kPlugins + "/wrong_version");
  EXPECT_THAT(
      wrong,
      HasSubstr("/wrong_version/copy.so: is of version 3 of the interface, must lie in [1, 2]"));
  EXPECT_THAT(refusal("/no/such/folder"), HasSubstr("/no/such/folder: cannot be read"));
  const std::filesystem::path own =
      std::filesystem::temp_directory_path() / ("plugins_test_" + std::to_string(getpid()));
  std::filesystem::create_directory(own);
  EXPECT_EQ(refusal(own), "");
  const std::string fake = own / "a.so";
  std::ofstream(fake) << "no library";
  EXPECT_THAT(refusal(own), HasSubstr("a.so: cannot be loaded"));
  chmod(fake.c_str(), 0777);
  EXPECT_THAT(refusal(own), HasSubstr("a.so: every user can write to it"));
  std::filesystem::remove(fake);
  std::filesystem::copy_file(kPlugins + "/copy/copy.so", own / "x.so");
  std::filesystem::copy_file(kPlugins + "/copy/copy.so", own / "y.so");
  EXPECT_THAT(refusal(own), HasSubstr("y.so: the index copy exists"));
  std::filesystem::remove_all(own);
  SetPluginTypes({});
}

TEST(PluginIndex, DescriptionsAreCheckedByField) {
  const pqcached_index_plugin_parameter parameter = {
      .name = "bits", .text = "bits", .least = 1, .most = 8, .default_value = 4};
  PluginDescription good = {};
  good.name = "lsh";
  good.text = "signs";
  good.codebook_bytes =
      good.code_bytes = [](const pqcached_index_plugin_shape*) { return size_t{8}; };
  good.train = [](const pqcached_index_plugin_shape*, const float*, uint32_t, uint64_t, void*) {};
  good.encode = [](const pqcached_index_plugin_shape*, const void*, const float*, uint32_t,
                   uint8_t*) {};
  good.score = [](const pqcached_index_plugin_shape*, const void*, const float*, uint32_t,
                  const uint8_t*, uint32_t, float*, size_t) {};
  EXPECT_EQ(CheckDescription(good), "");
  const auto wrong = [&](auto change) {
    PluginDescription bad = good;
    change(bad);
    return CheckDescription(bad);
  };
  EXPECT_THAT(wrong([](auto& bad) { bad.name = "thirteenchars"; }), HasSubstr("name: must be"));
  EXPECT_THAT(wrong([](auto& bad) { bad.name = "A"; }), HasSubstr("name: must be"));
  EXPECT_THAT(wrong([](auto& bad) { bad.text = nullptr; }), HasSubstr("text: must"));
  EXPECT_THAT(wrong([](auto& bad) { bad.parameter_count = 5; }), HasSubstr("at most 4"));
  EXPECT_THAT(wrong([](auto& bad) { bad.score = nullptr; }), HasSubstr("must not be NULL"));
  for (const auto& [change, text] :
       std::initializer_list<std::pair<void (*)(pqcached_index_plugin_parameter&), const char*>>{
           {[](auto& bad) { bad.name = "B"; }, "parameters[0].name"},
           {[](auto& bad) { bad.most = 65536; }, "parameters[0].most"},
           {[](auto& bad) { bad.default_value = 9; }, "parameters[0].default_value"}}) {
    pqcached_index_plugin_parameter bad = parameter;
    change(bad);
    EXPECT_THAT(wrong([&](auto& described) {
                  described.parameters = &bad;
                  described.parameter_count = 1;
                }),
                HasSubstr(text));
  }
}

TEST(PluginNames, AreInTheDescriptor) {
  for (const char* name : {"a", "z9_", "lsh", "abcdefghijkl", "____________", "999999999999"}) {
    ASSERT_TRUE(IsPluginName(name));
    IndexDescriptor index = PluginIndexOf(name);
    EXPECT_TRUE(IsPlugin(index));
    EXPECT_EQ(PluginNameOf(index), name);
    for (uint32_t i = 0; i < kMaxPluginParameters; ++i) SetPluginValue(&index, i, 65535 - i);
    for (uint32_t i = 0; i < kMaxPluginParameters; ++i) {
      EXPECT_EQ(PluginValueOf(index, i), 65535 - i);
    }
    EXPECT_TRUE(IsSamePlugin(index, PluginIndexOf(name)));
    EXPECT_FALSE(IsSamePlugin(index, PluginIndexOf("other")));
  }
  EXPECT_FALSE(IsPluginName("") || IsPluginName("A") || IsPluginName("abcdefghijklm"));
}

}  // namespace
}  // namespace pqcached::kvstore
