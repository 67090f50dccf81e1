// Names of tokens, prompt and generated ones, with every call that stores rows, against a real
// pqcached on both paths: later sequences share what is stored under them.
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>

#include <cstring>
#include <fstream>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::SpecOf;

constexpr uint64_t kSink = 4, kWindow = 16;
constexpr uint32_t kLayers = 2;
constexpr size_t kOutput = Layer::kQueryHeads * Layer::kValueDim;

class TokenNamesTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  TokenNamesTest() {
    for (uint32_t i = 0; i < 1000; ++i) ids_.push_back(7 * i + 1);
    for (uint32_t step = 0; step < 8; ++step) {
      ContentKey key = {};
      key.bytes[0] = static_cast<uint8_t>(step + 1);
      key.bytes[15] = 9;
      keys_.push_back(key);
    }
  }

  static std::vector<LayerRows> Rows(const Layer& layer, uint64_t begin, uint64_t end) {
    return testing::RowsOf(layer, begin, end, kLayers);
  }
  // The ids of tokens [begin, end).
  TokenNames Ids(uint64_t begin, uint64_t end) const {
    return {.begin = begin, .token_ids = std::span(ids_).subspan(begin, end - begin)};
  }
  uint64_t Match(uint64_t tokens) {
    const pqcached::Prompt prompt{.token_ids = std::vector<uint32_t>(
                                      ids_.begin(), ids_.begin() + static_cast<ptrdiff_t>(tokens))};
    for (;;) {
      const Result<uint64_t> count = cache_.MatchPrefix(prompt);
      if (count.status().code() != PQC_UNAVAILABLE) return Must(count);
      poll(nullptr, 0, 10);  // until there is a worker again
    }
  }
  // The first tokens, named with one of the layers.
  Sequence Prompt(uint64_t tokens) {
    Sequence sequence = Must(cache_.CreateSequence());
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, 0, layer_.keys(0, tokens), layer_.values(0, tokens),
                               number == 0 ? Ids(0, tokens) : TokenNames{}));
    }
    MustBeOk(sequence.BuildIndex({.iterations = 2, .sink_tokens = kSink}));
    return sequence;
  }
  // A step without attention.
  Status EndStep(Sequence& sequence, uint64_t position, uint32_t length, const TokenNames& names,
                 std::vector<uint32_t> accepted = {}) {
    const StepItem items[] = {{&sequence, position, length}};
    auto step = client_.BeginStep(items, nullptr);
    if (!step.ok()) return step.status();
    return step->End(Rows(layer_, position, position + length), accepted, {&names, 1});
  }
  // That a new sequence with this prompt shares `tokens` rows, which are the layer's.
  void ExpectShared(uint64_t prompt, uint64_t tokens) {
    SequenceOptions options;
    options.prompt.token_ids.assign(ids_.begin(), ids_.begin() + static_cast<ptrdiff_t>(prompt));
    uint64_t shared = 0;
    Sequence next = Must(cache_.CreateSequence(options, &shared));
    EXPECT_EQ(shared, tokens);
    ExpectRows(next, layer_, tokens);
  }
  // That the first rows of a sequence are those of `layer`.
  static void ExpectRows(Sequence& sequence, const Layer& layer, uint64_t tokens) {
    std::vector<float> keys(Layer::kKvHeads * tokens * Layer::kKeyDim);
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.FetchBlocks(number, {0, tokens}, PQC_KEY,
                                    std::as_writable_bytes(std::span(keys))));
      for (uint64_t token = 0; token < tokens; ++token) {
        ASSERT_EQ(std::memcmp(&keys[token * Layer::kKeyDim], layer.key(token, 0),
                              Layer::kKeyDim * sizeof(float)),
                  0)
            << "token " << token << " of layer " << number;
      }
    }
  }
  static void Expect(const Status& status, const char* field) {
    EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT) << status.ToString();
    EXPECT_EQ(status.field(), field) << status.ToString();
  }
  void KillWorker() {
    const std::string pid = std::to_string(daemon_.process().pid());
    pid_t worker = 0;
    for (;; poll(nullptr, 0, 10)) {  // the one after the last
      std::ifstream children("/proc/" + pid + "/task/" + pid + "/children");
      if (children >> worker) break;
    }
    ASSERT_EQ(kill(worker, SIGKILL), 0);
    while (kill(worker, 0) == 0) poll(nullptr, 0, 1);  // until the supervisor has noticed it
  }

  std::vector<uint32_t> ids_;
  std::vector<ContentKey> keys_;
  const Layer layer_{1000, 1};
  Daemon daemon_{{"--retain", "true", "--tail-tokens", "512", "--segment-tokens", "512"}};
  Client client_ = daemon_.OpenClient("default", GetParam());
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1})));
  const Selection selection_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0};
};

TEST_P(TokenNamesTest, GeneratedTokensAreSharedByTheNextTurn) {
  Sequence sequence = Prompt(300);
  EXPECT_EQ(Match(300), 256u);
  for (uint64_t position = 300; position < 400; position += 4) {
    MustBeOk(EndStep(sequence, position, 4, Ids(position, position + 4)));
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Match(1000), 384u);
  for (uint64_t position = 400; position < 450; position += 10) {
    MustBeOk(
        sequence
            .Append(position, Rows(layer_, position, position + 10), Ids(position, position + 10))
            .status());
  }
  MustBeOk(sequence.Drop());
  EXPECT_EQ(Match(1000), 384u);
  ExpectShared(1000, 384);
}

TEST_P(TokenNamesTest, NamesMayComeBeforeTheirRowsAndAfter) {
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(sequence.NameTokens(Ids(0, 200)));
  EXPECT_EQ(Match(1000), 0u);
  MustBeOk(sequence.Append(0, Rows(layer_, 0, 500)).status());
  EXPECT_EQ(Match(1000), 128u);
  MustBeOk(sequence.NameTokens(Ids(100, 400)));
  EXPECT_EQ(Match(1000), 384u);
  MustBeOk(EndStep(sequence, 500, 8, Ids(400, 520)));  // of earlier and of later tokens
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Match(1000), 384u);
  MustBeOk(EndStep(sequence, 508, 4, {}));
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Match(1000), 512u);
}

TEST_P(TokenNamesTest, RolledBackSpeculationForgetsItsNames) {
  Sequence sequence = Prompt(250);
  std::vector<uint32_t> guess = {ids_[250], ids_[251], 5, 6, 7};
  MustBeOk(EndStep(sequence, 250, 5, {.begin = 250, .token_ids = guess}, {2}));
  MustBeOk(EndStep(sequence, 252, 8, Ids(252, 260)));
  guess = {8, 9};
  MustBeOk(EndStep(sequence, 260, 2, {.begin = 260, .token_ids = guess}));
  MustBeOk(EndStep(sequence, 260, 5, Ids(260, 265), {3}));  // in place of the guess
  MustBeOk(EndStep(sequence, 263, 1, {.begin = 263, .token_ids = guess}, {0}));
  for (uint64_t position = 263; position < 390; ++position) {
    MustBeOk(EndStep(sequence, position, 1, Ids(position, position + 1)));
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Match(1000), 384u);
  MustBeOk(sequence.Truncate(300));
  EXPECT_EQ(Match(1000), 256u);
  MustBeOk(sequence.Append(300, Rows(layer_, 300, 400), Ids(300, 400)).status());
  ExpectShared(1000, 384);
}

TEST_P(TokenNamesTest, ForksHaveTheNamesOfTheTokensThatTheyShare) {
  Sequence sequence = Prompt(300);
  Sequence fork = Must(sequence.Fork(270));
  MustBeOk(sequence.Drop());
  Expect(EndStep(fork, 270, 1, Ids(271, 272)).ok() ? fork.Flush() : Status{},
         "options.names_begin");
  MustBeOk(fork.Append(270, Rows(layer_, 270, 390), Ids(270, 390)).status());
  MustBeOk(fork.Drop());
  ExpectShared(1000, 384);
}

TEST_P(TokenNamesTest, ASequenceMayLeaveNoPrefix) {
  for (const bool retain : {false, true}) {
    SequenceOptions options;
    options.prompt.token_ids.assign(ids_.begin(), ids_.begin() + 300);
    options.retain = retain;
    Sequence sequence = Must(cache_.CreateSequence(options));
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, 0, layer_.keys(0, 300), layer_.values(0, 300)));
    }
    EXPECT_EQ(Match(300), 256u);
    MustBeOk(sequence.Drop());
    EXPECT_EQ(Match(300), retain ? 256u : 0u);
  }
  pqc_sequence_options options = PQC_INIT(pqc_sequence_options);
  options.retain = 3;
  pqc_sequence* sequence = nullptr;
  EXPECT_EQ(pqc_sequence_create_with(cache_.get(), &options, &sequence, nullptr),
            PQC_INVALID_ARGUMENT);
  EXPECT_NE(std::string(pqc_last_error()).find("options.retain"), std::string::npos);
}

TEST_P(TokenNamesTest, APrefixThatWasPlannedWithIsThereOrNothingIsCreated) {
  Sequence sequence = Prompt(300);
  SequenceOptions options;
  options.prompt.token_ids.assign(ids_.begin(), ids_.begin() + 300);
  options.at_least_tokens = Match(300);
  uint64_t shared = 0;
  Sequence next = Must(cache_.CreateSequence(options, &shared));
  EXPECT_EQ(shared, 256u);
  options.at_least_tokens = 257;
  const std::string sequences = Must(client_.AdminJson("ListSequences", "{}"));
  const Status refused = cache_.CreateSequence(options).status();
  EXPECT_EQ(refused.code(), PQC_NOT_FOUND) << refused.ToString();
  EXPECT_EQ(refused.field(), "options.at_least_tokens");
  const auto count = [](const std::string& text) {
    size_t found = 0;
    for (size_t at = text.find("sequence_id"); at != std::string::npos; ++found) {
      at = text.find("sequence_id", at + 1);
    }
    return found;
  };
  EXPECT_EQ(count(Must(client_.AdminJson("ListSequences", "{}"))), count(sequences));
}

TEST_P(TokenNamesTest, TheRanksOfAModelShareTheSameTokensInTheNextTurn) {
  const Layer layers[] = {Layer{1000, 1}, Layer{1000, 2}};  // the kv heads of each rank
  const uint64_t stored[] = {550, 400};  // the second rank was stopped before the first
  std::vector<Client> clients;
  std::vector<Cache> caches;
  const auto create = [&](uint32_t rank, const char* group_key, uint64_t prompt, uint64_t* shared) {
    SequenceOptions options{.group_key = group_key};
    options.prompt.token_ids.assign(ids_.begin(), ids_.begin() + static_cast<ptrdiff_t>(prompt));
    return Must(caches[rank].CreateSequence(options, shared));
  };
  for (uint32_t rank = 0; rank < 2; ++rank) {
    clients.push_back(daemon_.OpenClient("default", GetParam()));
    CacheSpec spec = SpecOf("ranked", {0, 1});
    spec.rank_group = "group";
    spec.rank = rank;
    spec.rank_count = 2;
    spec.kv_head_begin = rank * Layer::kKvHeads;
    caches.push_back(Must(clients[rank].OpenCache(spec)));
  }
  std::vector<Sequence> sequences;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sequences.push_back(create(rank, "first", 300, nullptr));
    MustBeOk(sequences[rank].Append(0, Rows(layers[rank], 0, 300)).status());
    MustBeOk(sequences[rank].BuildIndex({.iterations = 2, .sink_tokens = kSink}));
    for (uint64_t position = 300; position < stored[rank]; position += 5) {
      const StepItem items[] = {{&sequences[rank], position, 5}};
      Step step = Must(clients[rank].BeginStep(items, nullptr));
      const TokenNames names = Ids(position, position + 5);
      MustBeOk(step.End(Rows(layers[rank], position, position + 5), {}, {&names, 1}));
    }
    MustBeOk(sequences[rank].Flush());
  }
  for (Sequence& sequence : sequences) MustBeOk(sequence.Drop());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    uint64_t shared = 0;
    Sequence next = create(rank, "second", 1000, &shared);
    EXPECT_EQ(shared, 384u) << "rank " << rank;
    ExpectRows(next, layers[rank], shared);
  }
}

TEST_P(TokenNamesTest, TheDecoderNamesTokens) {
  Sequence sequence = Must(cache_.CreateSequence());
  Decoder decoder = Must(Decoder::Open(sequence, selection_));
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(decoder.Prefill(number, layer_.keys(0, 300), layer_.values(0, 300),
                             number == 1 ? Ids(0, 300) : TokenNames{}));
  }
  const auto token = [](const float* numbers, uint32_t dim) {
    return Tensor(std::span(numbers, Layer::kKvHeads * dim), {Layer::kKvHeads, dim});
  };
  std::vector<float> output(kOutput);
  const auto decode = [&](uint64_t position, uint32_t number, const TokenNames& names) {
    return decoder.Decode(number, layer_.queries(), token(layer_.key(position, 0), Layer::kKeyDim),
                          token(layer_.value(position, 0), Layer::kValueDim), output, names);
  };
  for (uint64_t position = 300; position < 390; position += 2) {
    const uint32_t named = position % kLayers;  // with whichever layer
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(
          decode(position, number, number == named ? Ids(position, position + 1) : TokenNames{}));
    }
    // Names that a later layer's call gives replace those of an earlier one.
    const std::vector<uint32_t> wrong = {1};
    MustBeOk(decode(position + 1, 0, {.begin = position + 1, .token_ids = wrong}));
    MustBeOk(decode(position + 1, 1, Ids(position + 1, position + 2)));
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Match(1000), 384u);
}

TEST_P(TokenNamesTest, ContentKeysNameTokensToo) {
  const auto keys = [&](uint64_t step, uint64_t count) {
    return TokenNames{.begin = 128 * step, .content_keys = std::span(keys_).subspan(step, count)};
  };
  const auto match = [&](size_t steps) {
    return Must(cache_.MatchPrefix(
        {.content_keys = {keys_.begin(), keys_.begin() + static_cast<ptrdiff_t>(steps)}}));
  };
  SequenceOptions options;
  options.prompt.content_keys = {keys_[0]};
  Sequence sequence = Must(cache_.CreateSequence(options));
  MustBeOk(sequence.Append(0, Rows(layer_, 0, 380), keys(1, 1)).status());
  EXPECT_EQ(match(8), 256u);
  EXPECT_EQ(Match(1000), 0u);
  MustBeOk(EndStep(sequence, 380, 8, keys(2, 1), {4}));
  MustBeOk(sequence.Flush());
  EXPECT_EQ(match(8), 384u);
  MustBeOk(EndStep(sequence, 382, 4, keys(2, 1), {1}));  // cut before the end of its tokens
  MustBeOk(sequence.Flush());
  EXPECT_EQ(match(8), 256u);
  MustBeOk(EndStep(sequence, 383, 1, keys(2, 1)));
  MustBeOk(sequence.Drop());
  // Rows that are not stored yet are discarded with their names: either the client's thread had sent
  // row 383, then its name is kept with it, or neither is.
  const uint64_t kept = match(8);
  EXPECT_TRUE(kept == 256 || kept == 384) << kept;
  options.prompt.content_keys.assign(keys_.begin(), keys_.begin() + 3);
  uint64_t shared = 0;
  Sequence next = Must(cache_.CreateSequence(options, &shared));
  EXPECT_GE(shared, 256u);
  ExpectRows(next, layer_, shared);
}

TEST_P(TokenNamesTest, NamesThatAreWrongAreRefusedAndTheirRowsToo) {
  Sequence sequence = Prompt(300);
  std::vector<uint32_t> other(ids_.begin() + 290, ids_.begin() + 310);
  ++other[3];
  Expect(sequence.NameTokens({.begin = 290, .token_ids = other}), "options.token_ids[3]");
  Expect(sequence.NameTokens(Ids(301, 302)), "options.names_begin");
  Expect(sequence.NameTokens({.begin = 256, .content_keys = keys_}), "options.content_keys");
  Expect(sequence.NameTokens({.begin = 255, .content_keys = keys_}), "options.names_begin");
  Expect(sequence.NameTokens({.begin = 0, .token_ids = ids_, .content_keys = keys_}),
         "options.content_keys");
  Expect(sequence.NameTokens({.begin = uint64_t{1} << 30, .token_ids = ids_}),
         "options.names_begin");
  const Tensor keys = layer_.keys(300, 310), values = layer_.values(300, 310);
  Expect(sequence.Ingest(0, 300, keys, values, {.begin = 290, .token_ids = other}),
         "options.token_ids[3]");
  Expect(sequence.Append(300, Rows(layer_, 300, 310), {.begin = 290, .token_ids = other}).status(),
         "options.token_ids[3]");
  const std::vector<uint32_t> many((1u << 16) + 1);
  Expect(EndStep(sequence, 300, 1, {.begin = 0, .token_ids = many}), "options[0].token_id_count");
  MustBeOk(EndStep(sequence, 300, 1, {.begin = 290, .token_ids = other}));
  Expect(sequence.Flush(), "options.token_ids[3]");
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u);
  pqc_row_options broken = PQC_INIT(pqc_row_options);
  broken.token_id_count = 1;
  EXPECT_EQ(pqc_sequence_name_tokens(sequence.get(), &broken), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "options.token_ids");
  MustBeOk(sequence.Append(300, Rows(layer_, 300, 310), Ids(300, 310)).status());
}

TEST_P(TokenNamesTest, NamesOutliveAKilledWorker) {
  Sequence sequence = Prompt(300);
  for (uint64_t position = 300; position < 400; ++position) {
    if (position % 50 == 10) KillWorker();
    Status status;
    do {  // until there is a worker again
      status = EndStep(sequence, position, 1, Ids(position, position + 1));
    } while (status.code() == PQC_UNAVAILABLE);
    MustBeOk(status);
  }
  MustBeOk(sequence.Flush());
  KillWorker();
  EXPECT_EQ(Match(1000), 384u);
  MustBeOk(sequence.Drop());
  KillWorker();
  EXPECT_EQ(Match(1000), 384u);
  ExpectShared(1000, 384);
}

INSTANTIATE_TEST_SUITE_P(Paths, TokenNamesTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
