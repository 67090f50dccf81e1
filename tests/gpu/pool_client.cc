#include "tests/gpu/pool_client.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "client/base/pack.h"
#include "client/local/session.h"
#include "client/step/handles.h"
#include "kernels/train/pq_encode.h"
#include "kvstore/read/attachment.h"
#include "tests/client/local/no_pages_remote.h"

namespace pqcached::testing {
namespace {

using namespace pqcached::client;  // NOLINT: this is its stand-in
using kernels::DTypeBytes;
using kvstore::CodebookHeader;
using kvstore::ControlPage;
using kvstore::IndexDataHeader;
using kvstore::LeaseWords;

constexpr size_t kPoolBytes = size_t{64} << 20;
constexpr uint32_t kMaxSequences = 63;
constexpr size_t kContentBegin = 128;  // behind either header
static_assert(sizeof(IndexDataHeader) <= kContentBegin && sizeof(CodebookHeader) <= kContentBegin);

class PoolHost final : public LocalHost {
 public:
  explicit PoolHost(PoolSidecar& sidecar) : sidecar_(sidecar) {}

  pqc_status OpenPool(uint64_t, std::shared_ptr<Mapping>* pool) override {
    return sidecar_.pool().Map(MappingAccess::kRead, pool);
  }
  pqc_status HoldPool(uint64_t) override { return sidecar_.HoldPool(); }
  pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                         std::shared_ptr<Mapping>* ring) override {
    return sidecar_.OpenStaging(slot_bytes, slot_count, ring);
  }
  pqc_status Attach(uint64_t sequence_id, const LeaseView&, AttachAnswer* answer) override {
    sidecar_.Attach(sequence_id, answer);
    return PQC_OK;
  }
  pqc_status Detach(const LeaseView&) override { return PQC_OK; }
  void End() override {}
  bool WaitEnded(uint32_t) override { return false; }
  bool HoldsConnection() override { return true; }
  void Abandon() override {}

 private:
  PoolSidecar& sidecar_;
};

class PoolRemote final : public NoPagesRemote {
 public:
  explicit PoolRemote(PoolSidecar& sidecar) : sidecar_(sidecar) {}
  void Close() noexcept override { delete this; }
  pqc_status OpenCache(const pqc_cache_spec& spec, uint64_t* cache_id,
                       RefusalBuffer*) noexcept override {
    sidecar_.SetLayers(spec.groups[0]);
    *cache_id = 1;
    return PQC_OK;
  }
  pqc_status CreateSequence(uint64_t, const char*, const pqc_sequence_options&,
                            uint64_t* sequence_id, uint64_t* token_count,
                            RefusalBuffer*) noexcept override {
    *sequence_id = sidecar_.CreateSequence();
    *token_count = 0;
    return PQC_OK;
  }
  pqc_status DropSequence(uint64_t, RefusalBuffer*) noexcept override { return PQC_OK; }
  pqc_status TruncateSequence(uint64_t sequence_id, uint64_t token_count, const LeaseView&,
                              const ImageSink&, RefusalBuffer*) noexcept override {
    sidecar_.Truncate(sequence_id, token_count);
    return PQC_OK;
  }
  pqc_status DescribeSequence(uint64_t sequence_id, pqc_sequence_info* info,
                              RefusalBuffer*) noexcept override {
    info->token_count = sidecar_.token_count(sequence_id);
    return PQC_OK;
  }
  pqc_status IngestStaged(uint64_t, const StagedRows&, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status Commit(uint64_t sequence_id, uint64_t first_position, const RowBlock* rows,
                    uint32_t row_block_count, uint64_t* token_count,
                    RefusalBuffer* error) noexcept override {
    const pqc_status status =
        sidecar_.Commit(sequence_id, first_position, rows, row_block_count, error);
    *token_count = sidecar_.token_count(sequence_id);
    return status;
  }
  pqc_status NameTokens(uint64_t, const pqc_row_options&, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status Append(AppendItem* items, uint32_t item_count, RefusalBuffer*) noexcept override {
    for (uint32_t i = 0; i < item_count; ++i) items[i].token_count = sidecar_.Append(items[i]);
    return PQC_OK;
  }
  pqc_status BuildIndex(uint64_t sequence_id, const pqc_build_options&,
                        RefusalBuffer*) noexcept override {
    sidecar_.BuildIndex(sequence_id);
    return PQC_OK;
  }
  void Count(uint64_t* rpcs, uint64_t* background_rpcs) noexcept override {
    *rpcs = *background_rpcs = 0;
  }

  pqc_status ForkSequence(uint64_t, uint64_t, uint64_t*, uint64_t*,
                          RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status ForkSequences(ForkItem*, uint32_t, const uint64_t*, uint32_t,
                           RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status ClosePrefill(uint64_t, RefusalBuffer* error) noexcept override { return Not(error); }
  pqc_status PrefixKeys(uint64_t, const pqc_sequence_options&, pqc_prefix_key*, pqc_prefix_key*,
                        uint64_t, uint64_t*, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status WatchEvents(uint64_t, uint64_t, uint64_t, uint64_t*,
                         RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status NextEvents(uint64_t, uint32_t, pqc_cache_event*, uint32_t, uint32_t*,
                        RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  void EndWatch(uint64_t) noexcept override {}
  pqc_status CheckConnected(RefusalBuffer*) noexcept override { return PQC_OK; }
  pqc_status TopPages(const TopPagesItem*, uint32_t, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status FindSequence(uint64_t, uint64_t sequence_id, uint64_t* token_count, pqc_index*,
                          RefusalBuffer*) noexcept override {
    *token_count = sidecar_.token_count(sequence_id);
    return PQC_OK;
  }
  pqc_status MatchPrefix(uint64_t, const pqc_sequence_options&, uint64_t*,
                         RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status Admit(uint64_t, uint64_t, uint64_t, pqc_admission*,
                   RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status AdmitIndexed(uint64_t, uint64_t, uint64_t, const pqc_index&, pqc_admission*,
                          RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status PinSequence(uint64_t, uint64_t, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status SuspendSequence(uint64_t, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status ResumeSequence(uint64_t, uint64_t*, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status Ingest(uint64_t, uint64_t, const RowBlock&, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status AddSamples(uint64_t, const SampleBlock* samples, uint32_t sample_count,
                        RefusalBuffer*) noexcept override {
    for (uint32_t i = 0; i < sample_count; ++i) sidecar_.AddSamples(samples[i]);
    return PQC_OK;
  }
  pqc_status TopK(const TopKItem*, uint32_t, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status Score(const QueryView&, const kvstore::IndexDescriptor&, kvstore::TokenRange,
                   const ScoresOut&, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status FetchBlocks(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* rows,
                         RefusalBuffer* error) noexcept override {
    return sidecar_.Fetch(fetch, tokens, rows, error);
  }
  pqc_status FetchTokens(const FetchView&, const PositionsView&, std::byte*,
                         RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status Attend(const AttendItem*, uint32_t, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status AttendRange(const AttendRangeItem*, uint32_t, RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status Attach(uint64_t, const LeaseView&, uint64_t*, uint32_t*, const ImageSink&,
                    RefusalBuffer* error) noexcept override {
    return Not(error);
  }
  pqc_status Detach(const LeaseView&, RefusalBuffer* error) noexcept override { return Not(error); }
  pqc_status AdminJson(const char*, const char*, const TextSink&,
                       RefusalBuffer* error) noexcept override {
    return Not(error);
  }

 private:
  ~PoolRemote() = default;

  static pqc_status Not(RefusalBuffer* error) {
    std::snprintf(error->text, sizeof(error->text),
                  "the stand-in for the sidecar has no such call");
    return PQC_UNIMPLEMENTED;
  }

  PoolSidecar& sidecar_;
};

// What has no meaning without it: a test program that cannot go on.
void Require(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::abort();
}

}  // namespace

SharedBytes::SharedBytes(size_t size_bytes) : size_bytes_(size_bytes) {
  descriptor_ = memfd_create("pqcached-test", MFD_CLOEXEC);
  Require(descriptor_ >= 0 && ftruncate(descriptor_, static_cast<off_t>(size_bytes)) == 0,
          "memfd_create");
  void* const memory =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  Require(memory != MAP_FAILED, "mmap");
  data_ = static_cast<std::byte*>(memory);
}

SharedBytes::~SharedBytes() {
  munmap(data_, size_bytes_);
  close(descriptor_);
}

pqc_status SharedBytes::Map(MappingAccess access, std::shared_ptr<Mapping>* mapping) const {
  return Mapping::Map(dup(descriptor_), size_bytes_, access, "memory", mapping);
}

PoolSidecar::PoolSidecar() : pool_(kPoolBytes), control_(sizeof(LeaseWords) * (kMaxSequences + 1)) {
  static_assert(sizeof(ControlPage) <= sizeof(LeaseWords));
  auto* const page = new (control_.data()) ControlPage;
  page->word_count = kMaxSequences;
  page->words_offset_bytes = sizeof(LeaseWords);
  for (uint32_t i = 0; i < kMaxSequences; ++i) {
    new (control_.data() + sizeof(LeaseWords) * (i + 1)) LeaseWords;
  }
  page->boot_word = kBootWord;
}

pqc_client* PoolSidecar::OpenClient(const ClientOptions& options) {
  auto state = std::make_shared<ClientState>();
  state->timeout_ms = options.timeout_ms;
  state->remote.reset(new PoolRemote(*this));
  state->remote_version = kRemoteVersion;
  LocalLink::Parts parts;
  parts.boot_word = kBootWord;
  parts.host = std::make_unique<PoolHost>(*this);
  Require(control_.Map(MappingAccess::kRead, &parts.control) == PQC_OK, "mapping control memory");
  const auto no_resume = [](uint32_t, LocalLink::Parts*) { return PQC_NOT_FOUND; };
  const pqc_status status = LocalSession::Open(std::move(parts), no_resume,
                                               {.workers = {.thread_count = 1},
                                                .staging_slot_bytes = options.slot_bytes,
                                                .staging_slot_count = options.slot_count,
                                                .timeout_ms = options.timeout_ms,
                                                .phase = std::make_shared<SessionPhase>()},
                                               &state->local);
  Require(status == PQC_OK, pqc_last_error());
  state->Start();
  return new pqc_client{std::move(state)};
}

pqc_client* PoolSidecar::OpenRemoteClient() {
  auto state = std::make_shared<ClientState>();
  state->timeout_ms = 60000;
  state->remote.reset(new PoolRemote(*this));
  state->remote_version = kRemoteVersion;
  state->Start();
  return new pqc_client{std::move(state)};
}

void PoolSidecar::CloseGate() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
}

void PoolSidecar::LetFetchesPass(uint32_t count) {
  {
    const std::lock_guard lock(mutex_);
    fetch_passes_ = count;
  }
  opened_.notify_all();
}

void PoolSidecar::OpenGate() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = false;
  }
  opened_.notify_all();
}

void PoolSidecar::RefuseCommits(uint32_t count) {
  const std::lock_guard lock(mutex_);
  refused_commits_ = count;
}

uint64_t PoolSidecar::commit_count() const {
  const std::lock_guard lock(mutex_);
  return commit_count_;
}

pqc_status PoolSidecar::HoldPool() {
  ++hold_count_;
  return hold_status_ == PQC_OK ? PQC_OK : client::Fail(hold_status_, "call", "5");
}

pqc_status PoolSidecar::OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                                    std::shared_ptr<Mapping>* ring) {
  const std::lock_guard lock(mutex_);
  slot_bytes_ = slot_bytes;
  ring_ = std::make_unique<SharedBytes>(slot_bytes * slot_count);
  return ring_->Map(MappingAccess::kReadWrite, ring);
}

void PoolSidecar::SetLayers(const pqc_layer_group& group) {
  const std::lock_guard lock(mutex_);
  layers_.assign(group.layers, group.layers + group.layer_count);
  shape_ = {.dtype = static_cast<kernels::DType>(group.dtype),
            .key_dim = group.key_dim,
            .value_dim = group.value_dim,
            .kv_heads = group.kv_heads,
            .query_heads = group.query_heads};
  shape_.row_bytes =
      static_cast<uint32_t>((shape_.key_dim + shape_.value_dim) * DTypeBytes(shape_.dtype));
}

// Powers of two, aligned to their size, as the block of an ExtentRef may be.
kvstore::ExtentRef PoolSidecar::TakeExtent(size_t size_bytes) {
  const size_t units =
      std::bit_ceil((size_bytes + kvstore::kMinExtentBytes - 1) / kvstore::kMinExtentBytes);
  const auto unit = static_cast<uint32_t>((next_unit_ + units - 1) / units * units);
  next_unit_ = unit + static_cast<uint32_t>(units);
  Require(size_t{next_unit_} * kvstore::kMinExtentBytes <= kPoolBytes, "the pool is full");
  return {unit, static_cast<uint32_t>(std::countr_zero(units))};
}

uint64_t PoolSidecar::CreateSequence() {
  const std::lock_guard lock(mutex_);
  const uint64_t sequence_id = sequences_.size() + 1;
  Require(sequence_id <= kMaxSequences, "too many sequences");
  StoredSequence& sequence = sequences_[sequence_id];
  const kernels::PqGeometry geometry = kvstore::GeometryOf(kIndex, shape_.key_dim);
  const size_t planes_bytes = kernels::CodePlanesBytes(geometry, kSequenceTokens);
  const size_t centroids_bytes = kernels::CentroidFloats(geometry) * sizeof(float);
  sequence.layers.resize(layers_.size());
  for (StoredLayer& layer : sequence.layers) {
    for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
      layer.rows.push_back(TakeExtent(size_t{kSequenceTokens} * shape_.row_bytes));
    }
    layer.planes = TakeExtent(kContentBegin + shape_.kv_heads * planes_bytes);
    layer.codebook = TakeExtent(kContentBegin + shape_.kv_heads * centroids_bytes);
    auto* const data = new (pool_.data() + layer.planes.offset_bytes()) IndexDataHeader;
    data->index = kIndex;
    data->kv_head_count = shape_.kv_heads;
    data->slot_capacity = kSequenceTokens;
    data->plane_offset_bytes = kContentBegin;
    data->head_stride_bytes = planes_bytes;
    data->plane_stride_bytes = kernels::PlaneStride(kSequenceTokens);
    auto* const codebook = new (pool_.data() + layer.codebook.offset_bytes()) CodebookHeader;
    codebook->index = kIndex;
    codebook->kv_head_count = shape_.kv_heads;
    codebook->key_dim = shape_.key_dim;
    codebook->centroid_offset_bytes = kContentBegin;
    codebook->head_stride_bytes = centroids_bytes;
    codebook->paired_dims = kernels::PairedDims(geometry, shape_.key_dim);
  }
  words(sequence_id).lease_id = sequence_id;
  words(sequence_id).version = sequence.version;
  return sequence_id;
}

LeaseWords& PoolSidecar::words(uint64_t sequence_id) const {
  return *reinterpret_cast<LeaseWords*>(control_.data() + sizeof(LeaseWords) * sequence_id);
}

const std::byte* PoolSidecar::Elements(const TensorView& tensor,
                                       std::vector<std::byte>& packed) const {
  if (tensor.staging != nullptr) {
    return ring_->data() + tensor.staging->slot * slot_bytes_ + tensor.staging->offset_bytes;
  }
  packed.resize(tensor.shape[0] * BytesPerIndex(tensor));
  Pack(tensor, 0, tensor.shape[0], packed.data());
  return packed.data();
}

void PoolSidecar::Write(StoredSequence& sequence, uint64_t first_position, const RowBlock& rows) {
  const auto ordinal = std::find(layers_.begin(), layers_.end(), rows.layer) - layers_.begin();
  StoredLayer& layer = sequence.layers[static_cast<size_t>(ordinal)];
  const auto end = static_cast<uint32_t>(first_position + rows.keys.shape[0]);
  Require(end <= kSequenceTokens && first_position <= layer.token_count, "rows beyond the room");
  const auto put = [&](const TensorView& from, size_t offset) {
    std::vector<std::byte> packed;
    const std::byte* const elements = Elements(from, packed);
    const size_t dim = from.shape[2];
    const size_t from_bytes = dim * DTypeBytes(static_cast<kernels::DType>(from.dtype));
    for (size_t token = 0; token < from.shape[0]; ++token) {
      for (size_t head = 0; head < shape_.kv_heads; ++head) {
        std::byte* const row = pool_.data() + layer.rows[head].offset_bytes() +
                               (first_position + token) * shape_.row_bytes;
        kernels::ConvertElements(static_cast<kernels::DType>(from.dtype),
                                 elements + (token * shape_.kv_heads + head) * from_bytes,
                                 shape_.dtype, row + offset, dim);
      }
    }
  };
  put(rows.keys, 0);
  put(rows.values, shape_.key_dim * DTypeBytes(shape_.dtype));
  layer.token_count = std::max(layer.token_count, end);
  if (sequence.has_index) Encode(layer, static_cast<uint32_t>(first_position), end);
}

pqc_status PoolSidecar::Commit(uint64_t sequence_id, uint64_t first_position, const RowBlock* rows,
                               uint32_t count, RefusalBuffer* error) {
  std::unique_lock lock(mutex_);
  opened_.wait(lock, [this] { return !is_closed_; });
  ++commit_count_;
  if (refused_commits_ > 0) {
    --refused_commits_;
    std::snprintf(error->text, sizeof(error->text), "rows[0].keys: refused by the test");
    return PQC_INVALID_ARGUMENT;
  }
  for (uint32_t i = 0; i < count; ++i) Write(sequences_.at(sequence_id), first_position, rows[i]);
  Publish(sequence_id);
  return PQC_OK;
}

uint64_t PoolSidecar::Append(AppendItem& item) {
  const std::lock_guard lock(mutex_);
  for (uint32_t i = 0; i < item.row_block_count; ++i) {
    Write(sequences_.at(item.sequence_id), item.first_position, item.rows[i]);
  }
  Publish(item.sequence_id);
  return words(item.sequence_id).token_count;
}

pqc_status PoolSidecar::Fetch(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* rows,
                              RefusalBuffer* error) {
  std::unique_lock lock(mutex_);
  opened_.wait(lock, [this] { return !is_closed_ || fetch_passes_ > 0; });
  if (is_closed_) --fetch_passes_;
  const auto ordinal = std::find(layers_.begin(), layers_.end(), fetch.layer) - layers_.begin();
  const StoredLayer& layer = sequences_.at(fetch.sequence_id).layers[static_cast<size_t>(ordinal)];
  if (tokens.end > layer.token_count) {
    SetRefusal(error, "ranges[0]", "beyond the rows that are stored");
    return PQC_OUT_OF_RANGE;
  }
  for (const kvstore::ExtentRef& head : layer.rows) {
    const size_t bytes = (tokens.end - tokens.begin) * shape_.row_bytes;
    std::memcpy(rows, pool_.data() + head.offset_bytes() + tokens.begin * shape_.row_bytes, bytes);
    rows += bytes;
  }
  return PQC_OK;
}

void PoolSidecar::Truncate(uint64_t sequence_id, uint64_t token_count) {
  const std::lock_guard lock(mutex_);
  for (StoredLayer& layer : sequences_.at(sequence_id).layers) {
    layer.token_count = std::min(layer.token_count, static_cast<uint32_t>(token_count));
  }
  Publish(sequence_id);
}

void PoolSidecar::AddSamples(const SampleBlock& samples) {
  const std::lock_guard lock(mutex_);
  Samples& to = samples_[samples.layer];
  const uint64_t count = samples.queries.shape[0];
  to.positions.assign(samples.positions, samples.positions + count);
  std::vector<std::byte> packed;
  const std::byte* const elements = Elements(samples.queries, packed);
  to.queries.resize(packed.size() / DTypeBytes(static_cast<kernels::DType>(samples.queries.dtype)));
  kernels::ConvertElements(static_cast<kernels::DType>(samples.queries.dtype), elements,
                           kernels::DType::kF32, reinterpret_cast<std::byte*>(to.queries.data()),
                           to.queries.size());
}

PoolSidecar::Samples PoolSidecar::samples(uint32_t layer) {
  const std::lock_guard lock(mutex_);
  return samples_[layer];
}

void PoolSidecar::BuildIndex(uint64_t sequence_id) {
  const std::lock_guard lock(mutex_);
  StoredSequence& sequence = sequences_.at(sequence_id);
  for (StoredLayer& layer : sequence.layers) TrainAndEncode(layer);
  sequence.has_index = true;
  words(sequence_id).version = ++sequence.version;
}

// Centroids are keys, evenly spread over the tokens: coarse, and enough to tell selections apart.
void PoolSidecar::TrainAndEncode(StoredLayer& layer) {
  const auto& codebook =
      *reinterpret_cast<CodebookHeader*>(pool_.data() + layer.codebook.offset_bytes());
  const kernels::PqGeometry geometry = kvstore::GeometryOf(codebook);
  const uint32_t dim = kernels::SubspaceDim(geometry);
  const uint32_t count = kernels::CentroidCount(geometry);
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    auto* to = const_cast<float*>(kvstore::Centroids(codebook, head).data());
    for (uint32_t subspace = 0; subspace < geometry.subspace_count; ++subspace) {
      for (uint32_t centroid = 0; centroid < count; ++centroid) {
        const size_t token = size_t{centroid} * layer.token_count / count;
        const std::byte* const row =
            pool_.data() + layer.rows[head].offset_bytes() + token * shape_.row_bytes;
        for (uint32_t i = 0; i < dim; ++i) {
          *to++ = kernels::LoadElement(shape_.dtype, row, kernels::DimOf(geometry, subspace, i));
        }
      }
    }
  }
  Encode(layer, 0, layer.token_count);
}

void PoolSidecar::Encode(const StoredLayer& layer, uint32_t begin, uint32_t end) {
  const auto& data =
      *reinterpret_cast<const IndexDataHeader*>(pool_.data() + layer.planes.offset_bytes());
  const auto& codebook =
      *reinterpret_cast<const CodebookHeader*>(pool_.data() + layer.codebook.offset_bytes());
  const kernels::PqGeometry geometry = kvstore::GeometryOf(codebook);
  constexpr size_t kAlignment = 64;
  std::vector<std::byte> scratch(kernels::PqEncodeScratchBytes(geometry) + kAlignment);
  void* aligned = scratch.data();
  size_t room = scratch.size();
  std::align(kAlignment, room - kAlignment, aligned, room);
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    kernels::PqEncode(kernels::Exec{}, {.geometry = geometry,
                                        .dtype = shape_.dtype,
                                        .rows = pool_.data() + layer.rows[head].offset_bytes() +
                                                size_t{begin} * shape_.row_bytes,
                                        .row_stride = shape_.row_bytes,
                                        .row_count = end - begin,
                                        .centroids = kvstore::Centroids(codebook, head),
                                        .planes = const_cast<uint8_t*>(kvstore::Planes(data, head)),
                                        .plane_stride = data.plane_stride_bytes,
                                        .first_slot = begin,
                                        .scratch = {static_cast<std::byte*>(aligned), room}});
  }
}

// Nobody is woken: who waits looks again after 50 ms at the latest.
void PoolSidecar::Publish(uint64_t sequence_id) {
  uint32_t token_count = kSequenceTokens;
  for (const StoredLayer& layer : sequences_.at(sequence_id).layers) {
    token_count = std::min(token_count, layer.token_count);
  }
  words(sequence_id).token_count.store(token_count, std::memory_order_release);
}

void PoolSidecar::Attach(uint64_t sequence_id, AttachAnswer* answer) {
  const std::lock_guard lock(mutex_);
  const StoredSequence& sequence = sequences_.at(sequence_id);
  kvstore::Attachment attachment;
  attachment.header.sequence_id = sequence_id;
  attachment.header.version = sequence.version;
  attachment.header.token_count = words(sequence_id).token_count;
  attachment.header.index_count = 1;
  attachment.header.indexes[0] = kIndex;
  attachment.segments.push_back({.segment_id = sequence_id, .slot_capacity = kSequenceTokens});
  for (size_t i = 0; i < layers_.size(); ++i) {
    const StoredLayer& layer = sequence.layers[i];
    attachment.layer_tokens.push_back(layer.token_count);
    kvstore::LayerDescriptor descriptor;
    descriptor.layer = layers_[i];
    descriptor.row_bytes = shape_.row_bytes;
    descriptor.kv_head_count = shape_.kv_heads;
    descriptor.row_extent_begin = static_cast<uint32_t>(attachment.row_extents.size());
    if (sequence.has_index) {
      descriptor.state[0] = kvstore::LayerState::kReady;
      descriptor.index_data[0] = layer.planes;
      descriptor.codebook[0] = layer.codebook;
    }
    attachment.layers.push_back(descriptor);
    attachment.row_extents.insert(attachment.row_extents.end(), layer.rows.begin(),
                                  layer.rows.end());
  }
  answer->lease_id = sequence_id;
  answer->word_index = static_cast<uint32_t>(sequence_id - 1);
  answer->image.version = sequence.version;
  answer->image.image = kvstore::EncodeAttachment(attachment);
}

uint64_t PoolSidecar::token_count(uint64_t sequence_id) { return words(sequence_id).token_count; }

}  // namespace pqcached::testing
