// Selection through the index of graphs, over several segments, on queries and keys of a model.
//
// graph_select QUERY_HEADS KV_HEADS TOKENS DIM CONTEXT SEGMENT HEAD_STRIDE TEXT...
//
// Compiled by hand, as graph_rows.py compiles graph_compare.cc, with libpqcached_kvstore_read.a and
// libpqcached_kernels.a of a bench build.
//
// A TEXT is a prefix of files PREFIX_q.bin and PREFIX_k.bin of float32, [heads, TOKENS, DIM]. The
// keys of all texts follow each other, and are cut into segments; of the last text, only those
// before CONTEXT are stored, and later queries of it are the tests. Samples are queries of all
// stored tokens. Prints one JSON object per line: {head, k, recall, microseconds, exact}, where
// `exact` is the time in which all keys are scored for the query heads of a kv head, per query head.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/select/exact/exact_score.h"
#include "kvstore/read/indexes/graph.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kSinks = 16;
constexpr uint32_t kWindow = 64;  // of the last text's context
constexpr uint32_t kTestStride = 8;
constexpr kernels::DType kDType = kernels::DType::kBf16;

class Memory {
 public:
  explicit Memory(size_t bytes)
      : bytes_(bytes),
        memory_(static_cast<std::byte*>(std::aligned_alloc(
                    kContentAlignment, (bytes / kContentAlignment + 1) * kContentAlignment)),
                std::free) {
    std::memset(memory_.get(), 0, bytes);
  }
  std::span<std::byte> bytes() const { return {memory_.get(), bytes_}; }

 private:
  size_t bytes_;
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
};

struct Sizes {
  uint32_t query_heads, kv_heads, tokens, dim, context, segment, head_stride;
};

std::vector<float> Read(const std::string& name, size_t count) {
  std::vector<float> floats(count);
  std::ifstream file(name, std::ios::binary);
  file.read(reinterpret_cast<char*>(floats.data()),
            static_cast<std::streamsize>(count * sizeof(float)));
  if (!file) {
    std::fprintf(stderr, "error: %s: too short\n", name.c_str());
    std::exit(1);
  }
  return floats;
}

// One kv head of a sequence, with its graphs.
class Sequence {
 public:
  Sequence(const Sizes& sizes, const std::vector<std::vector<float>>& queries,
           const std::vector<std::vector<float>>& keys, uint32_t kv_head)
      : sizes_(sizes), kv_head_(kv_head), queries_(queries) {
    shape_ = {.dtype = kDType,
              .key_dim = sizes.dim,
              .value_dim = sizes.dim,
              .kv_heads = 1,
              .query_heads = sizes.query_heads / sizes.kv_heads,
              .row_bytes = static_cast<uint32_t>(2 * sizes.dim * kernels::DTypeBytes(kDType)),
              .scale = 1.0f};
    for (size_t text = 0; text < keys.size(); ++text) {
      const uint32_t count = text + 1 == keys.size() ? sizes.context : sizes.tokens;
      AddRows(std::span(keys[text])
                  .subspan(size_t{kv_head} * sizes.tokens * sizes.dim, size_t{count} * sizes.dim));
    }
    (void)MakeIndex("graph", {}, "index", &index_);
    MakeCodebook();
    const uint32_t segments = (tokens_ + sizes.segment - 1) / sizes.segment;
    first_rows_.resize(segments);
    for (uint32_t i = 0; i < segments; ++i) data_.push_back(MakeSegment(i));
    MakePlan();
  }

  uint32_t candidates() const { return plan_.token_count; }
  const LayerShape& shape() const { return shape_; }

  std::span<const float> Query(uint32_t token, uint32_t head, size_t text) const {
    const uint32_t query_head = kv_head_ * shape_.query_heads + head;
    return std::span(queries_[text])
        .subspan((size_t{query_head} * sizes_.tokens + token) * sizes_.dim, sizes_.dim);
  }

  // Selects for one query head.
  void Select(uint32_t token, uint32_t head, std::span<uint32_t> positions) {
    LayerShape shape = shape_;
    shape.kv_heads = shape.query_heads;
    const IndexType& type = TypeOf(index_);
    if (work_ == nullptr) {
      const size_t bytes = type.SelectScratch({}, shape, index_,
                                              {.piece_count = pieces_.size(),
                                               .codebook_count = 1,
                                               .token_count = plan_.token_count})
                               .work_bytes;
      work_ = std::make_unique<Memory>(bytes);
    }
    type.Select({.exec = exec_,
                 .shape = shape,
                 .index = index_,
                 .plan = plan_,
                 .kv_head = 0,
                 .sharing_heads = shape_.query_heads,
                 .sharing_head = head,
                 .queries = Query(token, head, queries_.size() - 1),
                 .prepared = {},
                 .work = work_->bytes()},
                kernels::GroupRule::kSumSoftmax, positions);
  }

  // Scores all candidates for all query heads of the kv head, [G, candidates].
  void ScoreAll(uint32_t token, std::span<float> scores) {
    std::vector<float> queries;
    for (uint32_t head = 0; head < shape_.query_heads; ++head) {
      const std::span<const float> query = Query(token, head, queries_.size() - 1);
      queries.insert(queries.end(), query.begin(), query.end());
    }
    const Memory scratch(kernels::ExactScoreScratchBytes(shape_.query_heads, shape_.key_dim));
    const HeadSearch search{.exec = exec_,
                            .shape = shape_,
                            .index = index_,
                            .plan = plan_,
                            .queries = queries,
                            .prepared = {},
                            .work = scratch.bytes()};
    size_t column = 0;
    for (const SearchPiece& piece : pieces_) {
      TypeOf(index_).Score(search, piece, scores.data() + column, plan_.token_count);
      column += piece.token_count();
    }
  }

 private:
  void AddRows(std::span<const float> keys) {
    const size_t count = keys.size() / sizes_.dim;
    rows_.resize((tokens_ + count) * shape_.row_bytes);
    for (size_t i = 0; i < count; ++i) {
      kernels::ConvertElements(kernels::DType::kF32,
                               reinterpret_cast<const std::byte*>(&keys[i * sizes_.dim]), kDType,
                               rows_.data() + (tokens_ + i) * shape_.row_bytes, sizes_.dim);
    }
    tokens_ += static_cast<uint32_t>(count);
  }

  // Samples are all queries of every n-th stored token.
  void MakeCodebook() {
    constexpr uint32_t kSamples = 512;
    std::vector<float> samples;
    for (uint32_t i = 0; i < kSamples; ++i) {
      const auto at = static_cast<uint32_t>(uint64_t{tokens_} * (i + 1) / kSamples - 1);
      for (uint32_t head = 0; head < shape_.query_heads; ++head) {
        const std::span<const float> query = Query(at % sizes_.tokens, head, at / sizes_.tokens);
        samples.insert(samples.end(), query.begin(), query.end());
      }
    }
    std::vector<std::byte> stored(samples.size() * kernels::DTypeBytes(kDType));
    kernels::ConvertElements(kernels::DType::kF32, reinterpret_cast<std::byte*>(samples.data()),
                             kDType, stored.data(), samples.size());
    const BuiltIndexType& type = BuiltTypeOf(index_);
    codebook_ = std::make_unique<Memory>(type.CodebookBytes(index_, shape_));
    header_ = new (codebook_->bytes().data()) CodebookHeader;
    header_->index = index_;
    header_->kv_head_count = 1;
    header_->key_dim = sizes_.dim;
    type.FormatCodebook(shape_, header_);
    type.PrepareTraining(
        {.shape = shape_,
         .rows = {},
         .samples = {.rows = stored.data(),
                     .row_stride = shape_.query_heads * sizes_.dim * kernels::DTypeBytes(kDType),
                     .position_count = kSamples,
                     .queries_per_position = shape_.query_heads},
         .keep_going = {},
         .codebook = header_},
        {});
  }

  std::unique_ptr<Memory> MakeSegment(uint32_t i) {
    const uint32_t first = i * sizes_.segment;
    const uint32_t count = std::min(sizes_.segment, tokens_ - first);
    first_rows_[i] = rows_.data() + size_t{first} * shape_.row_bytes;
    const BuiltIndexType& type = BuiltTypeOf(index_);
    auto memory = std::make_unique<Memory>(type.DataBytes(index_, shape_, sizes_.segment));
    auto* const data = new (memory->bytes().data()) IndexDataHeader;
    data->index = index_;
    data->kv_head_count = 1;
    data->slot_capacity = sizes_.segment;
    type.FormatData(shape_, data);
    const CloseArgs close{.shape = shape_,
                          .codebook = header_,
                          .rows = first_rows_[i],
                          .slot_end = count,
                          .data = data};
    const Memory scratch(type.CloseScratchBytes(close));
    type.CloseHead(exec_, close, scratch.bytes());
    data->counted_end = count;
    segments_.push_back({.first_position = first,
                         .token_count = count,
                         .rows = std::span(first_rows_).subspan(i, 1),
                         .index_data = data,
                         .codebook = header_});
    return memory;
  }

  void MakePlan() {
    for (const SegmentView& segment : segments_) {
      const bool first = segment.first_position == 0;
      const bool last = segment.first_position + segment.token_count == tokens_;
      pieces_.push_back({.segment = &segment,
                         .slot_begin = first ? kSinks : 0,
                         .slot_end = segment.token_count - (last ? kWindow : 0)});
      plan_.token_count += pieces_.back().token_count();
    }
    codebooks_.push_back(header_);
    plan_.pieces = pieces_;
    plan_.codebooks = codebooks_;
  }

  const Sizes& sizes_;
  const uint32_t kv_head_;
  const std::vector<std::vector<float>>& queries_;
  const kernels::Exec exec_{};
  LayerShape shape_;
  IndexDescriptor index_;
  std::vector<std::byte> rows_;
  uint32_t tokens_ = 0;
  std::unique_ptr<Memory> codebook_, work_;
  CodebookHeader* header_ = nullptr;
  std::vector<const std::byte*> first_rows_;
  std::vector<std::unique_ptr<Memory>> data_;
  std::vector<SegmentView> segments_;
  std::vector<SearchPiece> pieces_;
  std::vector<const CodebookHeader*> codebooks_;
  SearchPlan plan_;
};

// Returns the time that this thread has run, which other programs do not lengthen.
double Microseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

// Compares the selections of all tests of a head with the best tokens.
void Measure(const Sizes& sizes, Sequence& sequence, uint32_t kv_head) {
  const uint32_t group = sequence.shape().query_heads, count = sequence.candidates();
  std::vector<float> scores(size_t{group} * count);
  std::vector<uint32_t> order(count);
  const uint32_t counts[] = {48, 128};
  std::vector<double> recall(std::size(counts) * group), spent(recall.size());
  double exact = 0;
  uint32_t tests = 0;
  for (uint32_t token = sizes.context; token < sizes.tokens; token += kTestStride, ++tests) {
    double begin = Microseconds();
    sequence.ScoreAll(token, scores);
    exact += (Microseconds() - begin) / group;
    for (size_t n = 0; n < std::size(counts); ++n) {
      const uint32_t k = counts[n];
      for (uint32_t head = 0; head < group; ++head) {
        std::vector<uint32_t> found(k);
        begin = Microseconds();
        sequence.Select(token, head, found);
        spent[n * group + head] += (Microseconds() - begin);
        const float* const of_head = &scores[size_t{head} * count];
        std::iota(order.begin(), order.end(), 0);
        std::nth_element(order.begin(), order.begin() + k, order.end(),
                         [&](uint32_t a, uint32_t b) { return of_head[a] > of_head[b]; });
        // A column is a position less the sinks.
        std::sort(order.begin(), order.begin() + k);
        uint32_t hits = 0;
        for (const uint32_t position : found) {
          hits += std::binary_search(order.begin(), order.begin() + k, position - kSinks) ? 1 : 0;
        }
        recall[n * group + head] += static_cast<double>(hits) / k;
      }
    }
  }
  for (size_t n = 0; n < std::size(counts); ++n) {
    for (uint32_t head = 0; head < group; ++head) {
      std::printf(
          "{\"head\": %u, \"k\": %u, \"recall\": %.5f, \"microseconds\": %.2f, \"exact\": %.2f}\n",
          kv_head * group + head, counts[n], recall[n * group + head] / tests,
          spent[n * group + head] / tests, exact / tests);
    }
  }
}

int Main(int argc, char** argv) {
  if (argc < 9) {
    std::fprintf(stderr, "usage: see the head of the source\n");
    return 2;
  }
  const auto number = [argv](int i) {
    return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10));
  };
  const Sizes sizes{.query_heads = number(1),
                    .kv_heads = number(2),
                    .tokens = number(3),
                    .dim = number(4),
                    .context = number(5),
                    .segment = number(6),
                    .head_stride = number(7)};
  std::vector<std::vector<float>> queries, keys;
  for (int i = 8; i < argc; ++i) {
    queries.push_back(Read(std::string(argv[i]) + "_q.bin",
                           size_t{sizes.query_heads} * sizes.tokens * sizes.dim));
    keys.push_back(
        Read(std::string(argv[i]) + "_k.bin", size_t{sizes.kv_heads} * sizes.tokens * sizes.dim));
  }
  for (uint32_t kv_head = 0; kv_head < sizes.kv_heads; kv_head += sizes.head_stride) {
    Sequence sequence(sizes, queries, keys, kv_head);
    Measure(sizes, sequence, kv_head);
  }
  return 0;
}

}  // namespace
}  // namespace pqcached::kvstore

int main(int argc, char** argv) { return pqcached::kvstore::Main(argc, argv); }
