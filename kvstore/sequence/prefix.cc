#include "kvstore/sequence/prefix.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

PrefixKey Sha256(std::span<const std::byte> bytes) {
  PrefixKey key;
  unsigned int size = 0;
  const int done =
      EVP_Digest(bytes.data(), bytes.size(), key.data(), &size, EVP_sha256(), /*impl=*/nullptr);
  PQC_CHECK(done == 1 && size == key.size());
  return key;
}

// Serializes fields one after the other. Strings carry their length, so that no two different lists
// of fields give the same bytes.
class Fields {
 public:
  void Add(std::string_view text) {
    Add(static_cast<uint64_t>(text.size()));
    bytes_.append(text);
  }
  template <typename T>
  void Add(T number) {
    static_assert(std::is_arithmetic_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(bytes_)); }

 private:
  std::string bytes_;
};

}  // namespace

PrefixKey PrefixRoot(std::string_view tenant, const CacheSpec& spec, std::string_view extra_key) {
  Fields fields;
  fields.Add(std::string_view("pqcached prefix 1"));
  fields.Add(std::string_view(spec.model_fingerprint));
  fields.Add(tenant);
  fields.Add(extra_key);
  fields.Add(uint64_t{spec.groups.size()});
  for (const LayerGroup& group : spec.groups) {
    fields.Add(static_cast<uint32_t>(group.kind));
    fields.Add(uint64_t{group.layers.size()});
    for (const uint32_t layer : group.layers) fields.Add(layer);
    if (group.kind == LayerKind::kNone) continue;
    fields.Add(group.kv_heads);
    fields.Add(group.key_dim);
    fields.Add(group.value_dim);
    fields.Add(static_cast<uint32_t>(group.dtype));
    fields.Add(static_cast<uint32_t>(group.rope.layout));
    fields.Add(group.rope.theta);
    fields.Add(group.rope.rotary_dim);
  }
  fields.Add(spec.rank.kv_head_begin);
  fields.Add(spec.rank.layer_begin);
  return Sha256(fields.bytes());
}

PrefixKey NextPrefixKey(const PrefixKey& before, std::span<const uint32_t> token_ids) {
  PQC_CHECK(token_ids.size() == kPrefixStepTokens);
  std::array<std::byte, sizeof(PrefixKey) + kPrefixStepTokens * sizeof(uint32_t)> bytes;
  std::memcpy(bytes.data(), before.data(), before.size());
  std::memcpy(bytes.data() + before.size(), token_ids.data(), token_ids.size_bytes());
  return Sha256(bytes);
}

PrefixKey PromptDigest(std::span<const uint32_t> token_ids, std::string_view extra_key) {
  Fields fields;
  fields.Add(std::string_view("pqcached prompt 1"));
  fields.Add(extra_key);
  fields.Add(
      std::string_view(reinterpret_cast<const char*>(token_ids.data()), token_ids.size_bytes()));
  return Sha256(fields.bytes());
}

absl::Status CheckPrefix(std::span<const uint32_t> token_ids, std::string_view extra_key) {
  if (token_ids.size() > kMaxNamedAhead) {
    return InvalidArgument(
        "token_ids", absl::StrCat(token_ids.size(), " of them, must be at most ", kMaxNamedAhead));
  }
  if (extra_key.size() > kMaxExtraKeyBytes) {
    return InvalidArgument(
        "extra_key", absl::StrCat(extra_key.size(), " bytes, must be at most ", kMaxExtraKeyBytes));
  }
  return absl::OkStatus();
}

size_t PrefixIndex::KeyHash::operator()(const PrefixKey& key) const {
  size_t hash = 0;
  std::memcpy(&hash, key.data(), sizeof(hash));
  return hash;
}

void PrefixIndex::Add(const PrefixKey& key, const std::shared_ptr<NamedTokens>& holder) {
  const MutexLock lock(&mutex_);
  steps_[key].emplace_back(holder.get(), holder);
}

void PrefixIndex::Remove(const PrefixKey& key, const NamedTokens* holder) {
  const MutexLock lock(&mutex_);
  const auto it = steps_.find(key);
  if (it == steps_.end()) return;
  std::erase_if(it->second, [holder](const Holder& other) { return other.first == holder; });
  if (it->second.empty()) steps_.erase(it);
}

std::vector<PrefixKey> PrefixIndex::Match(const PrefixKey& root,
                                          std::span<const uint32_t> token_ids) const {
  std::vector<PrefixKey> keys;
  PrefixKey key = root;
  for (; token_ids.size() >= kPrefixStepTokens; token_ids = token_ids.subspan(kPrefixStepTokens)) {
    key = NextPrefixKey(key, token_ids.first(kPrefixStepTokens));
    const MutexLock lock(&mutex_);
    if (!steps_.contains(key)) break;
    keys.push_back(key);
  }
  return keys;
}

std::vector<std::shared_ptr<NamedTokens>> PrefixIndex::Holders(const PrefixKey& key) const {
  std::vector<std::shared_ptr<NamedTokens>> holders;
  const MutexLock lock(&mutex_);
  const auto it = steps_.find(key);
  if (it == steps_.end()) return holders;
  for (const Holder& holder : it->second) {
    if (auto alive = holder.second.lock(); alive != nullptr) holders.push_back(std::move(alive));
  }
  return holders;
}

NamedTokens::NamedTokens(std::shared_ptr<PrefixIndex> index, const PrefixKey& root,
                         std::weak_ptr<Sequence> sequence, uint32_t stored_tokens,
                         std::unique_ptr<NamesRecord> record)
    : index_(std::move(index)),
      root_(root),
      sequence_(std::move(sequence)),
      record_(std::move(record)),
      stored_(stored_tokens) {}

void NamedTokens::Restore(std::vector<uint32_t> token_ids) {
  const MutexLock lock(&mutex_);
  token_ids_ = std::move(token_ids);
  ListStoredSteps();
}

absl::StatusOr<size_t> NamedTokens::Known(uint64_t first_position,
                                          std::span<const uint32_t> token_ids) const {
  const size_t named = token_ids_.size();
  if (first_position > named) {
    return InvalidArgument("first_position",
                           absl::StrCat(first_position, ": a gap; ", named, " tokens are named"));
  }
  const uint64_t end = first_position + token_ids.size();
  const uint64_t limit = std::min(uint64_t{stored_} + kMaxNamedAhead, uint64_t{kMaxSequenceTokens});
  if (end > limit) {
    return InvalidArgument("token_ids",
                           absl::StrCat("they end at ", end, "; ", stored_,
                                        " tokens are stored, at most ", limit, " may be named"));
  }
  const auto begin = token_ids_.begin() + static_cast<ptrdiff_t>(first_position);
  const size_t known = std::min(named - first_position, token_ids.size());
  const auto [ours, theirs] =
      std::mismatch(begin, begin + static_cast<ptrdiff_t>(known), token_ids.begin());
  if (ours != begin + static_cast<ptrdiff_t>(known)) {
    return InvalidArgument(
        absl::StrCat("token_ids[", theirs - token_ids.begin(), "]"),
        absl::StrCat(*theirs, "; position ", ours - token_ids_.begin(), " is named ", *ours));
  }
  return known;
}

absl::Status NamedTokens::Check(uint64_t first_position,
                                std::span<const uint32_t> token_ids) const {
  const MutexLock lock(&mutex_);
  return Known(first_position, token_ids).status();
}

absl::Status NamedTokens::Name(uint64_t first_position, std::span<const uint32_t> token_ids) {
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const auto known, Known(first_position, token_ids));
  token_ids_.insert(token_ids_.end(), token_ids.begin() + static_cast<ptrdiff_t>(known),
                    token_ids.end());
  if (record_ != nullptr && known < token_ids.size()) record_->Write(token_ids_);
  ListStoredSteps();
  return absl::OkStatus();
}

void NamedTokens::ListStoredSteps() {
  while ((keys_.size() + 1) * kPrefixStepTokens <= token_ids_.size()) {
    keys_.push_back(NextPrefixKey(
        keys_.empty() ? root_ : keys_.back(),
        std::span(token_ids_).subspan(keys_.size() * kPrefixStepTokens, kPrefixStepTokens)));
  }
  const size_t stored_steps = stored_ / kPrefixStepTokens;
  while (listed_steps_ < std::min(keys_.size(), stored_steps)) {
    index_->Add(keys_[listed_steps_++], shared_from_this());
  }
}

void NamedTokens::TruncateTo(uint32_t token_count) {
  const size_t steps = token_count / kPrefixStepTokens;
  while (listed_steps_ > steps) index_->Remove(keys_[--listed_steps_], this);
  if (token_ids_.size() > token_count) {
    token_ids_.resize(token_count);
    if (record_ != nullptr) record_->Write(token_ids_);
  }
  keys_.resize(std::min(keys_.size(), steps));
  stored_ = std::min(stored_, token_count);
}

absl::StatusOr<NamedTokens::Shared> NamedTokens::Share(uint32_t token_count, bool partial_indexes) {
  const std::shared_ptr<Sequence> sequence = sequence_.lock();
  if (sequence == nullptr) return NotFound("sequence_id", "the sequence was dropped");
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(auto snapshot, sequence->Share(token_count, partial_indexes));
  // Beyond stored_ a truncation may be in progress: those names may belong to tokens that are
  // stored after it.
  const size_t named = std::min({token_ids_.size(), size_t{token_count}, size_t{stored_}});
  return Shared{std::move(snapshot),
                {token_ids_.begin(), token_ids_.begin() + static_cast<ptrdiff_t>(named)}};
}

std::shared_ptr<const Snapshot> NamedTokens::ShareStep(size_t step, const PrefixKey& key) {
  const std::shared_ptr<Sequence> sequence = sequence_.lock();
  if (sequence == nullptr) return nullptr;
  const MutexLock lock(&mutex_);
  if (step >= listed_steps_ || keys_[step] != key) return nullptr;
  // A listed step is stored, and no truncation can remove it while this lock is held.
  const auto token_count = static_cast<uint32_t>((step + 1) * kPrefixStepTokens);
  auto snapshot = sequence->Share(token_count, /*partial_indexes=*/false);
  return snapshot.ok() ? *std::move(snapshot) : nullptr;
}

std::vector<PrefixKey> NamedTokens::ListedKeys() const {
  const MutexLock lock(&mutex_);
  return {keys_.begin(), keys_.begin() + static_cast<ptrdiff_t>(listed_steps_)};
}

std::vector<uint32_t> NamedTokens::ListedIds() const {
  const MutexLock lock(&mutex_);
  return {token_ids_.begin(),
          token_ids_.begin() + static_cast<ptrdiff_t>(listed_steps_ * kPrefixStepTokens)};
}

bool NamedTokens::BeginsWith(std::span<const uint32_t> token_ids) const {
  const MutexLock lock(&mutex_);
  return token_ids.size() <= std::min(token_ids_.size(), size_t{stored_}) &&
         std::equal(token_ids.begin(), token_ids.end(), token_ids_.begin());
}

void NamedTokens::OnPublish(const Snapshot& next) {
  const MutexLock lock(&mutex_);
  stored_ = next.token_count();
  ListStoredSteps();
}

bool NamedTokens::OnTruncate(uint32_t token_count, uint64_t) {
  const MutexLock lock(&mutex_);
  TruncateTo(token_count);
  return false;
}

void NamedTokens::OnDrop() {
  const MutexLock lock(&mutex_);
  TruncateTo(0);
}

}  // namespace pqcached::kvstore
