// Queries, selections, positions and ranges that cannot be.
#include <cmath>

#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"
#include "service/wire/wire.h"
#include "tests/service/rpc/bad_input_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

// Peers limit headers to 8 KiB. gRPC writes a byte of the message that is no printable ASCII as
// three, and the details in base64, four for three.
size_t HeaderBytes(const grpc::Status& status) {
  size_t bytes = std::string("grpc-message").size() + std::string("grpc-status-details-bin").size();
  for (const char byte : status.error_message()) {
    bytes += byte >= ' ' && byte <= '~' && byte != '%' ? 1 : 3;
  }
  return bytes + (status.error_details().size() + 2) / 3 * 4;
}
constexpr size_t kMaxHeaderBytes = 8192 - 512;  // of a call's other headers

TEST(WireStatusTest, CutsLongMessagesBetweenCharacters) {
  std::string message = "x";
  for (int i = 0; i < 3000; ++i) message += "\u00fc";
  const grpc::Status status = ToGrpc(absl::InvalidArgumentError(message));
  const std::string sent = status.error_message();
  EXPECT_GT(sent.size(), 500u);
  EXPECT_EQ(sent, message.substr(0, sent.size()));
  EXPECT_EQ(sent.size() % 2, 1u) << "no half character";
  EXPECT_EQ(ToGrpc(absl::InvalidArgumentError(std::string(5000, 'x'))).error_message().size(),
            2048u);
}

TEST(WireStatusTest, MessageAndDetailsFitIntoTheHeadersThatPeersTake) {
  std::string long_text;
  for (int i = 0; i < 3000; ++i) long_text += "\u00fc";
  for (const std::string& text : {std::string(9000, 'x'), std::string(9000, '%'), long_text}) {
    for (const std::string& field :
         {std::string(), std::string("items[255].rows[1023].keys.shape"), std::string(9000, 'f')}) {
      const grpc::Status status =
          ToGrpc(Refuse(absl::StatusCode::kResourceExhausted, field, text, 1234));
      EXPECT_LE(HeaderBytes(status), kMaxHeaderBytes) << field.size() << " " << text.substr(0, 2);
      EXPECT_EQ(RefusedBy(status).retry_ms, 1234u);
    }
  }
}

TEST_F(BadInputTest, SelectionsThatCannotBe) {
  using Q = v1::Query;
  using S = v1::Selection;
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  CheckSelect(
      "k = 0", [](Q&, S& s) { s.set_token_count(20); }, invalid, ".selection.token_count");
  CheckSelect(
      "k > tokens", [](Q&, S& s) { s.set_token_count(kTokens + 1); }, invalid,
      ".selection.token_count");
  CheckSelect(
      "no budget", [](Q&, S& s) { s.clear_budget(); }, invalid, ".selection.budget");
  CheckSelect(
      "ratio 0", [](Q&, S& s) { s.set_token_ratio(0); }, invalid, ".selection.token_ratio");
  CheckSelect(
      "ratio > 1", [](Q&, S& s) { s.set_token_ratio(1.01); }, invalid, ".selection.token_ratio");
  CheckSelect(
      "ratio NaN", [](Q&, S& s) { s.set_token_ratio(NAN); }, invalid, ".selection.token_ratio");
  CheckSelect(
      "mass", [](Q&, S& s) { s.set_attention_mass(1.5); }, invalid, ".selection.attention_mass",
      "must lie in (0, 1]");
  CheckSelect(
      "bounds of the mass",
      [](Q&, S& s) {
        s.set_attention_mass(0.5);
        s.set_least_tokens(9);
        s.set_most_tokens(8);
      },
      invalid, ".selection.least_tokens");
  CheckSelect(
      "bounds without a mass", [](Q&, S& s) { s.set_most_tokens(8); }, invalid,
      ".selection.most_tokens");
  for (const double factor : {-1.0, 0.5, 1e-60, 8.0000001, 8.5, 1e300, static_cast<double>(NAN)}) {
    CheckSelect(
        "rerank", [&](Q&, S& s) { s.set_rerank_factor(factor); }, invalid,
        ".selection.rerank_factor", "must be 0 or lie in [1, 8]");
  }
  CheckSelect(
      "rule", [](Q&, S& s) { s.set_group_rule(static_cast<v1::GroupRule>(50)); }, invalid,
      ".selection.group_rule");
  CheckSelect(
      "sink", [](Q&, S& s) { s.set_sink_tokens(uint64_t{1} << 40); }, invalid,
      ".selection.sink_tokens");
  CheckSelect(
      "window", [](Q&, S& s) { s.set_window_tokens(uint64_t{1} << 40); }, invalid,
      ".selection.window_tokens");
  CheckSelect(
      "index not built", [](Q&, S& s) { *s.mutable_index() = Pq(8, 8); },
      StatusCode::FAILED_PRECONDITION, ".selection.index");
  CheckSelect(
      "m", [](Q&, S& s) { *s.mutable_index() = Pq(3, 4); }, invalid,
      ".selection.index.pq.subspaces");
  CheckSelect(
      "b", [](Q&, S& s) { *s.mutable_index() = Pq(4, 9); }, invalid, ".selection.index.pq.bits");
  CheckSelect(
      "index kind", [](Q&, S& s) { s.mutable_index()->Clear(); }, invalid, ".selection.index.kind");
}

TEST_F(BadInputTest, ExcludedRangesThatCannotBe) {
  const auto exclude = [](std::vector<std::pair<uint64_t, uint64_t>> ranges) {
    return [=](v1::Query&, v1::Selection& s) {
      for (const auto& [begin, end] : ranges) {
        s.add_excluded()->set_begin(begin);
        s.mutable_excluded(s.excluded_size() - 1)->set_end(end);
      }
    };
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  CheckSelect("empty", exclude({{5, 5}}), invalid, ".selection.excluded[0]");
  CheckSelect("backwards", exclude({{9, 5}}), invalid, ".selection.excluded[0]");
  CheckSelect("overlap", exclude({{5, 9}, {8, 12}}), invalid, ".selection.excluded[1]");
  CheckSelect("descending", exclude({{50, 60}, {8, 12}}), invalid, ".selection.excluded[1]");
  CheckSelect("huge", exclude({{5, uint64_t{1} << 40}}), invalid, ".selection.excluded[0].end");
  CheckSelect("too many", exclude(std::vector<std::pair<uint64_t, uint64_t>>(17, {1, 2})), invalid,
              ".selection.excluded");
}

TEST_F(BadInputTest, QueriesThatCannotBe) {
  using Q = v1::Query;
  using S = v1::Selection;
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  CheckSelect(
      "layer", [](Q& q, S&) { q.set_layer(3); }, invalid, ".query.layer");
  CheckSelect(
      "sequence", [](Q& q, S&) { q.set_sequence_id(999); }, StatusCode::NOT_FOUND,
      ".query.sequence_id");
  CheckSelect(
      "position", [](Q& q, S&) { q.set_query_position(uint64_t{1} << 40); }, invalid,
      ".query.query_position");
  CheckSelect(
      "not stored", [](Q& q, S&) { q.set_query_position(kTokens + 100); }, StatusCode::OUT_OF_RANGE,
      ".query.query_position");
  CheckSelect(
      "heads",
      [](Q& q, S&) {
        *q.mutable_queries() = FloatTensor({1, 2, kKeyDim}, 1);
      },
      invalid, ".query.queries.shape");
  CheckSelect(
      "dim",
      [](Q& q, S&) {
        *q.mutable_queries() = FloatTensor({1, kQueryHeads, 64}, 1);
      },
      invalid, ".query.queries.shape");
  CheckSelect(
      "no query", [](Q& q, S&) { q.clear_queries(); }, invalid, ".query.queries.inline_data");
  CheckSelect(
      "length 9",
      [](Q& q, S&) {
        *q.mutable_queries() = FloatTensor({9, kQueryHeads, kKeyDim}, 1);
      },
      invalid, ".query.queries.shape");
  CheckSelect(
      "length 0",
      [](Q& q, S&) {
        *q.mutable_queries() = FloatTensor({0, kQueryHeads, kKeyDim}, 1);
      },
      invalid, ".query.queries.shape");
  CheckSelect(
      "NaN", [](Q& q, S&) { SetElement(q.mutable_queries(), 3, NAN); }, invalid, ".query.queries");
  v1::TopKRequest empty;
  v1::TopKResponse response;
  Check("no items", client_->kv().TopK(client_->Context().get(), empty, &response), invalid,
        "items");
  v1::TopKRequest pages;
  *pages.add_items()->mutable_query() = QueryAt(sequence_id_, 4, kTokens - 1);
  *pages.mutable_items(0)->mutable_selection() = TokenCountSelection(Pq(4, 4), 4, 16, 20);
  for (const uint32_t page_tokens : {0u, 8u, 65u}) {
    pages.mutable_items(0)->mutable_pages()->set_page_tokens(page_tokens);
    Check("page tokens", client_->kv().TopK(client_->Context().get(), pages, &response), invalid,
          "items[0].pages.page_tokens");
  }
  pages.mutable_items(0)->mutable_pages()->set_page_tokens(16);
  pages.mutable_items(0)->mutable_pages()->set_heads(static_cast<v1::HeadRule>(4));
  Check("head rule", client_->kv().TopK(client_->Context().get(), pages, &response), invalid,
        "items[0].pages.heads");
  pages.mutable_items(0)->mutable_pages()->set_heads(v1::HEAD_RULE_EACH);
  pages.mutable_items(0)->mutable_selection()->set_rerank_factor(2);
  Check("pages re-ranked", client_->kv().TopK(client_->Context().get(), pages, &response),
        StatusCode::UNIMPLEMENTED, "items[0].selection.rerank_factor");
  pages.mutable_items(0)->mutable_selection()->set_rerank_factor(1);
  pages.mutable_items(0)->mutable_selection()->set_tail_estimate(true);
  Check("pages with a tail", client_->kv().TopK(client_->Context().get(), pages, &response),
        StatusCode::UNIMPLEMENTED, "items[0].selection.tail_estimate");
  v1::AttendRequest attend;
  *attend.add_items()->mutable_query() = QueryAt(sequence_id_, 4, kTokens - 1);
  v1::AttendResponse attention;
  Check("no tokens", client_->kv().Attend(client_->Context().get(), attend, &attention), invalid,
        "items[0].tokens");
}

TEST_F(BadInputTest, PositionsThatCannotBe) {
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  const auto missing = StatusCode::OUT_OF_RANGE;
  CheckFetchTokens(
      "count 0", [](v1::FetchTokensRequest& r) { r.set_count(0); }, invalid, "count");
  CheckFetchTokens(
      "none", [](v1::FetchTokensRequest& r) { r.clear_positions(); }, invalid, "positions");
  CheckFetchTokens(
      "odd", [](v1::FetchTokensRequest& r) { r.add_positions(5); }, invalid, "positions");
  CheckFetchTokens(
      "one head", [](v1::FetchTokensRequest& r) { r.set_count(4); }, invalid, "positions");
  CheckFetchTokens(
      "more than count says",
      [](v1::FetchTokensRequest& r) {
        r.set_count(1);
        r.mutable_positions()->Resize(100'000, 7);
      },
      invalid, "positions");
  CheckFetchTokens(
      "first not stored", [](v1::FetchTokensRequest& r) { r.set_positions(0, kTokens); }, missing,
      "positions[0]");
  CheckFetchTokens(
      "not stored", [](v1::FetchTokensRequest& r) { r.set_positions(3, kTokens); }, missing,
      "positions[3]");
  CheckFetchTokens(
      "layer", [](v1::FetchTokensRequest& r) { r.set_layer(2); }, invalid, "layer");
  CheckFetchTokens(
      "part", [](v1::FetchTokensRequest& r) { r.set_part(static_cast<v1::RowPart>(9)); }, invalid,
      "part");
  CheckFetchTokens(
      "sequence", [](v1::FetchTokensRequest& r) { r.set_sequence_id(9); }, StatusCode::NOT_FOUND,
      "sequence_id");
  CheckAttendPositions(
      "count 0", [](v1::TokenPositions& p) { p.set_count(0); }, invalid,
      "items[0].positions.count");
  CheckAttendPositions(
      "none", [](v1::TokenPositions& p) { p.clear_positions(); }, invalid,
      "items[0].positions.positions");
  CheckAttendPositions(
      "one head", [](v1::TokenPositions& p) { p.set_count(4); }, invalid,
      "items[0].positions.positions");
  CheckAttendPositions(
      "repeated", [](v1::TokenPositions& p) { p.set_positions(1, 1); }, invalid,
      "items[0].positions.positions[1]");
  CheckAttendPositions(
      "descending", [](v1::TokenPositions& p) { p.set_positions(2, 9); }, invalid,
      "items[0].positions.positions[3]");
  CheckAttendPositions(
      "not stored", [](v1::TokenPositions& p) { p.set_positions(3, kTokens); }, missing,
      "items[0].positions.positions[3]");
}

TEST_F(BadInputTest, LogitsOfPositionsThatCannotBe) {
  const StatusCode invalid = StatusCode::INVALID_ARGUMENT;
  CheckAttendPositions(
      "queries and logits",
      [](v1::TokenPositions& p) { p.mutable_logits()->set_inline_data("1234"); }, invalid,
      "items[0].query.queries");
  const std::string logits = "items[0].positions.logits";
  using Tensor = v1::Tensor;
  CheckLogits(
      "none", [](Tensor& t, v1::TokenPositions&) { t.clear_data(); }, invalid,
      logits + ".inline_data");
  CheckLogits(
      "dtype", [](Tensor& t, v1::TokenPositions&) { t.set_dtype(static_cast<v1::DType>(9)); },
      invalid, logits + ".dtype");
  CheckLogits(
      "too few", [](Tensor& t, v1::TokenPositions&) { t.mutable_inline_data()->pop_back(); },
      invalid, logits + ".shape");
  CheckLogits(
      "more positions",
      [](Tensor&, v1::TokenPositions& p) {
        p.set_count(3);
        p.clear_positions();
        for (const uint32_t position : {1, 2, 3, 4, 5, 6}) p.add_positions(position);
      },
      invalid, logits + ".shape");
  CheckLogits(
      "no tokens", [](Tensor& t, v1::TokenPositions&) { t.set_shape(0, 0); }, invalid,
      logits + ".shape");
  CheckLogits(
      "nine tokens",
      [](Tensor& t, v1::TokenPositions&) {
        t.set_shape(0, 9);
        t.mutable_inline_data()->resize(9 * t.inline_data().size());
      },
      invalid, logits + ".shape");
  CheckLogits(
      "staging", [](Tensor& t, v1::TokenPositions&) { t.mutable_staging()->set_size_bytes(4); },
      invalid, logits + ".staging");
  for (const float bad : {NAN, INFINITY}) {
    CheckLogits(
        "not a number",
        [bad](Tensor& t, v1::TokenPositions&) {
          t.mutable_inline_data()->replace(4, 4, reinterpret_cast<const char*>(&bad), 4);
        },
        invalid, logits);
  }
  CheckLogits(
      "descending", [](Tensor&, v1::TokenPositions& p) { p.set_positions(2, 9); }, invalid,
      "items[0].positions.positions[3]");
  CheckLogits(
      "not stored", [](Tensor&, v1::TokenPositions& p) { p.set_positions(3, kTokens); },
      StatusCode::OUT_OF_RANGE, "items[0].positions.positions[3]");
}

TEST_F(BadInputTest, RangesToAttendToThatCannotBe) {
  using Item = v1::AttendRangeItem;
  const StatusCode invalid = StatusCode::INVALID_ARGUMENT;
  CheckAttendRange(
      "no range", [](Item& item) { item.clear_tokens(); }, invalid, ".tokens");
  CheckAttendRange(
      "backwards", [](Item& item) { item.mutable_tokens()->set_begin(kTokens + 1); }, invalid,
      ".tokens");
  CheckAttendRange(
      "beyond", [](Item& item) { item.mutable_tokens()->set_end(kTokens + 1); },
      StatusCode::OUT_OF_RANGE, ".tokens");
  CheckAttendRange(
      "huge", [](Item& item) { item.mutable_tokens()->set_end(uint64_t{1} << 40); }, invalid,
      ".tokens.end");
  CheckAttendRange(
      "layer", [](Item& item) { item.mutable_query()->set_layer(77); }, invalid, ".query.layer");
  CheckAttendRange(
      "sequence", [](Item& item) { item.mutable_query()->set_sequence_id(999); },
      StatusCode::NOT_FOUND, ".query.sequence_id");
  CheckAttendRange(
      "position", [](Item& item) { item.mutable_query()->set_query_position(uint64_t{1} << 30); },
      invalid, ".query.query_position");
  // A shape that says more than there is, with and without strides that hide it.
  CheckAttendRange(
      "tokens without bytes",
      [](Item& item) { item.mutable_query()->mutable_queries()->set_shape(0, 1000); }, invalid,
      ".query.queries.shape");
  CheckAttendRange(
      "a negative stride",
      [](Item& item) {
        v1::Tensor* queries = item.mutable_query()->mutable_queries();
        queries->set_shape(0, 300);
        for (const int64_t stride : {-1, 0, 0}) queries->add_strides(stride);
      },
      invalid, ".query.queries.strides");
  CheckAttendRange(
      "no tokens", [](Item& item) { item.mutable_query()->mutable_queries()->set_shape(0, 0); },
      invalid, ".query.queries.shape");
  CheckAttendRange(
      "two dimensions",
      [](Item& item) { item.mutable_query()->mutable_queries()->mutable_shape()->RemoveLast(); },
      invalid, ".query.queries.shape");
}

TEST_F(BadInputTest, RangesThatCannotBe) {
  const auto fetch = [&](uint64_t begin, uint64_t end) {
    v1::FetchBlocksRequest request;
    request.set_sequence_id(sequence_id_);
    request.set_layer(4);
    request.add_ranges()->set_end(1);
    request.add_ranges()->set_begin(begin);
    request.mutable_ranges(1)->set_end(end);
    v1::FetchBlocksResponse response;
    return client_->kv().FetchBlocks(client_->Context().get(), request, &response);
  };
  v1::FetchBlocksRequest first;
  first.set_sequence_id(sequence_id_);
  first.set_layer(4);
  first.add_ranges()->set_begin(kTokens);
  first.mutable_ranges(0)->set_end(kTokens + 1);
  v1::FetchBlocksResponse blocks;
  Check("first not stored", client_->kv().FetchBlocks(client_->Context().get(), first, &blocks),
        StatusCode::OUT_OF_RANGE, "ranges[0]");
  Check("empty", fetch(5, 5), StatusCode::INVALID_ARGUMENT, "ranges[1]");
  Check("backwards", fetch(7, 5), StatusCode::INVALID_ARGUMENT, "ranges[1]");
  Check("not stored", fetch(7, kTokens + 1), StatusCode::OUT_OF_RANGE, "ranges[1]");
  Check("huge", fetch(7, uint64_t{1} << 50), StatusCode::INVALID_ARGUMENT, "ranges[1].end");
  v1::FetchBlocksRequest none;
  none.set_sequence_id(sequence_id_);
  v1::FetchBlocksResponse response;
  Check("none", client_->kv().FetchBlocks(client_->Context().get(), none, &response),
        StatusCode::INVALID_ARGUMENT, "ranges");
  v1::ScoreRequest score;
  *score.add_items()->mutable_query() = QueryAt(sequence_id_, 4, kTokens - 1);
  v1::ScoreResponse scores;
  Check("score nothing", client_->kv().Score(client_->Context().get(), score, &scores),
        StatusCode::INVALID_ARGUMENT, "items[0].tokens");
  score.mutable_items(0)->mutable_tokens()->set_end(kTokens + 1);
  Check("score beyond", client_->kv().Score(client_->Context().get(), score, &scores),
        StatusCode::OUT_OF_RANGE, "items[0].tokens");
}

}  // namespace
}  // namespace pqcached::service
