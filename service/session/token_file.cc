#include "service/session/token_file.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

constexpr size_t kMinTokenBytes = 16;
constexpr size_t kMaxTokenBytes = 512;

// Characters of a bearer token in HTTP.
bool IsTokenCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
         absl::string_view("-._~+/=").find(c) != absl::string_view::npos;
}

}  // namespace

absl::StatusOr<TokenMap> ParseTokens(absl::string_view text) {
  TokenMap tokens;
  size_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0].front() == '#') continue;
    const auto refuse = [&](absl::string_view reason) {
      return InvalidArgument("", absl::StrCat("line ", number, ": ", reason));
    };
    if (words.size() != 2) return refuse("must be a token and an identity");
    if (words[0].size() < kMinTokenBytes || words[0].size() > kMaxTokenBytes ||
        !std::all_of(words[0].begin(), words[0].end(), IsTokenCharacter)) {
      return refuse(absl::StrCat("the token must be ", kMinTokenBytes, "..", kMaxTokenBytes,
                                 " bytes of [A-Za-z0-9._~+/=-]"));
    }
    const absl::StatusOr<Identity> identity = ParseIdentity(words[1]);
    if (!identity.ok()) return refuse(absl::StrCat("the identity ", TextOf(identity.status())));
    if (!tokens.emplace(words[0], *identity).second) return refuse("the token is listed twice");
  }
  return tokens;
}

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(std::string path, const Log& log) {
  std::unique_ptr<TokenFile> tokens(new TokenFile(std::move(path), log));
  const kvstore::MutexLock lock(&tokens->mutex_);
  tokens->file_.MayHaveChanged();  // remembers the file that is read next
  tokens->Reload();
  if (!tokens->status_.ok()) return FailedPrecondition("token_file", TextOf(tokens->status_));
  return tokens;
}

bool TokenFile::Reload() {
  const absl::StatusOr<std::string> text = file_.Read();
  if (!text.ok()) file_.Forget();  // it may be readable at the next call
  if (text.ok() && text_ == *text) return false;
  if (!text.ok() && !text_.has_value() && text.status() == status_) return false;
  tokens_.clear();
  text_.reset();
  status_ = text.status();
  if (!text.ok()) return true;
  text_ = *text;
  absl::StatusOr<TokenMap> tokens = ParseTokens(*text);
  status_ = tokens.status();
  if (tokens.ok()) tokens_ = *std::move(tokens);
  return true;
}

absl::StatusOr<Identity> TokenFile::Find(absl::string_view token) {
  const kvstore::MutexLock lock(&mutex_);
  if (file_.MayHaveChanged() && Reload()) {
    if (status_.ok()) {
      log_.Info("tokens_reloaded", {{"path", file_.path()}, {"tokens", tokens_.size()}});
    } else {
      log_.Error("tokens_refused", {{"path", file_.path()}, {"message", TextOf(status_)}});
    }
  }
  const auto found = tokens_.find(token);
  if (found != tokens_.end()) return found->second;
  return Unauthenticated("authorization", "the token is unknown, or was withdrawn");
}

}  // namespace pqcached::service
