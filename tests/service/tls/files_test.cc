// Files of TLS and of tokens that change, or cannot be read for a moment.
#include <sys/resource.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "service/base/watched_file.h"
#include "service/session/token_file.h"
#include "service/tls/tls_context.h"
#include "tests/service/tls/tls_fixture.h"

namespace pqcached::service {
namespace {

constexpr std::chrono::milliseconds kMoreThanATick{100};
constexpr char kFirstToken[] = "0123456789abcdef-1";
constexpr char kSecondToken[] = "0123456789abcdef-2";

std::string LineOf(const char* token) { return std::string(token) + " pqcached://operator\n"; }

// The process can open no file as long as the object lives.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_ = {};
};

class FilesTest : public TlsTest {
 protected:
  FilesTest() { log_ = *Log::Open("info", directory_ / "log"); }
};

TEST_F(FilesTest, AFileIsReadOnceMoreAfterItsClockHasTicked) {
  ReplaceFile(token_file(), "text");
  WatchedFile file(token_file());
  EXPECT_TRUE(file.MayHaveChanged());
  std::this_thread::sleep_for(kMoreThanATick);
  EXPECT_TRUE(file.MayHaveChanged()) << "it may have been written in the tick of the first read";
  EXPECT_FALSE(file.MayHaveChanged());
  ReplaceFile(token_file(), "another text");
  EXPECT_TRUE(file.MayHaveChanged());
}

TEST_F(FilesTest, TokensAreReadAgainWhenTheyCouldNotBeRead) {
  ReplaceFile(token_file(), LineOf(kFirstToken));
  const std::unique_ptr<TokenFile> tokens = *TokenFile::Open(token_file(), *log_);
  ReplaceFile(token_file(), LineOf(kSecondToken));
  {
    const NoDescriptors none;
    EXPECT_FALSE(tokens->Find(kSecondToken).ok());
    std::this_thread::sleep_for(kMoreThanATick);
    EXPECT_FALSE(tokens->Find(kSecondToken).ok());
    EXPECT_FALSE(tokens->Find(kFirstToken).ok());
  }
  EXPECT_TRUE(tokens->Find(kSecondToken).ok());
  EXPECT_FALSE(tokens->Find(kFirstToken).ok());
}

TEST_F(FilesTest, CertificatesAreReadAgainWhenTheyCouldNotBeRead) {
  const std::unique_ptr<TlsContext> context = *TlsContext::Load(server_tls_files(), *log_);
  const SSL_CTX* first = context->Current();
  const CertificateFiles next = ca_.Issue("next", "IP:127.0.0.1");
  ReplaceFile(server_files_.key, TextOfFile(next.key));
  ReplaceFile(server_files_.certificate, TextOfFile(next.certificate));
  {
    const NoDescriptors none;
    EXPECT_EQ(context->Current(), first);
    std::this_thread::sleep_for(kMoreThanATick);
    EXPECT_EQ(context->Current(), first);
    EXPECT_EQ(context->Current(), first);
  }
  EXPECT_NE(context->Current(), first);
}

}  // namespace
}  // namespace pqcached::service
