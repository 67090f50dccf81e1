// Rows, builds, caches and sequences that cannot be.
#include <cmath>
#include <limits>

#include "tests/service/rpc/bad_input_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

TEST_F(BadInputTest, IngestOfWrongShapes) {
  const auto shape = [](int dimension, uint64_t extent) {
    return [=](v1::IngestChunk& chunk) {
      chunk.mutable_rows()->mutable_keys()->set_shape(dimension, extent);
    };
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  CheckIngest("more heads", shape(1, 4), invalid, "chunk.rows.keys.shape");
  CheckIngest("other dim", shape(2, 40), invalid, "chunk.rows.keys.shape");
  CheckIngest("no tokens", shape(0, 0), invalid, "chunk.rows.keys.shape");
  CheckIngest("beyond the data", shape(0, 4), invalid, "chunk.rows.keys.shape");
  CheckIngest("huge", shape(0, std::numeric_limits<uint64_t>::max()), invalid,
              "chunk.rows.keys.shape");
  CheckIngest(
      "huge without data",
      [](v1::IngestChunk& chunk) {
        v1::Tensor* keys = chunk.mutable_rows()->mutable_keys();
        keys->set_shape(0, uint64_t{1} << 30);
        for (const int64_t stride : {0, 0, 0}) keys->add_strides(stride);
      },
      invalid, "chunk.rows.keys.shape");
  CheckIngest(
      "two dimensions",
      [](v1::IngestChunk& chunk) {
        chunk.mutable_rows()->mutable_values()->mutable_shape()->RemoveLast();
      },
      invalid, "chunk.rows.values.shape");
  CheckIngest(
      "five dimensions",
      [](v1::IngestChunk& chunk) {
        for (int i = 0; i < 2; ++i) chunk.mutable_rows()->mutable_values()->add_shape(1);
      },
      invalid, "chunk.rows.values.shape");
  CheckIngest(
      "keys and values differ",
      [](v1::IngestChunk& chunk) {
        *chunk.mutable_rows() = RowsOf(4, kTokens, 3);
        *chunk.mutable_rows()->mutable_values() = RowsOf(4, kTokens, 2).values();
      },
      invalid, "chunk.rows.values.shape");
}

TEST_F(BadInputTest, IngestOfWrongStridesAndTypes) {
  const auto strides = [](std::vector<int64_t> values) {
    return [=](v1::IngestChunk& chunk) {
      chunk.mutable_rows()->mutable_keys()->mutable_strides()->Assign(values.begin(), values.end());
    };
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  CheckIngest("two strides", strides({64, 32}), invalid, "chunk.rows.keys.strides");
  CheckIngest("beyond the data", strides({64, 32, 2}), invalid, "chunk.rows.keys.strides");
  CheckIngest("before the data", strides({-64, 32, 1}), invalid, "chunk.rows.keys.strides");
  CheckIngest("overflow", strides({std::numeric_limits<int64_t>::max(), 32, 1}), invalid,
              "chunk.rows.keys.strides");
  CheckIngest(
      "dtype unset",
      [](v1::IngestChunk& chunk) { chunk.mutable_rows()->mutable_keys()->clear_dtype(); }, invalid,
      "chunk.rows.keys.dtype");
  CheckIngest(
      "dtype unknown",
      [](v1::IngestChunk& chunk) {
        chunk.mutable_rows()->mutable_values()->set_dtype(static_cast<v1::DType>(77));
      },
      invalid, "chunk.rows.values.dtype");
  CheckIngest(
      "no data",
      [](v1::IngestChunk& chunk) { chunk.mutable_rows()->mutable_keys()->clear_inline_data(); },
      invalid, "chunk.rows.keys.inline_data");
  CheckIngest(
      "staging",
      [](v1::IngestChunk& chunk) {
        chunk.mutable_rows()->mutable_keys()->mutable_staging()->set_slot(1);
      },
      StatusCode::FAILED_PRECONDITION, "chunk.rows.keys.staging");
}

TEST_F(BadInputTest, IngestOfQuerySamples) {
  // Samples of one position of layer 4, which are well-formed.
  const auto samples = [](const std::function<void(v1::QuerySamples&)>& change) {
    return [=](v1::IngestChunk& chunk) {
      v1::QuerySamples* const good = chunk.add_query_samples();
      good->set_layer(4);
      good->add_positions(kTokens);
      v1::Tensor* const queries = good->mutable_queries();
      queries->set_dtype(v1::DTYPE_FLOAT32);
      for (const uint64_t extent : {1u, kQueryHeads, kKeyDim}) queries->add_shape(extent);
      queries->set_inline_data(std::string(kQueryHeads * kKeyDim * sizeof(float), 0));
      change(*good);
    };
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  const std::string field = "chunk.query_samples[0]";
  CheckIngest("layer", samples([](auto& s) { s.set_layer(77); }), invalid, field + ".layer");
  CheckIngest("gap", samples([](auto& s) { s.set_positions(0, kTokens + 100); }), invalid,
              "query_samples.positions");
  CheckIngest("huge", samples([](auto& s) { s.set_positions(0, ~uint64_t{0}); }), invalid,
              field + ".positions[0]");
  CheckIngest("two positions", samples([](auto& s) { s.add_positions(kTokens + 1); }), invalid,
              field + ".queries.shape");
  CheckIngest("no positions", samples([](auto& s) { s.clear_positions(); }), invalid,
              field + ".queries.shape");
  CheckIngest(
      "a layer twice",
      [&](v1::IngestChunk& chunk) {
        samples([](auto&) {})(chunk);
        samples([](auto&) {})(chunk);
      },
      invalid, "chunk.query_samples[1].layer", "listed twice");
  CheckIngest("no queries", samples([](auto& s) { s.clear_queries(); }), invalid,
              field + ".queries.inline_data");
  CheckIngest("short",
              samples([](auto& s) { s.mutable_queries()->mutable_inline_data()->pop_back(); }),
              invalid, field + ".queries.shape");
  CheckIngest("NaN", samples([](auto& s) { SetElement(s.mutable_queries(), 3, std::nanf("")); }),
              invalid, field + ".queries", "layer 4: position");
}

TEST_F(BadInputTest, IngestOfBadNumbers) {
  const auto number = [](bool in_keys, size_t index, float value) {
    return [=](v1::IngestChunk& chunk) {
      v1::LayerRows* rows = chunk.mutable_rows();
      SetElement(in_keys ? rows->mutable_keys() : rows->mutable_values(), index, value);
    };
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  CheckIngest("NaN", number(true, 0, std::nanf("")), invalid, "chunk.rows.keys", "token 300");
  CheckIngest("infinity", number(true, kKvHeads * kKeyDim * 3 - 1, INFINITY), invalid,
              "chunk.rows.keys");
  CheckIngest("NaN value", number(false, kKvHeads * kValueDim, -INFINITY), invalid,
              "chunk.rows.values");
}

TEST_F(BadInputTest, IngestOfWrongLayersAndPositions) {
  const auto layer = [](uint32_t number) {
    return [=](v1::IngestChunk& chunk) { chunk.mutable_rows()->set_layer(number); };
  };
  const auto position = [](uint64_t first) {
    return [=](v1::IngestChunk& chunk) { chunk.set_first_position(first); };
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  CheckIngest("unknown layer", layer(3), invalid, "chunk.rows.layer");
  CheckIngest("layer of kind none", layer(2), invalid, "chunk.rows.layer");
  CheckIngest("huge layer", layer(4'000'000'000), invalid, "chunk.rows.layer");
  CheckIngest("gap", position(kTokens + 1), invalid, "chunk.first_position");
  CheckIngest("partly stored", position(kTokens - 1), invalid, "chunk.first_position");
  CheckIngest("too far", position(uint64_t{1} << 40), StatusCode::OUT_OF_RANGE,
              "chunk.first_position");
  CheckIngest("overflow", position(std::numeric_limits<uint64_t>::max()), StatusCode::OUT_OF_RANGE,
              "chunk.first_position");
  CheckIngest(
      "no rows", [](v1::IngestChunk& chunk) { chunk.clear_rows(); }, invalid, "chunk.rows");
}

TEST_F(BadInputTest, IngestOutOfOrder) {
  const auto send = [&](std::vector<v1::IngestRequest> requests) {
    const auto context = client_->Context();
    v1::IngestResponse response;
    const auto writer = client_->kv().Ingest(context.get(), &response);
    for (const v1::IngestRequest& request : requests) writer->Write(request);
    writer->WritesDone();
    return writer->Finish();
  };
  v1::IngestRequest header;
  header.mutable_header()->set_sequence_id(open_id_);
  v1::IngestRequest closed_header;
  closed_header.mutable_header()->set_sequence_id(sequence_id_);
  v1::IngestRequest unknown_header;
  unknown_header.mutable_header()->set_sequence_id(999);
  v1::IngestRequest chunk;
  chunk.mutable_chunk()->set_first_position(kTokens);
  *chunk.mutable_chunk()->mutable_rows() = RowsOf(1, kTokens, 1);
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  Check("nothing", send({}), invalid, "header");
  Check("empty message", send({v1::IngestRequest()}), invalid, "request");
  Check("no header", send({chunk}), invalid, "header");
  Check("two headers", send({header, header}), invalid, "header");
  Check("unknown sequence", send({unknown_header}), StatusCode::NOT_FOUND, "header.sequence_id");
  chunk.mutable_chunk()->set_first_position(kTokens + 1);
  Check("a gap", send({closed_header, chunk}), invalid, "chunk.first_position");
}

TEST_F(BadInputTest, IngestBesideAnotherWriterIsAborted) {
  const auto context = client_->Context();
  v1::IngestResponse response;
  const auto writer = client_->kv().Ingest(context.get(), &response);
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(open_id_);
  writer->Write(request);
  request.mutable_chunk()->set_first_position(kTokens);
  *request.mutable_chunk()->mutable_rows() =
      RowsOf(3, kTokens, 1);  // no such layer: the answer tells that it was seen
  // While the first one is open, a second one may or may not be ahead of it; one of the two is
  // refused.
  v1::IngestResponse second_response;
  const auto second_context = client_->Context();
  const auto second = client_->kv().Ingest(second_context.get(), &second_response);
  v1::IngestRequest header;
  header.mutable_header()->set_sequence_id(open_id_);
  second->Write(header);
  second->WritesDone();
  writer->Write(request);
  writer->WritesDone();
  const grpc::Status first_status = writer->Finish();
  const grpc::Status second_status = second->Finish();
  EXPECT_TRUE(first_status.error_code() == StatusCode::ABORTED ||
              first_status.error_code() == StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(second_status.ok() || second_status.error_code() == StatusCode::ABORTED);
  EXPECT_TRUE(Dump(*client_, sequence_id_) + Dump(*client_, open_id_) == before_);
}

TEST_F(BadInputTest, OversizedMessages) {
  CheckIngest(
      "oversized",
      [&](v1::IngestChunk& chunk) {
        chunk.mutable_rows()->mutable_keys()->mutable_inline_data()->append(
            config_.max_message_bytes + (1 << 17), 'x');
      },
      StatusCode::RESOURCE_EXHAUSTED, "", "larger than max");
}

TEST_F(BadInputTest, OversizedResponses) {
  v1::FetchBlocksRequest request;
  request.set_sequence_id(sequence_id_);
  request.set_layer(1);
  for (int i = 0; i < 64; ++i) request.add_ranges()->set_end(kTokens);
  v1::FetchBlocksResponse response;
  Check("FetchBlocks", client_->kv().FetchBlocks(client_->Context().get(), request, &response),
        StatusCode::RESOURCE_EXHAUSTED, "response", "max_message_bytes");
  CheckFetchTokens(
      "positions",
      [](v1::FetchTokensRequest& tokens) {
        tokens.set_count(10000);
        tokens.mutable_positions()->Resize(20000, 7);
      },
      StatusCode::RESOURCE_EXHAUSTED, "response", "max_message_bytes");
  v1::ScoreRequest score;
  for (int i = 0; i < 256; ++i) {
    *score.add_items()->mutable_query() = QueryAt(sequence_id_, 1, kTokens - 1);
    score.mutable_items(i)->mutable_tokens()->set_end(kTokens);
  }
  v1::ScoreResponse scores;
  Check("Score", client_->kv().Score(client_->Context().get(), score, &scores),
        StatusCode::RESOURCE_EXHAUSTED, "response", "max_message_bytes");
}

TEST_F(BadInputTest, AppendOfWrongRows) {
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  CheckAppend(
      "gap", [](v1::SequenceAppend& item) { item.set_first_position(kTokens + 5); }, invalid,
      "items[0].first_position");
  CheckAppend(
      "partly stored", [](v1::SequenceAppend& item) { item.set_first_position(kTokens - 1); },
      invalid, "items[0].first_position");
  CheckAppend(
      "missing layer", [](v1::SequenceAppend& item) { item.mutable_rows()->RemoveLast(); }, invalid,
      "items[0].rows");
  CheckAppend(
      "layer twice", [](v1::SequenceAppend& item) { item.mutable_rows(1)->set_layer(1); }, invalid,
      "items[0].rows[1].layer");
  CheckAppend(
      "unequal counts",
      [](v1::SequenceAppend& item) { *item.mutable_rows(1) = RowsOf(4, kTokens, 1); }, invalid,
      "items[0].rows[1].keys.shape");
  CheckAppend(
      "wrong shape",
      [](v1::SequenceAppend& item) { item.mutable_rows(1)->mutable_values()->set_shape(2, 32); },
      invalid, "items[0].rows[1].values.shape");
  CheckAppend(
      "NaN",
      [](v1::SequenceAppend& item) {
        SetElement(item.mutable_rows(1)->mutable_keys(), 5, std::nanf(""));
      },
      invalid, "items[0].rows[1].keys", "token 300");
  CheckAppend(
      "no data",
      [](v1::SequenceAppend& item) { item.mutable_rows(1)->mutable_keys()->clear_inline_data(); },
      invalid, "items[0].rows[1].keys.inline_data");
  CheckAppend(
      "unknown sequence", [](v1::SequenceAppend& item) { item.set_sequence_id(999); },
      StatusCode::NOT_FOUND, "items[0].sequence_id");
  v1::AppendRequest request;
  v1::AppendResponse response;
  Check("no items", client_->kv().Append(client_->Context().get(), request, &response), invalid,
        "items");
  for (int i = 0; i < 257; ++i) request.add_items()->set_sequence_id(static_cast<uint64_t>(i));
  Check("too many", client_->kv().Append(client_->Context().get(), request, &response), invalid,
        "items");
  request.mutable_items()->DeleteSubrange(2, 255);
  request.mutable_items(1)->set_sequence_id(0);
  Check("sequence twice", client_->kv().Append(client_->Context().get(), request, &response),
        invalid, "items[1].sequence_id");
}

TEST_F(BadInputTest, TruncateOutOfRange) {
  v1::TruncateSequenceRequest request;
  v1::TruncateSequenceResponse response;
  request.set_sequence_id(sequence_id_);
  request.set_token_count(kTokens + 1);
  const auto call = [&] {
    return client_->kv().TruncateSequence(client_->Context().get(), request, &response);
  };
  Check("beyond", call(), StatusCode::INVALID_ARGUMENT, "token_count");
  request.set_sequence_id(999);
  Check("unknown", call(), StatusCode::NOT_FOUND, "sequence_id");
}

TEST_F(BadInputTest, BuildsThatCannotBe) {
  using B = v1::BuildIndexRequest;
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  Check("twice", Build([](B& b) { *b.mutable_index() = Pq(4, 4); }), StatusCode::ALREADY_EXISTS,
        "index", "pq m=4 b=4");
  Check("flat", Build([](B& b) { *b.mutable_index() = Flat(); }), invalid, "index.flat");
  Check("default is flat", Build([](B& b) { b.clear_index(); }), invalid, "index.flat");
  Check("m", Build([](B& b) { *b.mutable_index() = Pq(5, 4); }), invalid, "index.pq.subspaces");
  Check("b", Build([](B& b) { *b.mutable_index() = Pq(4, 0); }), invalid, "index.pq.bits");
  Check("layout", Build([](B& b) {
          b.mutable_index()->mutable_pq()->set_layout(static_cast<v1::PqIndex::Layout>(3));
        }),
        invalid, "index.pq.layout");
  const auto typed = [&](const char* type, const char* name, uint64_t number,
                         const char* value = nullptr) {
    return Build([=](B& b) {
      b.mutable_index()->mutable_typed()->set_type(type);
      v1::IndexValue& given = (*b.mutable_index()->mutable_typed()->mutable_parameters())[name];
      if (value != nullptr) given.set_name(value);
      if (value == nullptr && number > 0) given.set_number(number);
    });
  };
  const std::string parameters = "index.typed.parameters";
  Check("type", typed("hnsw", "m", 16), invalid, "index.typed.type", "no such index type");
  Check("parameter", typed("pq", "lists", 16), invalid, parameters + "[lists]", "no parameter");
  Check("range", typed("pq", "bits", 9), invalid, parameters + "[bits]", "must lie in [1, 8]");
  Check("kind", typed("pq", "bits", 0, "many"), invalid, parameters + "[bits]", "many");
  Check("name", typed("pq", "layout", 0, "odd"), invalid, parameters + "[layout]", "odd");
  Check("no value", typed("pq", "bits", 0), invalid, parameters + "[bits]", "missing");
  Check("typed flat", Build([](B& b) { b.mutable_index()->mutable_typed()->set_type("flat"); }),
        invalid, "index.flat");
  Check("drift", Build([](B& b) { b.mutable_rebuild()->set_drift_ratio(-1); }), invalid,
        "rebuild.drift_ratio");
  Check("iterations", Build([](B& b) { b.set_iterations(1001); }), invalid, "iterations");
  Check("train_tokens", Build([](B& b) { b.set_train_tokens(uint64_t{1} << 40); }), invalid,
        "train_tokens");
  Check("sink_tokens", Build([](B& b) { b.set_sink_tokens(uint64_t{1} << 40); }), invalid,
        "sink_tokens");
  Check("layers", Build([](B& b) { b.add_layers(1); }), StatusCode::UNIMPLEMENTED, "layers");
  Check("sequence", Build([](B& b) { b.set_sequence_id(999); }), StatusCode::NOT_FOUND,
        "sequence_id");
  const uint64_t empty_id = client_->NewSequence();
  EXPECT_TRUE(Failed(Build([&](B& b) { b.set_sequence_id(empty_id); }),
                     StatusCode::FAILED_PRECONDITION, "sequence_id", "no tokens"));
}

TEST_F(BadInputTest, CachesThatCannotBe) {
  const auto open = [&](const std::function<void(v1::OpenCacheRequest&)>& change,
                        const std::string& name = "other") {
    v1::OpenCacheRequest request = CacheRequest(name);
    change(request);
    v1::OpenCacheResponse response;
    return client_->kv().OpenCache(client_->Context().get(), request, &response);
  };
  using R = v1::OpenCacheRequest;
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  const auto unimplemented = StatusCode::UNIMPLEMENTED;
  const auto group = [](const std::function<void(v1::LayerGroup&)>& change) {
    return [=](R& r) { change(*r.mutable_layer_groups(0)); };
  };
  using G = v1::LayerGroup;
  Check("name", open([](R& r) { r.clear_name(); }), invalid, "name");
  Check("fingerprint", open([](R& r) { r.clear_model_fingerprint(); }), invalid,
        "model_fingerprint");
  Check("too large", open([](R& r) { r.set_capacity_bytes(uint64_t{1} << 50); }),
        StatusCode::RESOURCE_EXHAUSTED, "capacity_bytes", "short");
  Check("quota", open([](R& r) { r.set_quota_bytes(uint64_t{1} << 50); }), invalid, "quota_bytes");
  Check("numa", open([](R& r) { r.mutable_rank()->set_numa_node(1); }), unimplemented,
        "rank.numa_node");
  Check("no numa", open([](R& r) { r.mutable_rank()->set_numa_node(-2); }), invalid,
        "rank.numa_node");
  Check("none with extras",
        open([](R& r) { r.mutable_layer_groups(1)->set_values_alias_keys(true); }), unimplemented,
        "layer_groups[1].values_alias_keys");
  Check("groups", open([](R& r) { r.clear_layer_groups(); }), invalid, "layer_groups");
  Check("prefill", open([](R& r) { r.mutable_prefill_cost()->set_seconds_per_token(-1); }), invalid,
        "prefill_cost.seconds_per_token", "must lie in [0, 1]");
  Check("not a number", open([](R& r) { r.mutable_prefill_cost()->set_seconds(std::nan("")); }),
        invalid, "prefill_cost.seconds");
  Check("measured and reported", open([](R& r) {
          r.mutable_prefill_cost()->set_measured(true);
          r.mutable_prefill_cost()->set_seconds_per_token_squared(1e-9);
        }),
        invalid, "prefill_cost.seconds_per_token_squared", "measured");
  Check("index", open([](R& r) { *r.mutable_default_index() = Pq(3, 4); }), invalid,
        "default_index.pq.subspaces");
  Check("layout", open([](R& r) {
          *r.mutable_default_index() = Pq(4, 4);
          r.mutable_default_index()->mutable_pq()->set_layout(static_cast<v1::PqIndex::Layout>(-1));
        }),
        invalid, "default_index.pq.layout");
  Check("kind", open(group([](G& g) { g.clear_kind(); })), invalid, "layer_groups[0].kind");
  Check("other kind", open(group([](G& g) { g.set_kind(static_cast<v1::LayerKind>(6)); })), invalid,
        "layer_groups[0].kind");
  Check("window of nothing", open(group([](G& g) { g.set_kind(v1::LAYER_KIND_WINDOW); })), invalid,
        "layer_groups[0].window_tokens");
  Check("full with window", open(group([](G& g) {
          g.set_kind(v1::LAYER_KIND_FULL);
          g.set_window_tokens(7);
        })),
        invalid, "layer_groups[0].window_tokens");
  Check("layer twice", open(group([](G& g) { g.set_layers(1, 2); })), invalid,
        "layer_groups[1].layers[0]");
  Check("layers", open(group([](G& g) { g.set_layers(1, 1); })), invalid,
        "layer_groups[0].layers[1]");
  Check("far layer", open(group([](G& g) { g.set_layers(1, 1024); })), invalid,
        "layer_groups[0].layers[1]");
  Check("kv_heads", open(group([](G& g) { g.set_kv_heads(0); })), invalid,
        "layer_groups[0].kv_heads");
  Check("query_heads", open(group([](G& g) { g.set_query_heads(5); })), invalid,
        "layer_groups[0].query_heads");
  Check("key_dim", open(group([](G& g) { g.set_key_dim(36); })), invalid,
        "layer_groups[0].key_dim");
  Check("value_dim", open(group([](G& g) { g.set_value_dim(264); })), invalid,
        "layer_groups[0].value_dim");
  Check("no values", open(group([](G& g) { g.set_value_dim(0); })), unimplemented,
        "layer_groups[0].value_dim");
  Check("dtype", open(group([](G& g) { g.clear_dtype(); })), invalid, "layer_groups[0].dtype");
  Check("scale", open(group([](G& g) { g.set_softmax_scale(NAN); })), invalid,
        "layer_groups[0].softmax_scale");
  Check("softcap", open(group([](G& g) { g.set_softcap(-1); })), invalid,
        "layer_groups[0].softcap");
  Check("alias", open(group([](G& g) { g.set_values_alias_keys(true); })), unimplemented,
        "layer_groups[0].values_alias_keys");
  Check("scales", open(group([](G& g) { g.add_scale_shape(1); })), unimplemented,
        "layer_groups[0].scale_shape");
  Check("window_tokens", open(group([](G& g) { g.set_window_tokens(1); })), invalid,
        "layer_groups[0].window_tokens");
  Check("rope", open(group([](G& g) { g.mutable_rope()->set_rotary_dim(64); })), invalid,
        "layer_groups[0].rope.rotary_dim");
  Check("other fingerprint", open([](R& r) { r.set_model_fingerprint("model-2"); }, "cache"),
        StatusCode::FAILED_PRECONDITION, "model_fingerprint");
  Check("another kind", open(group([](G& g) { g.set_kind(v1::LAYER_KIND_FULL); }), "cache"),
        StatusCode::FAILED_PRECONDITION, "layer_groups[0].kind");
  Check("other rope", open(group([](G& g) { g.mutable_rope()->set_theta(1e4); }), "cache"),
        StatusCode::FAILED_PRECONDITION, "layer_groups[0].rope");
  Check("other shape", open(group([](G& g) { g.set_key_dim(64); }), "cache"),
        StatusCode::FAILED_PRECONDITION, "layer_groups[0].key_dim");
}

TEST_F(BadInputTest, SequencesThatCannotBe) {
  v1::CreateSequenceRequest request;
  v1::CreateSequenceResponse response;
  request.set_cache_id(999);
  Check("cache", client_->kv().CreateSequence(client_->Context().get(), request, &response),
        StatusCode::NOT_FOUND, "cache_id");
  request.set_cache_id(client_->OpenCache());
  request.set_model_fingerprint("model-2");
  Check("fingerprint", client_->kv().CreateSequence(client_->Context().get(), request, &response),
        StatusCode::FAILED_PRECONDITION, "model_fingerprint");
  request.set_model_fingerprint(std::string(257, 'a'));
  Check("long", client_->kv().CreateSequence(client_->Context().get(), request, &response),
        StatusCode::INVALID_ARGUMENT, "model_fingerprint");
}

TEST_F(BadInputTest, DroppedSequencesAreNotFound) {
  const uint64_t dropped_id = client_->Filled(40);
  v1::DropSequenceRequest drop;
  drop.set_sequence_id(dropped_id);
  v1::DropSequenceResponse dropped;
  ASSERT_TRUE(client_->kv().DropSequence(client_->Context().get(), drop, &dropped).ok());
  v1::TopKRequest request;
  *request.add_items()->mutable_query() = QueryAt(dropped_id, 1, 39);
  *request.mutable_items(0)->mutable_selection() = TokenCountSelection(Flat(), 1, 1, 1);
  v1::TopKResponse response;
  Check("dropped", client_->kv().TopK(client_->Context().get(), request, &response),
        StatusCode::NOT_FOUND, "items[0].query.sequence_id");
  *request.mutable_items(0) = {};
  *request.mutable_items(0)->mutable_query() = QueryAt(sequence_id_, 1, 39);
  *request.mutable_items(0)->mutable_selection() = TokenCountSelection(Flat(), 1, 1, 1);
  *request.add_items()->mutable_query() = QueryAt(999, 1, 39);
  *request.mutable_items(1)->mutable_selection() = TokenCountSelection(Flat(), 1, 1, 1);
  request.mutable_items(1)->mutable_selection()->clear_index();
  Check("the cache's default", client_->kv().TopK(client_->Context().get(), request, &response),
        StatusCode::NOT_FOUND, "items[1].query.sequence_id");
}

TEST_F(BadInputTest, AFullPoolTellsTheShortfall) {
  const uint64_t cache_id = [&] {
    v1::OpenCacheRequest request = CacheRequest("small");
    request.set_capacity_bytes(4 * 65536);
    v1::OpenCacheResponse response;
    EXPECT_TRUE(client_->kv().OpenCache(client_->Context().get(), request, &response).ok());
    return response.cache_id();
  }();
  const uint64_t sequence_id = client_->CreateSequence(cache_id);
  client_->Ingest(sequence_id, 0, 128);
  const std::string before = Dump(*client_, sequence_id);
  v1::AppendRequest request;
  v1::SequenceAppend* item = request.add_items();
  item->set_sequence_id(sequence_id);
  item->set_first_position(128);
  for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, 128, 1);
  v1::AppendResponse response;
  EXPECT_TRUE(Failed(client_->kv().Append(client_->Context().get(), request, &response),
                     StatusCode::RESOURCE_EXHAUSTED, "items[0]", "bytes"));
  EXPECT_TRUE(Dump(*client_, sequence_id) == before);
}

}  // namespace
}  // namespace pqcached::service
