// Nodes and masks of llama.cpp's graphs, and the settings of the plug-in.
#include "client/engines/llama/attention.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "client/engines/llama/settings.h"

namespace pqcached::llama {
namespace {

constexpr uint16_t kHidden = 0xfc00;

// A node with its K, V and mask, as llama.cpp makes them: K and V are views of the cache, permuted
// to [dim, cells, kv heads, streams], with rows [token][kv head][dim].
struct Node {
  Node(uint32_t dim, uint32_t heads, uint32_t kv_heads, uint32_t tokens, uint32_t cells,
       uint32_t streams = 1)
      : seen(size_t{streams} * tokens * cells, kHidden) {
    const auto set = [](GgmlTensor* tensor, GgmlType type, size_t element,
                        std::vector<int64_t> shape) {
      tensor->type = type;
      for (size_t i = 0; i < 4; ++i) {
        tensor->ne[i] = shape[i];
        tensor->nb[i] = i == 0 ? element : tensor->nb[i - 1] * static_cast<size_t>(shape[i - 1]);
      }
    };
    set(&q, kGgmlF32, 4, {dim, tokens, heads, streams});
    for (GgmlTensor* rows : {&k, &v}) {
      set(rows, kGgmlF16, 2, {dim, cells, kv_heads, streams});
      rows->nb[1] = size_t{2} * dim * kv_heads;
      rows->nb[2] = size_t{2} * dim;
      rows->nb[3] = rows->nb[1] * cells;
    }
    v.data = &v;  // another array than K's; rows are not read here
    set(&mask, kGgmlF16, 2, {cells, tokens, 1, streams});
    mask.data = seen.data();
    set(&node, kGgmlF32, 4, {dim, heads, tokens, streams});
    SetParameters(0.125f, 0.0f, 30.0f);
    node.src[0] = &q;
    node.src[1] = &k;
    node.src[2] = &v;
    node.src[3] = &mask;
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  void SetParameters(float scale, float max_bias, float softcap) {
    const float parameters[] = {scale, max_bias, softcap};
    std::memcpy(node.op_params, parameters, sizeof(parameters));
  }
  uint16_t& Seen(uint32_t stream, uint32_t token, uint32_t cell) {
    return seen[(stream * static_cast<uint32_t>(mask.ne[1]) + token) *
                    static_cast<uint32_t>(mask.ne[0]) +
                cell];
  }

  std::vector<uint16_t> seen;
  GgmlTensor q{}, k{}, v{}, mask{}, node{};
};

TEST(LlamaAttentionTest, DescribesADecodeNode) {
  const Node node(128, 32, 8, 3, 512, 2);
  Attention attention;
  ASSERT_EQ(Describe(node.node, &attention), nullptr);
  EXPECT_EQ(attention.dtype, kernels::DType::kF16);
  EXPECT_EQ(attention.key_dim, 128);
  EXPECT_EQ(attention.value_dim, 128);
  EXPECT_EQ(attention.kv_heads, 8);
  EXPECT_EQ(attention.group_size, 4);
  EXPECT_EQ(attention.tokens, 3);
  EXPECT_EQ(attention.streams, 2);
  EXPECT_EQ(attention.cells, 512);
  EXPECT_EQ(attention.cell_bytes, 2048);
  EXPECT_EQ(attention.scale, 0.125f);
  EXPECT_EQ(attention.softcap, 30.0f);
}

// Each refusal is caused by a change of a node that is not refused.
TEST(LlamaAttentionTest, RefusesWhatItDoesNotCompute) {
  const auto refusal = [](void (*change)(Node*)) {
    Node node(128, 32, 8, 1, 512);
    change(&node);
    Attention attention;
    const char* text = Describe(node.node, &attention);
    return std::string(text == nullptr ? "" : text);
  };
  EXPECT_EQ(refusal([](Node*) {}), "");
  EXPECT_EQ(refusal([](Node* n) { n->SetParameters(0.1f, 8.0f, 0.0f); }), "ALiBi");
  EXPECT_EQ(refusal([](Node* n) { n->k.type = n->v.type = static_cast<GgmlType>(8); }),
            "a quantised KV cache");
  EXPECT_EQ(refusal([](Node* n) { n->v.type = kGgmlBf16; }), "K and V of different types");
  EXPECT_EQ(refusal([](Node* n) { n->node.src[3] = nullptr; }), "no mask");
  EXPECT_EQ(refusal([](Node* n) { n->node.src[1] = nullptr; }), "no K, V or queries");
  EXPECT_EQ(refusal([](Node* n) { n->mask.ne[2] = 32; }), "a mask of another shape");
  EXPECT_EQ(refusal([](Node* n) { n->mask.ne[0] = 511; }), "a mask of another shape");
  EXPECT_EQ(refusal([](Node* n) { n->k.ne[0] = n->q.ne[0] = 576; }),
            "a head dim that is not a multiple of 8 in 32..256");
  EXPECT_EQ(refusal([](Node* n) { n->v.ne[1] = 256; }), "K and V of different shapes");
  EXPECT_EQ(refusal([](Node* n) { n->q.ne[2] = 33; }),
            "query heads that are no multiple of the kv heads");
  EXPECT_EQ(refusal([](Node* n) { n->v.nb[0] = 1024; }),
            "rows that are not contiguous (V is transposed without flash attention)");
  EXPECT_EQ(refusal([](Node* n) { n->v.nb[1] = 4096; }), "K and V of different strides");
  EXPECT_EQ(refusal([](Node* n) { n->k.data = n->v.data; }), "V that is a part of K (MLA)");
  EXPECT_EQ(refusal([](Node* n) { n->k.nb[1] = n->v.nb[1] = 0; }), "K or V that repeats rows");
}

// Every cell of every stream is in the run that the mask says, at sizes around a word.
TEST(LlamaAttentionTest, RunsAreWhatTheMaskSays) {
  std::mt19937 random(5);
  for (const uint32_t cells : {1u, 63u, 64u, 65u, 128u, 500u}) {
    for (const uint32_t tokens : {1u, 2u, 8u, kMostTokens}) {
      Node node(32, 2, 1, tokens, cells, 2);
      for (uint32_t stream = 0; stream < 2; ++stream) {
        for (uint32_t token = 0; token < tokens; ++token) {
          const uint32_t begin = static_cast<uint32_t>(random()) % (cells + 1);
          const uint32_t end = static_cast<uint32_t>(random()) % (cells + 1);
          for (uint32_t cell = begin; cell < end; ++cell) {
            if (cell % 7 != token % 7 || random() % 4 != 0) node.Seen(stream, token, cell) = 0;
          }
        }
      }
      Attention attention;
      ASSERT_EQ(Describe(node.node, &attention), nullptr);
      std::vector<CellRun> runs;
      for (uint32_t stream = 0; stream < 2; ++stream) {
        ASSERT_TRUE(ReadMask(attention, stream, {}, &runs));
        std::vector<uint64_t> seen_by(cells, 0);
        uint32_t end = 0;
        for (const CellRun& run : runs) {
          EXPECT_TRUE(run.begin >= end && run.begin < run.end && run.end <= cells);
          EXPECT_NE(run.seen_by, 0u);
          end = run.end;
          for (uint32_t cell = run.begin; cell < run.end; ++cell) seen_by[cell] = run.seen_by;
        }
        for (uint32_t cell = 0; cell < cells; ++cell) {
          for (uint32_t token = 0; token < tokens; ++token) {
            EXPECT_EQ(seen_by[cell] >> token & 1, node.Seen(stream, token, cell) == 0 ? 1u : 0u);
          }
        }
      }
    }
  }
}

TEST(LlamaAttentionTest, NeighboursThatTheSameTokensSeeAreOneRun) {
  Node node(32, 2, 1, 2, 1024);
  for (uint32_t cell = 0; cell < 1000; ++cell) node.Seen(0, 0, cell) = node.Seen(0, 1, cell) = 0;
  node.Seen(0, 1, 1000) = 0;
  Attention attention;
  ASSERT_EQ(Describe(node.node, &attention), nullptr);
  std::vector<CellRun> runs;
  ASSERT_TRUE(ReadMask(attention, 0, {}, &runs));
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].end, 1000u);
  EXPECT_EQ(runs[0].seen_by, 3u);
  EXPECT_EQ(runs[1].end, 1001u);
  EXPECT_EQ(runs[1].seen_by, 2u);
}

TEST(LlamaAttentionTest, OtherValuesOfAMaskAreRefused) {
  for (const uint32_t cell : {0u, 70u, 199u}) {
    Node node(32, 2, 1, 1, 200);
    for (uint16_t& seen : node.seen) seen = 0;
    node.Seen(0, 0, cell) = 0x3c00;  // 1: a bias
    Attention attention;
    ASSERT_EQ(Describe(node.node, &attention), nullptr);
    std::vector<CellRun> runs;
    EXPECT_FALSE(ReadMask(attention, 0, {}, &runs)) << cell;
  }
}

TEST(LlamaSettingsTest, WordsAreParsed) {
  Settings settings;
  EXPECT_EQ(ParseSettings("", &settings), "");
  EXPECT_FALSE(settings.selects());
  EXPECT_EQ(settings.min_tokens, 4096u);
  EXPECT_EQ(
      ParseSettings("k=2048,min_tokens=17,kernel_level=portable,endpoint=unix:///a,index=flat,"
                    "sink_tokens=4,window_tokens=32",
                    &settings),
      "");
  EXPECT_TRUE(settings.selects());
  EXPECT_EQ(settings.selected_tokens, 2048u);
  EXPECT_EQ(settings.min_tokens, 17u);
  EXPECT_EQ(settings.exec.level, kernels::Level::kPortable);
  EXPECT_EQ(settings.endpoint, "unix:///a");
  EXPECT_TRUE(settings.is_flat);
  EXPECT_EQ(settings.sink_tokens, 4u);
  EXPECT_EQ(settings.window_tokens, 32u);
  EXPECT_FALSE(settings.estimates_tail());
  EXPECT_EQ(ParseSettings("ratio=0.1,index=pq", &settings), "");
  EXPECT_EQ(settings.selected_tokens, 0u) << "the later one of k and ratio holds";
  EXPECT_EQ(settings.ratio, 0.1);
  EXPECT_FALSE(settings.is_flat);
  EXPECT_EQ(settings.rerank, 1u);
  EXPECT_TRUE(settings.estimates_tail()) << "the default with ratio";
  EXPECT_EQ(ParseSettings("tail=0,rerank=2", &settings), "");
  EXPECT_FALSE(settings.estimates_tail());
  EXPECT_EQ(settings.rerank, 2u);
  EXPECT_EQ(ParseSettings("exact", &settings), "");
  EXPECT_FALSE(settings.selects());
  EXPECT_FALSE(settings.uses_sidecar());
  EXPECT_EQ(ParseSettings("offload,deadline_ms=50", &settings), "");
  EXPECT_FALSE(settings.selects());
  EXPECT_TRUE(settings.offloads && settings.uses_sidecar());
  EXPECT_EQ(settings.deadline_ms, 50u);
}

TEST(LlamaSettingsTest, WrongWordsAreNamed) {
  const auto wrong = [](const std::string& words) {
    Settings settings;
    return ParseSettings(words, &settings);
  };
  const auto number = [](const std::string& word, const std::string& range) {
    return "PQCACHED_LLAMA: \"" + word + "\" is not " + word.substr(0, word.find('=')) +
           "=NUMBER of " + range;
  };
  EXPECT_EQ(wrong("exact,speed=9"),
            "PQCACHED_LLAMA: \"speed=9\" is not exact, k=NUMBER, ratio=NUMBER, index=NAME, "
            "rerank=NUMBER, tail=NUMBER, sink_tokens=NUMBER, window_tokens=NUMBER, "
            "min_tokens=NUMBER, endpoint=ADDRESS, offload, drop, deadline_ms=NUMBER or "
            "kernel_level=NAME");
  EXPECT_EQ(wrong("offload,sink_tokens=0"),
            "PQCACHED_LLAMA: offload needs sink_tokens of 1 at least");
  EXPECT_EQ(wrong("offload,drop"), "PQCACHED_LLAMA: offload and drop exclude each other");
  EXPECT_EQ(wrong("deadline_ms=0"), number("deadline_ms=0", "1 to 3600000"));
  for (const char* word : {"min_tokens", "min_tokens=", "min_tokens=-1", "min_tokens=1x"}) {
    EXPECT_EQ(wrong(word), number(word, "0 to 1073741824"));
  }
  EXPECT_EQ(wrong("k=0"), number("k=0", "1 to 1073741824"));
  EXPECT_EQ(wrong("rerank=9"), number("rerank=9", "1 to 8"));
  EXPECT_EQ(wrong("tail=2"), number("tail=2", "0 to 1"));
  EXPECT_EQ(wrong("window_tokens=0"), number("window_tokens=0", "1 to 1073741824"));
  EXPECT_EQ(wrong("sink_tokens=1073741825"), number("sink_tokens=1073741825", "0 to 1073741824"));
  for (const char* word : {"ratio=0", "ratio=1.1", "ratio=x", "ratio", "ratio=nan"}) {
    EXPECT_EQ(wrong(word), "PQCACHED_LLAMA: \"" + std::string(word) +
                               "\" is not ratio=NUMBER above 0 and at most 1");
  }
  EXPECT_EQ(wrong("index=hnsw"), "PQCACHED_LLAMA: \"index=hnsw\" is not index=pq or index=flat");
  EXPECT_EQ(wrong("kernel_level=sse"),
            "PQCACHED_LLAMA: \"kernel_level=sse\" is not kernel_level=NAME, for example avx2");
}

}  // namespace
}  // namespace pqcached::llama
