#include "service/handlers/pages/page_handlers.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/status_macros.h"
#include "service/base/refusal.h"
#include "service/wire/staging_claims.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

// Bytes of a response apart from the contents of its pages, for each page.
constexpr uint64_t kGotPageBytes = 32;
// Pages that are found at a time: those behind a full response are neither counted nor held.
constexpr int kGroupPages = 64;
// Bytes of the pages of one call: staged bytes may be named several times.
constexpr uint64_t kMaxPutBytes = uint64_t{1} << 30;

static_assert(static_cast<int>(kvstore::PageOutcome::kStored) == v1::PAGE_OUTCOME_STORED &&
              static_cast<int>(kvstore::PageOutcome::kPresent) == v1::PAGE_OUTCOME_PRESENT &&
              static_cast<int>(kvstore::PageOutcome::kNoRoom) == v1::PAGE_OUTCOME_NO_ROOM);

absl::StatusOr<std::span<const std::byte>> ContentOf(const v1::Page& page, const std::string& field,
                                                     StagingClaims& claims) {
  switch (page.data_case()) {
    case v1::Page::kContent:
      return std::as_bytes(std::span(page.content().data(), page.content().size()));
    case v1::Page::kStaging: {
      ASSIGN_OR_RETURN(const auto staged, claims.Resolve(page.staging(), field + ".staging"));
      return staged;
    }
    case v1::Page::DATA_NOT_SET:
      break;
  }
  return InvalidArgument(field + ".data", "missing: content or staging");
}

// Returns the status with "pages[first + i].key" in place of the field "keys[i]".
absl::Status KeysInPages(const absl::Status& status, int first) {
  constexpr std::string_view kKeys = "keys[";
  const std::string field = kvstore::FieldOf(status);
  int number = 0;
  if (!field.starts_with(kKeys) ||
      !absl::SimpleAtoi(field.substr(kKeys.size(), field.size() - kKeys.size() - 1), &number)) {
    return status;
  }
  return ReplaceField(absl::StrCat("pages[", first + number, "].key"), status);
}

// Returns the staging memory for a wanted page; empty when the page is to be in the answer.
absl::StatusOr<std::span<std::byte>> PlaceOf(const v1::WantedPage& page, int number,
                                             StagingClaims& claims) {
  if (!page.has_staging()) return std::span<std::byte>();
  const std::string field = absl::StrCat("pages[", number, "].staging");
  ASSIGN_OR_RETURN(const auto place, claims.Resolve(page.staging(), field));
  if (place.size() >= page.capacity_bytes()) return place;
  return InvalidArgument(
      field + ".size_bytes",
      absl::StrCat(place.size(), ", must be at least capacity_bytes, ", page.capacity_bytes()));
}

}  // namespace

absl::Status PageHandlers::PutPages(const Caller& caller, const v1::PutPagesRequest& request,
                                    v1::PutPagesResponse* response) {
  RETURN_IF_ERROR(CheckCount("pages", request.pages_size(), kMaxPages));
  StagingClaims claims(store_, caller.session.id);
  std::vector<kvstore::PageSource> pages;
  uint64_t put_bytes = 0;
  for (int i = 0; i < request.pages_size(); ++i) {
    const v1::Page& page = request.pages(i);
    ASSIGN_OR_RETURN(const auto content, ContentOf(page, absl::StrCat("pages[", i, "]"), claims));
    pages.push_back({.key = page.key(), .bytes = content});
    put_bytes += content.size();
  }
  if (put_bytes > kMaxPutBytes) {
    return InvalidArgument("pages",
                           absl::StrCat(put_bytes, " bytes, must be at most ", kMaxPutBytes));
  }
  RETURN_IF_ERROR(caller.Check());
  ASSIGN_OR_RETURN(const auto outcomes,
                   store_.PutPages(caller.session.tenant, request.cache_id(), pages));
  for (const kvstore::PageOutcome outcome : outcomes) {
    response->add_outcomes(static_cast<v1::PageOutcome>(outcome));
  }
  return absl::OkStatus();
}

absl::Status PageHandlers::GetPages(const Caller& caller, const v1::GetPagesRequest& request,
                                    v1::GetPagesResponse* response) {
  RETURN_IF_ERROR(CheckCount("pages", request.pages_size(), kMaxPages));
  StagingClaims claims(store_, caller.session.id);
  std::vector<std::span<std::byte>> places;  // all are checked before any is written
  for (int i = 0; i < request.pages_size(); ++i) {
    ASSIGN_OR_RETURN(places.emplace_back(), PlaceOf(request.pages(i), i, claims));
  }
  uint64_t response_bytes = 0;
  std::vector<kvstore::FoundPage> group;
  for (int i = 0; i < request.pages_size(); ++i) {
    const int in_group = i % kGroupPages;
    if (in_group == 0) {
      std::vector<std::string_view> keys;
      for (int j = i; j < std::min(i + kGroupPages, request.pages_size()); ++j) {
        keys.push_back(request.pages(j).key());
      }
      auto found =
          store_.FindPages(caller.session.tenant, request.cache_id(), keys, absl::ZeroDuration());
      if (!found.ok()) return KeysInPages(found.status(), i);
      group = *std::move(found);
    }
    const std::span<const std::byte> bytes = group[static_cast<size_t>(in_group)].bytes;
    const bool fits = bytes.size() <= request.pages(i).capacity_bytes();
    const bool is_staged = request.pages(i).has_staging() && fits && !bytes.empty();
    response_bytes += kGotPageBytes + (fits && !is_staged ? bytes.size() : 0);
    if (absl::Status status = CheckResponseBytes(response_bytes, max_message_bytes_);
        !status.ok()) {
      return i == 0 ? status : absl::OkStatus();  // the client asks again for the others
    }
    RETURN_IF_ERROR(caller.Check());
    v1::GotPage& got = *response->add_pages();
    got.set_size_bytes(bytes.size());
    got.set_is_staged(is_staged);
    if (is_staged) {
      std::copy(bytes.begin(), bytes.end(), places[static_cast<size_t>(i)].begin());
    } else if (fits) {
      got.set_content(bytes.data(), bytes.size());
    }
  }
  return absl::OkStatus();
}

absl::Status PageHandlers::FindPages(const Caller& caller, const v1::FindPagesRequest& request,
                                     v1::FindPagesResponse* response) {
  RETURN_IF_ERROR(CheckCount("keys", request.keys_size(), kMaxPages));
  const std::vector<std::string_view> keys(request.keys().begin(), request.keys().end());
  constexpr uint64_t kMostMs = uint64_t{1} << 40;  // any lease beyond the limit is refused
  const absl::Duration lease =
      absl::Milliseconds(static_cast<int64_t>(std::min(request.lease_ms(), kMostMs)));
  const auto found = store_.FindPages(caller.session.tenant, request.cache_id(), keys, lease);
  if (!found.ok()) return MoveField("lease", "lease_ms", found.status());
  for (const kvstore::FoundPage& page : *found) response->add_size_bytes(page.bytes.size());
  return absl::OkStatus();
}

}  // namespace pqcached::service
