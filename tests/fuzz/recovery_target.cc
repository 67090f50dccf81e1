// Fuzz target: recovery from memory that has rotted, or was forged. An input changes what a store of
// several sequences has left to its keeper; the next store then recovers.
//
// Where records rot, a sequence comes back with every row, or not at all. Forged records have valid
// checksums: nothing crashes, and all that comes back can be read, refused and ended.
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "kernels/base/crc32c.h"
#include "kvstore/records/record_table.h"
#include "kvstore/records/root_records.h"
#include "kvstore/sequence/sequence_record.h"
#include "tests/fuzz/bytes.h"
#include "tests/fuzz/handlers/rows.h"
#include "tests/fuzz/target.h"
#include "tests/kvstore/memory_keeper.h"
#include "tests/kvstore/records/kept_image.h"
#include "tests/service/handlers/direct_sidecar.h"

namespace pqcached::fuzz {
namespace {

using kvstore::RecordTable;
using kvstore::SteadyTime;
using kvstore::Store;
using kvstore::testing::KeptImage;
using kvstore::testing::MemoryKeeper;

constexpr char kTenant[] = "default";
constexpr size_t kMaxChanges = 12;
constexpr uint32_t kForgedSlots = 12;  // of each array: more than the store has left
constexpr absl::Duration kPatience = absl::Seconds(20);

service::Config ConfigOfStore() {
  service::Config config = service::SmallConfig();
  config.max_pool_bytes = size_t{8} << 20;
  config.max_sequences = 16;
  config.threads = 1;
  return config;
}

kvstore::StoreOptions OptionsOf(MemoryKeeper& keeper) {
  kvstore::StoreOptions options = StoreOptionsOf(ConfigOfStore());
  options.keeper = &keeper;
  options.memory_root = "/proc/self/no-folder";  // the machine's memory is not read
  return options;
}

kvstore::CacheSpec SpecOfStore() {
  kvstore::CacheSpec spec;
  spec.name = "cache";
  spec.model_fingerprint = "model";
  spec.capacity_bytes = size_t{4} << 20;
  kvstore::LayerGroup group;
  group.layers.assign(std::begin(kStoredLayers), std::end(kStoredLayers));
  group.kv_heads = 1;
  group.query_heads = kQueryHeadCount;
  group.key_dim = kKeyElements;
  group.value_dim = kValueElements;
  spec.groups.push_back(group);
  return spec;
}

// Rows as the store takes them.
class StoredRows {
 public:
  StoredRows(const RowTable& table, std::span<const uint32_t> content) {
    for (size_t layer = 0; layer < kLayerCount; ++layer) {
      const auto tensor = [&](uint32_t begin, uint32_t end) {
        elements_.push_back(
            std::make_unique<std::string>(ElementsOf(table, layer, content, begin, end)));
        kvstore::TensorView view;
        view.data = reinterpret_cast<const std::byte*>(elements_.back()->data());
        view.data_bytes = elements_.back()->size();
        view.dtype = kernels::DType::kF16;
        view.shape = {content.size(), 1, end - begin};
        return view;
      };
      layers_.push_back({.layer = kStoredLayers[layer],
                         .keys = tensor(0, kKeyElements),
                         .values = tensor(kKeyElements, kRowElements)});
    }
  }
  std::span<const kvstore::LayerRows> layers() const { return layers_; }

 private:
  std::vector<std::unique_ptr<std::string>> elements_;
  std::vector<kvstore::LayerRows> layers_;
};

struct Left {
  uint64_t id = 0;
  Content content;
};

// What one store leaves: a prompt with an index, a fork, rows without names, a suspended and a pinned
// sequence, and a cached prefix.
class Remains {
 public:
  Remains() {
    MemoryKeeper keeper;
    auto store = *Store::Create(OptionsOf(keeper));
    const auto cache = store->OpenCache(kTenant, SpecOfStore());
    Check(cache.status());
    cache_id_ = cache->cache_id;
    Check(store->KeepSession({"session", kTenant, "name", "token"}));
    const uint64_t prompt = Create(*store, 0, 0, 300);
    Check(store->BuildIndex(
        kTenant, prompt,
        {.index = {.kind = kvstore::IndexKind::kPq, .subspace_count = 2, .bits = 4},
         .iterations = 1},
        {}));
    const auto fork = store->ForkSequence(kTenant, prompt, 200, "session");
    Check(fork.status());
    left_.push_back({fork->sequence_id, Content(left_[0].content)});
    left_.back().content.resize(200);
    Append(*store, left_.back(), PromptOf(3).content, 30);
    const uint64_t suspended = Create(*store, 1, 0, 40);
    Check(store->SuspendSequence(kTenant, suspended).status());
    const uint64_t pinned = Create(*store, 2, 0, 130);
    Check(store->PinSequence(kTenant, pinned, absl::Hours(1)));
    const uint64_t retained = Create(*store, 2, 1, 128);
    Check(store->DropSequence(kTenant, retained));
    left_.pop_back();
    if (!store->WaitIdle(SteadyTime::Now() + kPatience)) Found("checksums are late");
    store.reset();
    image_.emplace(keeper);
    const auto root = kvstore::RootRecords::Open({}, keeper);
    Check(root.status());
    record_ = (*root)->caches().front();
    (*root)->Detach();
  }

  const KeptImage& image() const { return *image_; }
  const std::vector<Left>& left() const { return left_; }
  const RowTable& rows() const { return rows_; }
  const kvstore::CacheRecord& record() const { return record_; }
  RecordTable::Shape shape() const {
    return {
        .unit_count = static_cast<uint32_t>(record_.spec.capacity_bytes / kvstore::kMinExtentBytes),
        .head_count = kLayerCount,
        .layer_count = kLayerCount,
        .sequence_slots = record_.sequence_slots,
        .heap_bytes = record_.heap_bytes};
  }
  static void Check(const absl::Status& status) {
    if (!status.ok()) Found("the first store: " + status.ToString());
  }
  void Append(Store& store, Left& one, const Content& from, size_t count) const {
    const std::span<const uint32_t> fresh = std::span(from).first(count);
    const StoredRows rows(rows_, fresh);
    Check(store.Append(kTenant, one.id, one.content.size(), rows.layers()).status());
    one.content.insert(one.content.end(), fresh.begin(), fresh.end());
  }

 private:
  uint64_t Create(Store& store, uint32_t family, int extra, size_t tokens) {
    const Prompt& prompt = PromptOf(family);
    kvstore::SequenceSpec spec;
    spec.session = "session";
    spec.extra_key = std::string(static_cast<size_t>(extra), 'x');
    spec.token_ids.assign(prompt.ids.begin(), prompt.ids.begin() + static_cast<ptrdiff_t>(tokens));
    const auto made = store.CreateSequence(kTenant, cache_id_, spec);
    Check(made.status());
    left_.push_back({made->sequence_id, {}});
    left_.back().content.assign(prompt.content.begin(),
                                prompt.content.begin() + static_cast<ptrdiff_t>(made->token_count));
    const Content rest(prompt.content.begin() + static_cast<ptrdiff_t>(made->token_count),
                       prompt.content.end());
    Append(store, left_.back(), rest, tokens - made->token_count);
    return made->sequence_id;
  }

  uint64_t cache_id_ = 0;
  RowTable rows_{false};
  std::vector<Left> left_;
  std::optional<KeptImage> image_;
  kvstore::CacheRecord record_;
};

const Remains& Kept() {
  static const Remains remains;
  return remains;
}

// Changes bytes of the records, near those that are written. Returns the changed copy.
KeptImage Rot(Bytes& bytes) {
  KeptImage image = Kept().image();
  for (size_t i = 0; i < kMaxChanges && !bytes.empty(); ++i) {
    auto memory = image.memories.begin();
    std::advance(memory, static_cast<ptrdiff_t>(bytes.Below(image.memories.size())));
    if (memory->first.starts_with("pool")) memory = image.memories.find("records");
    const uint8_t how = bytes.Byte();
    if (how >= 250) {  // shorter, or gone
      memory->second.size_bytes /= 2;
      memory->second.pages.erase(memory->second.pages.lower_bound(memory->second.size_bytes),
                                 memory->second.pages.end());
      continue;
    }
    if (memory->second.pages.empty()) continue;
    auto page = memory->second.pages.begin();
    std::advance(page, static_cast<ptrdiff_t>(bytes.Byte() % memory->second.pages.size()));
    if (how >= 245) {
      memory->second.pages.erase(page);
      continue;
    }
    // A place among the written ones, as every record is much smaller than a page.
    std::vector<size_t> written;
    for (size_t at = 0; at < KeptImage::kPageBytes; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, page->second.data() + at, sizeof(word));
      if (word != 0) written.push_back(at);
    }
    if (written.empty()) continue;
    const size_t place = (size_t{bytes.Byte()} * 256 + bytes.Byte()) % written.size();
    std::byte& byte = page->second[written[place] + how % 8];
    byte =
        how % 2 == 0 ? byte ^ std::byte{1} << (how / 8 % 8) : static_cast<std::byte>(bytes.Byte());
  }
  return image;
}

// Changes a number somewhere in the bytes.
void ChangeNumber(Bytes& bytes, std::span<std::byte> content) {
  if (content.size() < 4) return;
  const size_t place = (size_t{bytes.Byte()} * 4) % (content.size() - 3);
  const auto number = static_cast<uint32_t>(bytes.Number());
  std::memcpy(content.data() + place, &number, sizeof(number));
}

// Changes a sequence's list of segments, and its checksum.
void ForgeList(Bytes& bytes, RecordTable& table, uint32_t slot) {
  const kvstore::SlotArray::Content content = table.states().Read(slot);
  if (content.bytes.size() < sizeof(kvstore::StateRecord)) return;
  std::vector<std::byte> forged(content.bytes.begin(), content.bytes.end());
  kvstore::StateRecord state;
  std::memcpy(&state, forged.data(), sizeof(state));
  // An earlier change may have moved the block out of the heap.
  constexpr uint32_t kMaxOrder = 20;
  const kvstore::HeapBlock& block = state.list;
  if (block.order > kMaxOrder || state.list_bytes > block.size_bytes() ||
      block.unit * kvstore::HeapBlock::kUnitBytes + block.size_bytes() >
          Kept().shape().heap_bytes) {
    return;
  }
  const std::span<std::byte> list = table.bytes(block).first(state.list_bytes);
  ChangeNumber(bytes, list);
  state.list_crc = kernels::Crc32c(table.exec(), list);
  std::memcpy(forged.data(), &state, sizeof(state));
  table.states().Put(slot, forged);
}

// Changes records, and their checksums with them.
void Forge(Bytes& bytes, MemoryKeeper& keeper) {
  const auto table =
      RecordTable::Open({}, keeper.Take(Kept().record().table_name()), Kept().shape());
  if (!table.ok()) Found("the table cannot be opened: " + table.status().ToString());
  kvstore::SlotArray* const arrays[] = {&(*table)->rows(),       &(*table)->row_checksums(),
                                        &(*table)->layers(),     &(*table)->layer_checksums(),
                                        &(*table)->identities(), &(*table)->states(),
                                        &(*table)->names()};
  for (size_t i = 0; i < kMaxChanges && !bytes.empty(); ++i) {
    const size_t which = bytes.Below(std::size(arrays) + 2);
    const auto slot = static_cast<uint32_t>(bytes.Below(kForgedSlots));
    if (which >= std::size(arrays)) {
      ForgeList(bytes, **table, slot);
      continue;
    }
    const kvstore::SlotArray::Content content = arrays[which]->Read(slot);
    std::vector<std::byte> forged(content.bytes.begin(), content.bytes.end());
    ChangeNumber(bytes, forged);
    if (!forged.empty()) arrays[which]->Put(slot, forged);
  }
  (*table)->Detach();
}

// Rotten records: every sequence that is there has all its rows.
void CompareLeft(Store& store) {
  for (const Left& one : Kept().left()) {
    const auto info = store.DescribeSequence(kTenant, one.id);
    if (!info.ok()) continue;
    if (info->token_count != one.content.size()) Found("a sequence comes back with other tokens");
    const bool suspended = absl::IsFailedPrecondition(
        store.FetchBlocks(kTenant, one.id, kStoredLayers[0], {0, 1}, kvstore::RowPart::kRow)
            .status());
    if (suspended) store.ResumeSequence(kTenant, one.id).IgnoreError();
    for (size_t layer = 0; layer < kLayerCount; ++layer) {
      const auto rows = store.FetchBlocks(kTenant, one.id, kStoredLayers[layer],
                                          {0, one.content.size()}, kvstore::RowPart::kRow);
      if (absl::IsDataLoss(rows.status())) continue;  // its checksums have rotted
      if (!rows.ok()) Found("a sequence comes back without rows: " + rows.status().ToString());
      const std::string expected = ElementsOf(Kept().rows(), layer, one.content, 0, kRowElements);
      if (std::memcmp(rows->data.data(), expected.data(), expected.size()) != 0) {
        Found("a sequence comes back with other rows");
      }
    }
  }
}

// No segment has more tokens than room, and they follow each other.
void CheckSegments(const kvstore::SequenceInfo& info) {
  uint64_t end = 0;
  for (const kvstore::SegmentInfo& segment : info.segments) {
    if (segment.tokens.begin == segment.tokens.end) continue;  // its layers have fewer rows
    if (segment.tokens.begin != end || segment.tokens.end < end ||
        segment.tokens.end - end > segment.slot_capacity) {
      Found("a sequence has segments that cannot be");
    }
    end = segment.tokens.end;
  }
}

// Reads, extends and ends all that there is; nothing may then be in use.
void UseUp(Store& store, bool is_forged) {
  for (const kvstore::CacheInfo& cache : store.ListCaches("")) {
    const auto sequences = store.ListSequences("", cache.cache_id);
    if (!sequences.ok()) Found("a cache cannot be listed");
    store.MatchPrefix(cache.tenant, cache.cache_id, PromptOf(0).ids, "").IgnoreError();
    for (const kvstore::SequenceInfo& info : *sequences) {
      const uint64_t id = info.sequence_id;
      CheckSegments(info);
      const kvstore::TokenRange all = {0, std::max<uint64_t>(info.token_count, 1)};
      store.FetchBlocks(cache.tenant, id, kStoredLayers[1], all, kvstore::RowPart::kRow)
          .IgnoreError();
      const StoredRows rows(Kept().rows(), std::span(PromptOf(1).content).first(3));
      store.Append(cache.tenant, id, info.token_count, rows.layers()).IgnoreError();
      store.TruncateSequence(cache.tenant, id, info.token_count / 2).IgnoreError();
      store.PinSequence("", id, absl::ZeroDuration()).IgnoreError();
      const absl::Status dropped = info.is_cached_prefix
                                       ? store.EvictSequence(kvstore::kAllTenants, id)
                                       : store.DropSequence(cache.tenant, id);
      // A prefix goes when a sequence that ends leaves a longer one with the same beginning.
      const bool is_gone = info.is_cached_prefix && absl::IsNotFound(dropped);
      if (!dropped.ok() && !is_gone && !is_forged) {
        Found("it cannot be ended: " + dropped.ToString());
      }
    }
    const auto prefixes = store.ListSequences("", cache.cache_id);
    for (const kvstore::SequenceInfo& info : *prefixes) {
      store.EvictSequence(kvstore::kAllTenants, info.sequence_id).IgnoreError();
    }
  }
  store.EndQuarantine();
  const auto used_bytes = [&store] {
    size_t bytes = 0;
    for (const kvstore::CacheInfo& cache : store.ListCaches("")) bytes += cache.used_bytes;
    return bytes;
  };
  for (const SteadyTime until = SteadyTime::Now() + kPatience; used_bytes() > 0;) {
    if (SteadyTime::Now() > until) Found(std::to_string(used_bytes()) + " bytes are left");
    std::this_thread::yield();  // threads of the store may still look at what was dropped
  }
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds = {std::string(1, '\0'), std::string("\0\0\0\0\0\0\0", 7),
                                    std::string("\0\2\372\1\365\1", 6)};
  // A bit here and there in the cache's records, and in those of all caches: memory, how, page, place.
  for (char page = 0; page < 10; ++page) {
    for (char place = 0; place < 32; ++place) {
      seeds.push_back({'\0', '\2', '\0', page, '\0', place});
      if (page < 3 && place % 4 == 0) seeds.push_back({'\0', '\1', '\0', page, '\0', place});
    }
  }
  // Numbers of records: array, slot, place, number.
  for (char array = 0; array < 8; ++array) {
    for (char slot = 0; slot < 6; ++slot) {
      for (const char place : {'\2', '\5', '\7', '\13'}) {
        seeds.push_back({'\1', array, slot, place, '\21'});
      }
    }
  }
  return seeds;
}

}  // namespace pqcached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pqcached::fuzz;  // NOLINT: a target's one function
  Bytes bytes(data, size);
  const bool is_forged = bytes.Byte() % 2 == 1;
  MemoryKeeper keeper;
  if (!(is_forged ? Kept().image() : Rot(bytes)).Restore(keeper)) Found("no memory");
  if (is_forged) Forge(bytes, keeper);
  const auto store = Store::Create(OptionsOf(keeper));
  if (!store.ok()) {
    // Versions that have rotted to those of another program.
    if (absl::IsFailedPrecondition(store.status())) return 0;
    Found("recovery fails: " + store.status().ToString());
  }
  if (!is_forged) CompareLeft(**store);
  UseUp(**store, is_forged);
  return 0;
}
