// A client on the same host, in this process: what it maps, and what it reads there.
#ifndef PQCACHED_TESTS_KVSTORE_SHARE_LEASE_FIXTURE_H_
#define PQCACHED_TESTS_KVSTORE_SHARE_LEASE_FIXTURE_H_

#include <sys/mman.h>

#include <cstring>
#include <string>
#include <vector>

#include "kvstore/read/attachment.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore::testing {

// Maps read-only for as long as it lives.
class ReadMapping {
 public:
  explicit ReadMapping(SharedMemory memory) : memory_(std::move(memory)) {
    data_ = mmap(nullptr, memory_.size_bytes, PROT_READ, MAP_SHARED, memory_.descriptor.get(), 0);
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~ReadMapping() { munmap(data_, memory_.size_bytes); }
  ReadMapping(const ReadMapping&) = delete;
  ReadMapping& operator=(const ReadMapping&) = delete;
  const std::byte* data() const { return static_cast<const std::byte*>(data_); }
  size_t size_bytes() const { return memory_.size_bytes; }

 private:
  SharedMemory memory_;
  void* data_;
};

class MappedClient {
 public:
  MappedClient(Store& store, uint64_t cache_id, std::string session, uint64_t boot_word = 77)
      : store_(store),
        session_(std::move(session)),
        control_(std::move(store.OpenLocalSession("tenant", session_, boot_word)->control)),
        pool_(*store.OpenPool(kTenant, "", cache_id)) {}

  const std::string& session() const { return session_; }
  const ControlPage& page() const { return *reinterpret_cast<const ControlPage*>(control_.data()); }
  const LeaseWords& words(uint32_t index) const {
    return reinterpret_cast<const LeaseWords*>(control_.data() + page().words_offset_bytes)[index];
  }
  const LeaseWords& words() const { return words(word_index_); }
  const std::byte* pool() const { return pool_.data(); }

  absl::Status Attach(uint64_t sequence_id) {
    const auto attached = store_.Attach(kTenant, sequence_id, session_, {});
    if (!attached.ok()) return attached.status();
    lease_.lease_id = attached->lease_id;
    word_index_ = attached->word_index;
    return Take(attached->attachment);
  }
  // Acknowledges what it has; takes what is newer.
  absl::Status Refresh() {
    const auto newer = store_.RefreshLease(session_, lease_);
    if (!newer.ok()) return newer.status();
    return newer->image.empty() ? absl::OkStatus() : Take(*newer);
  }
  absl::Status Detach() { return store_.Detach(session_, lease_.lease_id); }

  const LeaseState& lease() const { return lease_; }
  const Attachment& attachment() const { return attachment_; }

  // Rows [0, token_count) of a layer, as LayerModel::Rows gives them.
  std::vector<float> Rows(const LayerGroup& group, uint32_t layer, uint32_t token_count) const {
    const LayerShape shape{.dtype = group.dtype,
                           .key_dim = group.key_dim,
                           .value_dim = group.value_dim,
                           .kv_heads = group.kv_heads,
                           .query_heads = group.query_heads,
                           .row_bytes = group.row_bytes()};
    MappedLayer mapped;
    EXPECT_EQ(MappedLayer::Make(attachment_, layer, shape, kMaxIndexes, pool_.data(), &mapped), "");
    const LayerView view = mapped.View(token_count);
    EXPECT_EQ(view.token_count(), token_count);
    std::vector<float> rows;
    const uint32_t dim = group.key_dim + group.value_dim;
    for (uint32_t head = 0; head < group.kv_heads; ++head) {
      for (const SegmentView& segment : view.segments) {
        for (uint32_t i = 0; i < segment.token_count * dim; ++i) {
          rows.push_back(kernels::LoadElement(group.dtype, segment.rows[head], i));
        }
      }
    }
    return rows;
  }

 private:
  absl::Status Take(const VersionedImage& image) {
    const std::string wrong = ParseAttachment(image.image, pool_.size_bytes(), &attachment_);
    if (!wrong.empty()) return absl::InternalError(wrong);
    lease_.known_version = image.version;
    return absl::OkStatus();
  }

  Store& store_;
  const std::string session_;
  ReadMapping control_;
  ReadMapping pool_;
  LeaseState lease_;
  uint32_t word_index_ = 0;
  Attachment attachment_;
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_SHARE_LEASE_FIXTURE_H_
