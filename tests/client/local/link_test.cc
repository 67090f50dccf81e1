// Control memory of a session: what a client refuses before it reads anything else of it.
#include "client/local/link.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <string>
#include <utility>

namespace pqcached::client {
namespace {

using kvstore::ControlPage;
using kvstore::kLayoutVersion;

class Host final : public LocalHost {
 public:
  pqc_status OpenPool(uint64_t, std::shared_ptr<Mapping>*) override { return PQC_UNIMPLEMENTED; }
  pqc_status OpenStaging(uint64_t, uint32_t, std::shared_ptr<Mapping>*) override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status Attach(uint64_t, const LeaseView&, AttachAnswer*) override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status Detach(const LeaseView&) override { return PQC_UNIMPLEMENTED; }
  void End() override {}
  bool WaitEnded(uint32_t) override { return false; }
  void Abandon() override {}
};

constexpr uint64_t kBootWord = 7;

// Control memory of a sidecar with this layout_version.
pqc_status MakeWith(uint32_t layout_version, size_t size_bytes) {
  LocalLink::Parts parts{.host = std::make_unique<Host>(), .control = {}, .boot_word = kBootWord};
  const int descriptor = memfd_create("control", MFD_CLOEXEC);
  EXPECT_EQ(ftruncate(descriptor, static_cast<off_t>(size_bytes)), 0);
  EXPECT_EQ(
      Mapping::Map(descriptor, size_bytes, MappingAccess::kReadWrite, "control", &parts.control),
      PQC_OK);
  auto* page = new (parts.control->data()) ControlPage;
  page->layout_version = layout_version;
  page->boot_word = kBootWord;
  std::shared_ptr<LocalLink> link;
  const pqc_status status = LocalLink::Make(std::move(parts), &link);
  EXPECT_EQ(link != nullptr, status == PQC_OK);
  return status;
}

TEST(LinkTest, ControlMemoryOfThisLayoutIsTaken) {
  EXPECT_EQ(MakeWith(kLayoutVersion, 4096), PQC_OK);
}

TEST(LinkTest, ControlMemoryOfAnotherLayoutIsRefusedWithBothVersions) {
  for (const uint32_t other : {1u, 2u, kLayoutVersion + 1}) {
    EXPECT_EQ(MakeWith(other, 4096), PQC_FAILED_PRECONDITION);
    EXPECT_EQ(std::string(pqc_last_error()), "control memory: layout_version is " +
                                                 std::to_string(other) + "; this client reads " +
                                                 std::to_string(kLayoutVersion));
  }
}

}  // namespace
}  // namespace pqcached::client
