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

PrefixKey TenantKey(std::string_view tenant) {
  Fields fields;
  fields.Add(std::string_view("pqcached tenant 1"));
  fields.Add(tenant);
  return Sha256(fields.bytes());
}

NameView::NameView(const TokenNames& names) : words(names.token_ids) {
  if (names.content_keys.empty()) return;
  kind = NameKind::kContentKeys;
  words = {names.content_keys.front().data(), names.content_keys.size() * kContentKeyWords};
}

PrefixKey NextPrefixKey(const PrefixKey& before, std::span<const uint32_t> step) {
  PQC_CHECK(step.size() == kPrefixStepTokens || step.size() == kContentKeyWords);
  std::array<std::byte, sizeof(PrefixKey) + kPrefixStepTokens * sizeof(uint32_t)> bytes;
  std::memcpy(bytes.data(), before.data(), before.size());
  std::memcpy(bytes.data() + before.size(), step.data(), step.size_bytes());
  // The two kinds differ in their length.
  return Sha256(std::span(bytes).first(before.size() + step.size_bytes()));
}

std::vector<PrefixKey> ChainOf(const PrefixKey& root, const NameView& names) {
  std::vector<PrefixKey> keys = {root};
  const size_t step = StepWords(names.kind);
  for (auto words = names.words; words.size() >= step; words = words.subspan(step)) {
    keys.push_back(NextPrefixKey(keys.back(), words.first(step)));
  }
  return keys;
}

PrefixKey StepKeyAt(std::span<const PrefixKey> chain, uint32_t position) {
  return chain[std::min<size_t>(chain.size() - 1, position / kPrefixStepTokens)];
}

PrefixKey PromptDigest(const NameView& names, std::string_view extra_key) {
  Fields fields;
  fields.Add(std::string_view("pqcached prompt 2"));
  fields.Add(extra_key);
  fields.Add(static_cast<uint32_t>(names.kind));
  fields.Add(std::string_view(reinterpret_cast<const char*>(names.words.data()),
                              names.words.size_bytes()));
  return Sha256(fields.bytes());
}

absl::Status CheckOneKind(const TokenNames& names) {
  if (names.token_ids.empty() || names.content_keys.empty()) return absl::OkStatus();
  return InvalidArgument("content_keys", "token_ids are given, too; all names are of one kind");
}

absl::Status CheckPrefix(const TokenNames& names, std::string_view extra_key) {
  RETURN_IF_ERROR(CheckOneKind(names));
  if (names.token_ids.size() > kMaxNamedAhead) {
    return InvalidArgument("token_ids", absl::StrCat(names.token_ids.size(),
                                                     " of them, must be at most ", kMaxNamedAhead));
  }
  if (names.content_keys.size() > kMaxNamedAhead / kPrefixStepTokens) {
    return InvalidArgument("content_keys",
                           absl::StrCat(names.content_keys.size(), " of them, must be at most ",
                                        kMaxNamedAhead / kPrefixStepTokens));
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

void PrefixIndex::Add(const PrefixStep& step, const std::shared_ptr<NamedTokens>& holder) {
  const MutexLock lock(&mutex_);
  Step& listed = steps_[step.key];
  listed.holders.emplace_back(holder.get(), holder);
  if (listed.stored_number == 0) listed.stored_number = events_.NoteStored(step);
}

void PrefixIndex::Remove(const PrefixKey& key, const NamedTokens* holder) {
  const MutexLock lock(&mutex_);
  const auto it = steps_.find(key);
  if (it == steps_.end()) return;
  std::erase_if(it->second.holders,
                [holder](const Holder& other) { return other.first == holder; });
  if (!it->second.holders.empty()) return;
  if (it->second.stored_number > 0) events_.NoteRemoved(it->second.stored_number);
  steps_.erase(it);
}

bool PrefixIndex::HasEvents(const EventPosition& position) const {
  const MutexLock lock(&mutex_);
  return events_.HasNews(position);
}

std::vector<CacheEvent> PrefixIndex::ReadEvents(EventPosition& position, size_t most,
                                                size_t log_events) {
  std::vector<CacheEvent> events;
  events.reserve(most);
  while (true) {
    {
      const MutexLock lock(&mutex_);
      if (events_.has_log()) {
        events_.ReadInto(position, most, events);
        return events;
      }
    }
    std::vector<CacheEvent> log(log_events);  // its pages are cleared without the lock
    const MutexLock lock(&mutex_);
    if (!events_.has_log()) events_.StartLog(std::move(log));
  }
}

std::vector<PrefixKey> PrefixIndex::Match(const PrefixKey& root, const NameView& names) const {
  std::vector<PrefixKey> keys;
  PrefixKey key = root;
  const size_t step = StepWords(names.kind);
  for (auto words = names.words; words.size() >= step; words = words.subspan(step)) {
    key = NextPrefixKey(key, words.first(step));
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
  for (const Holder& holder : it->second.holders) {
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

void NamedTokens::Restore(NameWords names) {
  const MutexLock lock(&mutex_);
  names_ = std::move(names);
  ListStoredSteps();
}

absl::StatusOr<size_t> NamedTokens::Known(uint64_t first_position, const NameView& names) const {
  const bool by_key = names.kind == NameKind::kContentKeys;
  const char* const field = by_key ? "content_keys" : "token_ids";
  if (!names_.words.empty() && !names.words.empty() && names.kind != names_.kind) {
    return InvalidArgument(
        field, absl::StrCat("the sequence's tokens are named by ",
                            by_key ? "their ids" : "content keys", "; all names are of one kind"));
  }
  if (by_key && first_position % kPrefixStepTokens != 0) {
    return InvalidArgument("first_position",
                           absl::StrCat(first_position, ": a content key names ", kPrefixStepTokens,
                                        " tokens from a multiple of them on"));
  }
  const size_t named = NameView(names_).token_count();
  if (first_position > named) {
    return InvalidArgument("first_position",
                           absl::StrCat(first_position, ": a gap; ", named, " tokens are named"));
  }
  const uint64_t end = first_position + names.token_count();
  const uint64_t limit = std::min(uint64_t{stored_} + kMaxNamedAhead, uint64_t{kMaxSequenceTokens});
  if (end > limit) {
    return InvalidArgument(
        field, absl::StrCat("they end at ", end, "; ", stored_, " tokens are stored, at most ",
                            limit, " may be named"));
  }
  if (names.words.empty()) return size_t{0};
  const size_t first_word = WordsOf(names.kind, first_position);
  const size_t known = std::min(names_.words.size() - first_word, names.words.size());
  const auto begin = names_.words.begin() + static_cast<ptrdiff_t>(first_word);
  const auto [ours, theirs] =
      std::mismatch(begin, begin + static_cast<ptrdiff_t>(known), names.words.begin());
  if (ours == begin + static_cast<ptrdiff_t>(known)) return known;
  const auto word = static_cast<size_t>(theirs - names.words.begin());
  if (by_key) {
    const size_t key = word / kContentKeyWords;
    return InvalidArgument(absl::StrCat("content_keys[", key, "]"),
                           absl::StrCat("position ", first_position + key * kPrefixStepTokens,
                                        " has another content key"));
  }
  return InvalidArgument(
      absl::StrCat("token_ids[", word, "]"),
      absl::StrCat(*theirs, "; position ", first_position + word, " is named ", *ours));
}

absl::Status NamedTokens::Check(uint64_t first_position, const NameView& names) const {
  const MutexLock lock(&mutex_);
  return Known(first_position, names).status();
}

absl::Status NamedTokens::Name(uint64_t first_position, const NameView& names) {
  const MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(const auto known, Known(first_position, names));
  if (known == names.words.size()) return absl::OkStatus();
  names_.kind = names.kind;
  names_.words.insert(names_.words.end(), names.words.begin() + static_cast<ptrdiff_t>(known),
                      names.words.end());
  if (record_ != nullptr) record_->Write(names_.kind, names_.words);
  ListStoredSteps();
  return absl::OkStatus();
}

void NamedTokens::ListStoredSteps() {
  const size_t step = StepWords(names_.kind);
  while ((keys_.size() + 1) * step <= names_.words.size()) {
    keys_.push_back(
        NextPrefixKey(keys_.empty() ? root_ : keys_.back(),
                      std::span<const uint32_t>(names_.words).subspan(keys_.size() * step, step)));
  }
  const size_t stored_steps = stored_ / kPrefixStepTokens;
  while (listed_steps_ < std::min(keys_.size(), stored_steps)) {
    const PrefixKey& parent = listed_steps_ == 0 ? root_ : keys_[listed_steps_ - 1];
    const uint64_t token_end = (uint64_t{listed_steps_} + 1) * kPrefixStepTokens;
    index_->Add({.key = keys_[listed_steps_], .parent = parent, .token_end = token_end},
                shared_from_this());
    ++listed_steps_;
  }
}

void NamedTokens::TruncateTo(uint32_t token_count) {
  const size_t steps = token_count / kPrefixStepTokens;
  while (listed_steps_ > steps) index_->Remove(keys_[--listed_steps_], this);
  if (const size_t words = WordsOf(names_.kind, token_count); names_.words.size() > words) {
    names_.words.resize(words);
    if (record_ != nullptr) record_->Write(names_.kind, names_.words);
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
  const size_t words = WordsOf(names_.kind, std::min(token_count, stored_));
  return Shared{std::move(snapshot), FirstNames(std::min(names_.words.size(), words))};
}

NameWords NamedTokens::FirstNames(size_t word_count) const {
  return {names_.kind,
          {names_.words.begin(), names_.words.begin() + static_cast<ptrdiff_t>(word_count)}};
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

AnnouncedEnd NamedTokens::named_end() const {
  const MutexLock lock(&mutex_);
  const auto count = static_cast<uint32_t>(NameView(names_).token_count());
  const bool by_key = count > 0 && names_.kind == NameKind::kContentKeys;
  return {.least = count,
          .most = count + (by_key ? static_cast<uint32_t>(kPrefixStepTokens) - 1 : 0)};
}

std::vector<PrefixKey> NamedTokens::ListedKeys() const {
  const MutexLock lock(&mutex_);
  return {keys_.begin(), keys_.begin() + static_cast<ptrdiff_t>(listed_steps_)};
}

NameWords NamedTokens::ListedNames() const {
  const MutexLock lock(&mutex_);
  return FirstNames(listed_steps_ * StepWords(names_.kind));
}

bool NamedTokens::BeginsWith(const NameView& names) const {
  const MutexLock lock(&mutex_);
  const size_t stored = std::min(names_.words.size(), WordsOf(names_.kind, stored_));
  return names.kind == names_.kind && names.words.size() <= stored &&
         std::equal(names.words.begin(), names.words.end(), names_.words.begin());
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
