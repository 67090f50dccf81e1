// Attention over a pool that is mapped read-only, as a client has it, beside the same kernels over a
// private copy of the same bytes.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kvstore/read/attachment.h"
#include "kvstore/read/layer_ops.h"
#include "kvstore/store.h"
#include "tests/bench/huge_buffer.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kTokens = 128 << 10;
constexpr uint32_t kSelected = 1024;
constexpr kvstore::IndexDescriptor kIndex = {kvstore::IndexKind::kPq, 2, 6};

kvstore::CacheSpec Spec() {
  kvstore::LayerGroup group;
  group.layers = {0};
  group.kv_heads = kKvHeads;
  group.query_heads = kQueryHeads;
  group.key_dim = group.value_dim = kDim;
  group.dtype = kernels::DType::kBf16;
  return {.name = "mapped",
          .model_fingerprint = "bench",
          .groups = {group},
          .capacity_bytes = size_t{1} << 30,
          .default_index = kIndex};
}

kvstore::TensorView ViewOf(const std::byte* data, uint32_t tokens) {
  return {.data = data,
          .data_bytes = size_t{tokens} * kTokenBytes / 2,
          .dtype = kernels::DType::kBf16,
          .shape = {tokens, kKvHeads, kDim},
          .strides = {}};
}

// A store with one indexed sequence, and what a client gets of it.
struct World {
  const kvstore::StoreOptions options;
  std::unique_ptr<kvstore::Store> store = *kvstore::Store::Create(options);
  kvstore::SharedMemory pool;
  kvstore::Attachment attachment;

  World() {
    const auto cache = store->OpenCache("t", Spec());
    Require(cache.ok(), "OpenCache");
    const auto made = store->CreateSequence("t", cache->cache_id, {.session = "s"});
    Require(made.ok(), "CreateSequence");
    const Rows rows(8 << 10);
    auto ingest = store->BeginIngest("t", made->sequence_id);
    Require(ingest.ok(), "BeginIngest");
    for (uint32_t first = 0; first < kTokens; first += rows.tokens()) {
      Require((*ingest)
                  ->Write(first, {.layer = 0,
                                  .keys = ViewOf(rows.keys(), rows.tokens()),
                                  .values = ViewOf(rows.values(), rows.tokens())})
                  .ok(),
              "Write");
    }
    Require((*ingest)->Commit().ok(), "Commit");
    ingest->reset();
    kvstore::BuildSpec build{.index = kIndex};
    build.iterations = 2;
    build.train_tokens = 4096;
    Require(store->BuildIndex("t", made->sequence_id, build, [](const auto&) { return true; }).ok(),
            "BuildIndex");
    Require(store->OpenLocalSession("tenant", "s", 1).ok(), "OpenLocalSession");
    auto opened = store->OpenPool("t", "", cache->cache_id);
    Require(opened.ok(), "OpenPool");
    pool = *std::move(opened);
    const auto attached = store->Attach("t", made->sequence_id, "s", {});
    Require(attached.ok(), "Attach");
    Require(
        kvstore::ParseAttachment(attached->attachment.image, pool.size_bytes, &attachment).empty(),
        "attachment");
  }
};

// Select and attend over one memory.
class Reader {
 public:
  Reader(const World& world, const std::byte* pool)
      : queries_(Queries(5)),
        output_(queries_.size()),
        lse_(kQueryHeads),
        positions_(kKvHeads * kSelected) {
    const kvstore::LayerShape shape{.dtype = kernels::DType::kBf16,
                                    .key_dim = kDim,
                                    .value_dim = kDim,
                                    .kv_heads = kKvHeads,
                                    .query_heads = kQueryHeads,
                                    .row_bytes = kRowBytes,
                                    .scale = 0.088f};
    Require(kvstore::MappedLayer::Make(world.attachment, 0, shape, 0, pool, &layer_).empty(),
            "MappedLayer");
    view_ = layer_.View(kTokens);
    candidates_ = {{kSinkTokens, kTokens - kWindowTokens}};
    const size_t select = kvstore::SelectScratchBytes({}, view_, Args());
    scratch_ = std::make_unique<HugeBuffer>(
        std::max(select, kvstore::AttendLayerScratchBytes(view_)) + 4096);
  }

  void Run() {
    const kvstore::ParallelFor serial = kvstore::SerialFor();
    kvstore::SelectLayer({}, view_, Args(), serial, scratch_->bytes());
    kvstore::AttendLayer(
        {}, view_, {.queries = queries_, .positions = positions_, .output = output_, .lse = lse_},
        serial, scratch_->bytes());
  }
  const std::vector<float>& output() const { return output_; }

 private:
  kvstore::SelectLayerArgs Args() {
    return {.index = kIndex,
            .candidates = candidates_,
            .queries = queries_,
            .select_count = kSelected,
            .positions = positions_};
  }

  kvstore::MappedLayer layer_;
  kvstore::LayerView view_;
  std::vector<kvstore::PositionRange> candidates_;
  std::vector<float> queries_, output_, lse_;
  std::vector<uint32_t> positions_;
  std::unique_ptr<HugeBuffer> scratch_;
};

int Main(int argc, char** argv) {
  Report report(argc, argv, 201, "local");
  const World world;
  void* mapped = mmap(nullptr, world.pool.size_bytes, PROT_READ, MAP_SHARED | MAP_POPULATE,
                      world.pool.descriptor.get(), 0);
  Require(mapped != MAP_FAILED, "mmap of the pool");
  // Plain pages, as the pool has.
  void* copy = mmap(nullptr, world.pool.size_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Require(copy != MAP_FAILED, "mmap of a copy");
  std::memcpy(copy, mapped, world.pool.size_bytes);

  Reader shared(world, static_cast<const std::byte*>(mapped));
  Reader own(world, static_cast<const std::byte*>(copy));
  Rounds rounds(1);
  const size_t of_pool = rounds.Add("mapped pool", 1, [&](int, int) { shared.Run(); });
  const size_t of_copy = rounds.Add("private copy", 1, [&](int, int) { own.Run(); });
  rounds.Run(report.rounds());
  Require(shared.output() == own.output(), "both memories give the same");
  report.Add({"attend_mapped_over_private", "x", "the same kernels on private memory",
              Better::kLower, 1.10},
             rounds.Speedup(of_copy, of_pool));
  munmap(mapped, world.pool.size_bytes);
  munmap(copy, world.pool.size_bytes);
  return report.Finish();
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) { return pqcached::bench::Main(argc, argv); }
