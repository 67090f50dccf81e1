// Selection of pages in steps, against a real pqcached on both paths: by their definition, from the
// logits that pqc_score gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"
#include "tests/client/range_case.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::RangeCase;
using testing::SpecOf;

constexpr uint64_t kSink = 4, kWindow = 20;

class DaemonPagesTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  static pqc_client* OpenHandle(const Daemon& daemon) {
    daemon.OpenClient("default", GetParam());  // waits until it serves
    pqc_client_options options = PQC_INIT(pqc_client_options);
    options.endpoint = daemon.endpoint().c_str();
    options.path = GetParam();
    options.timeout_ms = 60'000;
    pqc_client* client = nullptr;
    MustBeOk(Status(pqc_client_open(&options, &client)));
    return client;
  }

  Sequence Fill(const Layer& layer, uint64_t tokens) {
    return testing::FillIndexed(cache_, layer, tokens, 1, kSink);
  }

  // The summed softmax over the candidates, per kv head and candidate.
  static std::vector<std::vector<double>> Weights(Sequence& sequence, const RangeCase& query,
                                                  const Selection& selection,
                                                  const std::vector<uint32_t>& candidates) {
    std::vector<std::vector<double>> weights(Layer::kKvHeads,
                                             std::vector<double>(candidates.size()));
    const pqc_token_range range = {0, query.query_position};
    for (uint64_t token = 0; token < query.tokens; ++token) {
      const std::span<const float> numbers =
          std::span(query.queries)
              .subspan(token * Layer::kQueryHeads * Layer::kKeyDim,
                       Layer::kQueryHeads * Layer::kKeyDim);
      const Scores scores =
          Must(sequence.Score({.layer = 0,
                               .query_position = query.query_position,
                               .queries = {numbers, {1, Layer::kQueryHeads, Layer::kKeyDim}}},
                              selection.index, range));
      for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
        const float* logits = &scores.logits[head * query.query_position];
        double sum = 0;
        for (const uint32_t position : candidates) sum += std::exp(double{logits[position]});
        for (size_t i = 0; i < candidates.size(); ++i) {
          weights[head / Layer::kGroup][i] += std::exp(double{logits[candidates[i]]}) / sum;
        }
      }
    }
    return weights;
  }

  // Checks an item's lists, [list_count, capacity]; `ends`: pages of sink and window are in them.
  void CheckItem(Sequence& sequence, const RangeCase& query, const Selection& selection,
                 const PageOptions& options, const int32_t* lists, uint32_t list_count,
                 uint32_t capacity, uint32_t length) {
    const uint64_t context = query.query_position + 1;
    const bool ends = options.flags != 0;
    std::vector<uint32_t> candidates;
    for (uint64_t token = kSink; token + kWindow < context; ++token) {
      const bool excluded = std::any_of(
          selection.excluded.begin(), selection.excluded.end(),
          [&](const pqc_token_range& gap) { return token >= gap.begin && token < gap.end; });
      if (!excluded) candidates.push_back(static_cast<uint32_t>(token));
    }
    std::set<uint32_t> listed;
    if (ends) {
      listed.insert(0);
      for (uint64_t token = context - kWindow; token < context + query.tokens - 1; ++token) {
        listed.insert(static_cast<uint32_t>(token / options.page_tokens));
      }
    }
    const auto weights = Weights(sequence, query, selection, candidates);
    for (uint32_t list = 0; list < list_count; ++list) {
      std::map<uint32_t, double> scores;
      for (size_t i = 0; i < candidates.size(); ++i) {
        double score = weights[list][i];
        if (options.heads == PQC_HEADS_SUM) score += weights[1][i];
        if (options.heads == PQC_HEADS_MAX) score = std::max(score, weights[1][i]);
        const uint32_t page = candidates[i] / options.page_tokens;
        if (!listed.contains(page)) scores[page] = std::max(scores[page], score);
      }
      const uint64_t wanted =
          (selection.retrieved_tokens + options.page_tokens - 1) / options.page_tokens;
      const size_t count = selection.retrieved_tokens >= candidates.size()
                               ? scores.size()
                               : std::min<size_t>(wanted, scores.size());
      ASSERT_EQ(length, listed.size() + count);
      const int32_t* const pages = lists + size_t{list} * capacity;
      ASSERT_TRUE(std::is_sorted(pages, pages + length));
      for (uint32_t i = length; i < capacity; ++i) ASSERT_EQ(pages[i], -1) << "padding";
      const std::set<uint32_t> chosen(pages, pages + length);
      ASSERT_EQ(chosen.size(), length);
      for (const uint32_t page : listed) ASSERT_TRUE(chosen.contains(page)) << page;
      double least = 1e300, most = 0;
      for (const auto& [page, score] : scores) {
        (chosen.contains(page) ? least : most) =
            chosen.contains(page) ? std::min(least, score) : std::max(most, score);
      }
      ASSERT_LE(most, least * 1.0001) << "a better page is left out";
    }
  }

  Daemon daemon_;
  pqc_client* const handle_ = OpenHandle(daemon_);  // the client's
  Client client_ = Client::Adopt(handle_);
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0})));
};

TEST_P(DaemonPagesTest, PagesAreThoseWithTheBestCandidates) {
  const Layer layer(500, 3), other(400, 8);
  Sequence first = Fill(layer, 481), second = Fill(other, 390);
  const StepItem items[] = {{&first, 480, 1}, {&second, 389, 3}};
  const RangeCase one(1, 480, 4), two(3, 389, 5);
  std::vector<float> queries = one.queries;
  queries.insert(queries.end(), two.queries.begin(), two.queries.end());
  for (const bool exact : {false, true}) {
    for (const uint64_t tokens : {1u, 40u, 170u, 10'000u}) {
      Selection selection{
          .sink_tokens = kSink, .window_tokens = kWindow, .retrieved_tokens = tokens};
      if (exact) selection.index.kind = PQC_INDEX_FLAT;
      if (tokens == 40) selection.excluded = {{60, 95}, {128, 192}};
      for (const uint32_t page_tokens : {16u, 32u, 64u}) {
        for (const pqc_head_rule heads : {PQC_HEADS_EACH, PQC_HEADS_MAX, PQC_HEADS_SUM}) {
          for (const bool ends : {false, true}) {
            SCOPED_TRACE(::testing::Message()
                         << "exact " << exact << " tokens " << tokens << " page " << page_tokens
                         << " heads " << heads << " ends " << ends);
            const PageOptions options{
                .page_tokens = page_tokens,
                .heads = heads,
                .flags = ends ? uint64_t{PQC_PAGES_WITH_SINK | PQC_PAGES_WITH_WINDOW} : 0};
            Step step = Must(client_.BeginStep(items, &selection));
            const uint64_t before = Must(client_.Count()).rpcs;
            const Step::Pages pages = Must(
                step.TopKPages(0, {queries, {4, Layer::kQueryHeads, Layer::kKeyDim}}, options));
            // All items in one RPC, and none where no score is needed.
            const bool is_remote = GetParam() == PQC_PATH_ONLY_REMOTE;
            ASSERT_EQ(Must(client_.Count()).rpcs - before, is_remote && tokens != 10'000 ? 1 : 0);
            ASSERT_EQ(pages.list_count, heads == PQC_HEADS_EACH ? Layer::kKvHeads : 1);
            ASSERT_EQ(pages.capacity, std::max(pages.lengths[0], pages.lengths[1]));
            const size_t size = size_t{pages.list_count} * pages.capacity;
            CheckItem(first, one, selection, options, pages.pages.data(), pages.list_count,
                      pages.capacity, pages.lengths[0]);
            CheckItem(second, two, selection, options, pages.pages.data() + size, pages.list_count,
                      pages.capacity, pages.lengths[1]);
          }
        }
      }
    }
  }
}

TEST_P(DaemonPagesTest, BadArgumentsAreNamed) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 290);
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence.get();
  item.query_position = 289;
  const Selection selection{.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.5};
  const pqc_selection terms = selection.c();
  pqc_step* step = nullptr;
  ASSERT_EQ(pqc_step_begin(handle_, &item, 1, nullptr, &step), PQC_OK) << pqc_last_error();
  const Tensor tensor = layer.queries();
  const pqc_tensor queries = tensor.c();
  pqc_page_options options = PQC_INIT(pqc_page_options);
  options.page_tokens = 16;
  uint32_t length = 0;
  int32_t numbers[64];
  pqc_step_pages out = PQC_INIT(pqc_step_pages);
  out.pages = numbers;
  out.capacity = 7;
  out.lengths = &length;
  const auto expect = [&](pqc_status status, const char* field,
                          const pqc_selection* with = nullptr) {
    EXPECT_EQ(pqc_step_topk_pages(step, 0, &queries, with, &options, &out), status)
        << pqc_last_error();
    EXPECT_STREQ(pqc_last_error_field(), field) << pqc_last_error();
  };
  expect(PQC_INVALID_ARGUMENT, "selection");  // the step has none
  expect(PQC_OUT_OF_RANGE, "out.capacity", &terms);
  // floor(0.5 x 290) - 24 = 121 tokens.
  EXPECT_EQ(out.needed, 8u);
  EXPECT_EQ(out.list_count, Layer::kKvHeads);
  EXPECT_EQ(length, 8u);
  out.capacity = 32;
  expect(PQC_OK, "", &terms);
  pqc_selection reranked = terms;
  reranked.rerank_factor = 2;
  expect(PQC_UNIMPLEMENTED, "selection.rerank_factor", &reranked);
  reranked.ratio = 1.0;  // all pages, which need no scores
  expect(PQC_UNIMPLEMENTED, "selection.rerank_factor", &reranked);
  pqc_selection estimated = terms;
  estimated.tail_estimate = 1;
  expect(PQC_UNIMPLEMENTED, "selection.tail_estimate", &estimated);
  pqc_selection by_mass = terms;
  by_mass.budget = PQC_BUDGET_MASS;
  by_mass.attention_mass = 0.9;
  expect(PQC_UNIMPLEMENTED, "selection.attention_mass", &by_mass);
  by_mass.budget = PQC_BUDGET_RATIO;
  expect(PQC_INVALID_ARGUMENT, "selection.attention_mass", &by_mass);
  by_mass.attention_mass = 0;
  by_mass.most_tokens = 5;
  expect(PQC_INVALID_ARGUMENT, "selection.most_tokens", &by_mass);
  estimated.tail_estimate = 2;
  expect(PQC_INVALID_ARGUMENT, "selection.tail_estimate", &estimated);
  for (const uint32_t page_tokens : {0u, 8u, 48u, 128u}) {
    options.page_tokens = page_tokens;
    expect(PQC_INVALID_ARGUMENT, "options.page_tokens", &terms);
  }
  options.page_tokens = 64;
  options.flags = 4;
  expect(PQC_UNIMPLEMENTED, "options.flags", &terms);
  options.flags = 0;
  const uint32_t unknown = 3;
  std::memcpy(&options.heads, &unknown, sizeof(unknown));
  expect(PQC_INVALID_ARGUMENT, "options.heads", &terms);
  options.heads = PQC_HEADS_EACH;
  out.lengths = nullptr;
  expect(PQC_INVALID_ARGUMENT, "out.lengths", &terms);
  out.lengths = &length;
  pqc_selection other_index = terms;
  other_index.index.kind = PQC_INDEX_PQ;
  other_index.index.subspaces = 4;
  other_index.index.bits = 5;
  expect(PQC_FAILED_PRECONDITION, "items[0].selection.index", &other_index);
  pqc_step_abandon(step);
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonPagesTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
