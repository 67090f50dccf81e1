// Many sequences that share, against a plain model that shares nothing: random operations, every byte
// compared; by one thread, and by several that drop and roll back what others are about to share.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <thread>

#include "tests/kvstore/content.h"

namespace pqcached::kvstore {
namespace {

using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using testing::ExpectContent;
using testing::Floats;
using testing::IngestContent;
using testing::kTenant;
using testing::Pq;
using testing::RandomFloats;
using testing::RandomIds;
using testing::SharingStore;

// tests/long.sh models goes on for much longer.
const bool kFull = std::getenv("PQCACHED_FULL_TESTS") != nullptr;
const int kSteps = kFull ? 50'000 : 2'500;
const int kRounds = kFull ? 1'000 : 25;
constexpr uint32_t kMaxTokens = 900;
constexpr size_t kMaxSequences = 6;
const IndexDescriptor kIndexes[] = {Pq(2, 4), Pq(1, 6)};

// Prompts that have beginnings in common.
std::vector<uint32_t> RandomPrompt(std::mt19937_64& random) {
  std::mt19937_64 family(random() % 2);
  std::vector<uint32_t> ids = RandomIds(family, 700);
  if (random() % 2 == 0) ids[random() % ids.size()] = 99'999;
  ids.resize(1 + random() % ids.size());
  return ids;
}

CacheSpec LargerSpec() {
  CacheSpec spec = testing::SmallSpec();
  spec.capacity_bytes = size_t{192} << 20;
  return spec;
}

class SharingModel {
 public:
  explicit SharingModel(uint64_t seed) : random_(seed) {}

  void Run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      Step();
    }
    ::testing::Test::RecordProperty("model_test_operations", steps);
    while (!all_.empty()) Drop();
    EXPECT_EQ(shared_.used_bytes(), 0u);
  }

 private:
  struct Modelled {
    uint64_t id = 0;
    Content content;
    std::vector<uint32_t> ids;  // of stored tokens and of tokens to come
    bool suspended = false;
    bool has_keys = false;  // its names are content keys
    size_t named = 0;       // the first of `ids` are names, or those of whole steps

    void Cut(size_t tokens) {
      ids.resize(std::min(ids.size(), tokens));
      named = std::min(named, Named(ids.size()));
    }
    // The tokens of this many that can be named.
    size_t Named(size_t tokens) const {
      return has_keys ? tokens / kBlockTokens * kBlockTokens : tokens;
    }
  };

  // Content keys of the whole steps of these tokens.
  static std::vector<ContentKey> KeysOf(std::span<const uint32_t> ids) {
    std::vector<ContentKey> keys;
    for (; ids.size() >= kBlockTokens; ids = ids.subspan(kBlockTokens)) {
      const Content content = ContentOf(ids.first(kBlockTokens));
      keys.push_back({static_cast<uint32_t>(content.back()),
                      static_cast<uint32_t>(content.back() >> 32), 7, 7});
    }
    return keys;
  }

  uint32_t Random(size_t below) { return static_cast<uint32_t>(random_() % below); }
  Store& store() { return *shared_.store; }

  void Step() {
    if (all_.empty()) return Create();
    current_ = Random(all_.size());
    if (all_[current_].suspended && Random(3) > 0) return Resume();
    const uint32_t dice = Random(100);
    if (dice < 8) return Create();
    if (dice < 18) return Fork();
    if (dice < 22) return Drop();
    if (dice < 26) return Match();
    if (all_[current_].suspended) return ExpectSuspended();
    if (dice < 55) return Grow();
    if (dice < 70) return Truncate();
    if (dice < 74) return Build();
    if (dice < 76) return Suspend();
    if (dice < 86) return ReadAll();
    Attend();
  }

  size_t ExpectedMatch(const std::vector<uint32_t>& prompt, bool has_keys) const {
    size_t longest = 0;
    for (const Modelled& one : all_) {
      if (one.has_keys != has_keys) continue;
      const size_t stored = std::min(one.named, one.content.size());
      size_t same = 0;
      while (same < std::min(stored, prompt.size()) && one.ids[same] == prompt[same]) ++same;
      longest = std::max(longest, same / kBlockTokens * kBlockTokens);
    }
    return longest;
  }

  void Match() {
    const std::vector<uint32_t> prompt = RandomPrompt(random_);
    ASSERT_EQ(shared_.Match(prompt), ExpectedMatch(prompt, /*has_keys=*/false));
    const auto by_keys = store().MatchPrefix(kTenant, shared_.cache_id, {{}, KeysOf(prompt)}, "");
    ASSERT_TRUE(by_keys.ok()) << by_keys.status();
    ASSERT_EQ(*by_keys, ExpectedMatch(prompt, /*has_keys=*/true));
  }

  void Create() {
    if (all_.size() >= kMaxSequences) return Drop();
    const std::vector<uint32_t> prompt =
        Random(4) == 0 ? std::vector<uint32_t>() : RandomPrompt(random_);
    Modelled made{.content = ContentOf(prompt), .ids = prompt, .has_keys = Random(3) == 0};
    SequenceSpec spec{.session = "session"};
    if (made.has_keys) {
      spec.content_keys = KeysOf(prompt);
    } else {
      spec.token_ids = prompt;
    }
    const auto created = store().CreateSequence(kTenant, shared_.cache_id, spec);
    ASSERT_TRUE(created.ok()) << created.status();
    ASSERT_EQ(created->token_count, ExpectedMatch(prompt, made.has_keys));
    made.id = created->sequence_id;
    made.named = made.Named(prompt.size());
    made.content.resize(created->token_count);
    all_.push_back(std::move(made));
  }

  void Fork() {
    if (all_.size() >= kMaxSequences || all_[current_].suspended) return Drop();
    const Modelled& parent = all_[current_];
    const uint32_t count = Random(parent.content.size() + 1);
    const CreatedSequence created = shared_.Fork(parent.id, count);
    Modelled child = parent;
    child.id = created.sequence_id;
    if (count > 0) child.content.resize(count);  // 0 means all
    child.Cut(child.content.size());
    ASSERT_EQ(created.token_count, child.content.size());
    all_.push_back(std::move(child));
  }

  void Drop() {
    current_ = Random(all_.size());
    ASSERT_TRUE(store().DropSequence(kTenant, all_[current_].id).ok());
    all_.erase(all_.begin() + static_cast<ptrdiff_t>(current_));
  }

  // Tokens come with their names when the sequence has been named so far, as the prompt says or not.
  void Grow() {
    Modelled& one = all_[current_];
    if (one.content.size() > kMaxTokens) return Drop();
    const uint32_t count = 1 + Random(Random(3) == 0 ? 300 : 10);
    const size_t end = one.content.size() + count;
    Content fresh;
    if (one.ids.size() >= one.content.size() && Random(5) > 0) {
      std::vector<uint32_t> ids = one.ids;
      while (ids.size() < end) ids.push_back(Random(3));
      const size_t first = one.named;
      const auto fresh_ids = std::span<const uint32_t>(ids).subspan(first);
      const std::vector<ContentKey> keys = KeysOf(fresh_ids);
      const absl::Status named = one.has_keys
                                     ? store().NameTokens(kTenant, one.id, first, {{}, keys})
                                     : store().NameTokens(kTenant, one.id, first, fresh_ids);
      ASSERT_TRUE(named.ok()) << named;
      one.ids = std::move(ids);
      one.named = one.Named(one.ids.size());
      fresh = ContentOf(std::span(one.ids).first(end));
      fresh.erase(fresh.begin(), fresh.begin() + static_cast<ptrdiff_t>(one.content.size()));
    }
    if (fresh.empty()) {
      Forget(one, one.content.size());
      for (uint32_t i = 0; i < count; ++i) fresh.push_back(random_());
    }
    const auto stored =
        Random(2) == 0 ? AppendContent(store(), one.id, shared_.group, one.content.size(), fresh)
                       : IngestContent(store(), one.id, shared_.group, one.content.size(), fresh);
    ASSERT_TRUE(stored.ok()) << stored.status();
    one.content.insert(one.content.end(), fresh.begin(), fresh.end());
    ASSERT_EQ(*stored, one.content.size());
  }

  // A roll back to where the sequence ends changes nothing, but one token less and again forgets names.
  void Forget(Modelled& one, size_t tokens) {
    if (one.ids.size() <= tokens || tokens == 0) {
      if (one.ids.size() > tokens) Recreate(one);
      return;
    }
    const uint64_t last = one.content.back();
    ASSERT_TRUE(store().TruncateSequence(kTenant, one.id, tokens - 1).ok());
    one.Cut(tokens - 1);
    ASSERT_TRUE(AppendContent(store(), one.id, shared_.group, tokens - 1, {&last, 1}).ok());
  }
  void Recreate(Modelled& one) {
    ASSERT_TRUE(store().DropSequence(kTenant, one.id).ok());
    one = {.id = shared_.Create().sequence_id, .content = {}, .ids = {}};
  }

  void Truncate() {
    Modelled& one = all_[current_];
    if (one.content.empty()) return;
    const uint32_t most = Random(2) == 0 ? 8 : static_cast<uint32_t>(one.content.size());
    const size_t count =
        one.content.size() - std::min<size_t>(Random(most + 1), one.content.size());
    const auto stored = store().TruncateSequence(kTenant, one.id, count);
    ASSERT_TRUE(stored.ok()) << stored.status();
    if (count < one.content.size()) one.Cut(count);
    one.content.resize(count);
  }

  void Build() {
    const Modelled& one = all_[current_];
    const std::vector<IndexDescriptor> built = shared_.Describe(one.id).indexes;
    for (const IndexDescriptor& index : kIndexes) {
      if (one.content.empty() || std::find(built.begin(), built.end(), index) != built.end()) {
        continue;
      }
      const absl::Status status =
          store().BuildIndex(kTenant, one.id, {.index = index, .iterations = 2}, {});
      ASSERT_TRUE(status.ok()) << status;
      return;
    }
  }

  void Suspend() {
    ASSERT_EQ(*store().SuspendSequence(kTenant, all_[current_].id), all_[current_].content.size());
    all_[current_].suspended = true;
  }
  void Resume() {
    ASSERT_EQ(*store().ResumeSequence(kTenant, all_[current_].id), all_[current_].content.size());
    all_[current_].suspended = false;
  }
  void ExpectSuspended() {
    ASSERT_EQ(
        store().FetchBlocks(kTenant, all_[current_].id, 1, {0, 1}, RowPart::kRow).status().code(),
        absl::StatusCode::kFailedPrecondition);
  }

  void ReadAll() {
    const Modelled& one = all_[current_];
    ASSERT_EQ(shared_.Describe(one.id).token_count, one.content.size());
    ExpectContent(store(), one.id, shared_.group, one.content);
  }

  // Whatever is shared and cut, a selection finds what scores highest by the same codes.
  void Attend() {
    const Modelled& one = all_[current_];
    const auto tokens = static_cast<uint32_t>(one.content.size());
    if (tokens < 20) return;
    std::vector<IndexDescriptor> indexes = shared_.Describe(one.id).indexes;
    indexes.push_back({});
    const IndexDescriptor index = indexes[Random(indexes.size())];
    const LayerGroup& group = shared_.group;
    const Floats query = RandomFloats(random_, {1, group.query_heads, group.key_dim});
    const Query asked{
        .layer = group.layers[Random(2)], .query_position = tokens - 1, .queries = query.view()};
    const auto selected =
        store().TopK(kTenant, one.id, asked,
                     {.index = index, .group_rule = GroupRule::kMeanLogit, .budget_ratio = 0.25});
    const auto scores = store().Score(kTenant, one.id, asked, index, {0, tokens});
    ASSERT_TRUE(selected.ok() && scores.ok()) << selected.status() << scores.status();
    const uint32_t size = group.group_size();
    for (uint32_t kv_head = 0; kv_head < group.kv_heads; ++kv_head) {
      std::vector<double> sums(tokens, 0.0);
      for (uint32_t i = 0; i < tokens * size; ++i) {
        sums[i % tokens] += scores->logits[size_t{kv_head} * size * tokens + i];
      }
      std::vector<double> sorted = sums;
      std::sort(sorted.begin(), sorted.end(), std::greater<double>());
      for (uint32_t i = 0; i < selected->count; ++i) {
        const uint32_t position = selected->positions[kv_head * selected->count + i];
        ASSERT_GE(sums[position], sorted[selected->count - 1] - 1e-3);
      }
    }
  }

  std::mt19937_64 random_;
  SharingStore shared_{LargerSpec()};
  std::vector<Modelled> all_;
  size_t current_ = 0;
};

TEST(SharingModel, RandomOperationsAgreeWithAModelThatSharesNothing) {
  SharingModel(21).Run(kSteps);
}

TEST(SharingModel, AgreesUnderAnotherSeed) { SharingModel(22).Run(kSteps / 2); }

// Each thread keeps making sequences whose prompts others hold, roll back, fork and drop.
TEST(SharingModel, NobodyGetsForeignRowsWhilePrefixesComeAndGo) {
  SharingStore shared(LargerSpec());
  Store& store = *shared.store;
  std::atomic<uint64_t> shared_tokens = 0;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      for (int round = 0; round < kRounds; ++round) {
        const std::vector<uint32_t> prompt = RandomPrompt(random);
        Content content = ContentOf(prompt);
        const CreatedSequence made = shared.Create(prompt);
        shared_tokens += made.token_count;
        const uint64_t id = made.sequence_id;
        ExpectContent(store, id, shared.group, std::span(content).first(made.token_count));
        const auto rest = std::span(content).subspan(made.token_count);
        if (!rest.empty()) {
          const auto count = IngestContent(store, id, shared.group, made.token_count, rest);
          ASSERT_TRUE(count.ok()) << count.status();
        }
        if (random() % 4 == 0) {
          const absl::Status status =
              store.BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 1}, {});
          ASSERT_TRUE(status.ok() || status.code() == absl::StatusCode::kAlreadyExists) << status;
        }
        const uint64_t twin = shared.Fork(id).sequence_id;
        const Content before = content;
        // Other tokens, under other names, where others may be looking.
        content.resize(random() % (content.size() + 1));
        ASSERT_TRUE(store.TruncateSequence(kTenant, id, content.size()).ok());
        std::vector<uint32_t> ids(prompt.begin(),
                                  prompt.begin() + static_cast<ptrdiff_t>(content.size()));
        ids.resize(ids.size() + 200, static_cast<uint32_t>(100'000 + thread));
        content = ContentOf(ids);
        const size_t kept = content.size() - 200;
        ASSERT_TRUE(store.NameTokens(kTenant, id, kept, std::span(ids).subspan(kept)).ok());
        ASSERT_TRUE(
            AppendContent(store, id, shared.group, kept, std::span(content).subspan(kept)).ok());
        ExpectContent(store, id, shared.group, content);
        ExpectContent(store, twin, shared.group, before);
        ASSERT_TRUE(store.DropSequence(kTenant, id).ok());
        ASSERT_TRUE(store.DropSequence(kTenant, twin).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  RecordProperty("model_test_operations", static_cast<int>(threads.size()) * kRounds);
  EXPECT_GT(shared_tokens, 0u);
  EXPECT_EQ(shared.used_bytes(), 0u);
}

}  // namespace
}  // namespace pqcached::kvstore
