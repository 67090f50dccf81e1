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
using kvstore::LeaseWords;

class Host final : public LocalHost {
 public:
  pqc_status OpenPool(uint64_t, std::shared_ptr<Mapping>*) override { return PQC_UNIMPLEMENTED; }
  pqc_status HoldPool(uint64_t) override { return PQC_UNIMPLEMENTED; }
  pqc_status OpenStaging(uint64_t, uint32_t, std::shared_ptr<Mapping>*) override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status Attach(uint64_t, const LeaseView&, AttachAnswer*) override {
    return PQC_UNIMPLEMENTED;
  }
  pqc_status Detach(const LeaseView&) override { return PQC_UNIMPLEMENTED; }
  void End() override {}
  bool WaitEnded(uint32_t) override { return false; }
  bool HoldsConnection() override { return true; }
  void Abandon() override {}
};

constexpr uint64_t kBootWord = 7;

// Makes a link over control memory of that size, whose page `change` alters.
template <class Change>
pqc_status MakeWithPage(size_t size_bytes, const Change& change) {
  LocalLink::Parts parts{.host = std::make_unique<Host>(), .control = {}, .boot_word = kBootWord};
  const int descriptor = memfd_create("control", MFD_CLOEXEC);
  EXPECT_EQ(ftruncate(descriptor, static_cast<off_t>(size_bytes)), 0);
  EXPECT_EQ(
      Mapping::Map(descriptor, size_bytes, MappingAccess::kReadWrite, "control", &parts.control),
      PQC_OK);
  auto* page = new (parts.control->data()) ControlPage;
  page->boot_word = kBootWord;
  change(*page);
  std::shared_ptr<LocalLink> link;
  const pqc_status status = LocalLink::Make(std::move(parts), &link);
  EXPECT_EQ(link != nullptr, status == PQC_OK);
  return status;
}

// Control memory of a sidecar with this layout_version.
pqc_status MakeWith(uint32_t layout_version, size_t size_bytes) {
  return MakeWithPage(size_bytes, [&](ControlPage& page) { page.layout_version = layout_version; });
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

TEST(LinkTest, WordsOfLeasesReachTheEndOfTheControlMemoryAndNoFurther) {
  constexpr uint64_t kBytes = 4096, kWords = 8, kFirst = kBytes - kWords * sizeof(LeaseWords);
  const auto make = [](uint64_t offset_bytes, uint32_t count) {
    return MakeWithPage(kBytes, [&](ControlPage& page) {
      page.words_offset_bytes = offset_bytes;
      page.word_count = count;
    });
  };
  EXPECT_EQ(make(kFirst, kWords), PQC_OK);
  EXPECT_EQ(make(kBytes, 0), PQC_OK);
  EXPECT_EQ(make(kFirst, kWords + 1), PQC_INTERNAL);
  EXPECT_EQ(make(kFirst, ~0u), PQC_INTERNAL);
  EXPECT_EQ(make(kFirst + 4, 1), PQC_INTERNAL) << "unaligned";
  EXPECT_EQ(make(kBytes + sizeof(LeaseWords), 1), PQC_INTERNAL);
  EXPECT_EQ(make(0 - sizeof(LeaseWords), 1), PQC_INTERNAL);
}

TEST(LinkTest, WordsOfSlotsReachTheEndOfTheControlMemoryAndNoFurther) {
  constexpr uint64_t kBytes = 4096, kWords = 8, kFirst = kBytes - kWords * sizeof(uint64_t);
  const auto make = [](uint64_t offset_bytes, uint32_t count) {
    return MakeWithPage(kBytes, [&](ControlPage& page) {
      page.slot_words_offset_bytes = offset_bytes;
      page.slot_word_count = count;
    });
  };
  EXPECT_EQ(make(kFirst, kWords), PQC_OK);
  EXPECT_EQ(make(kFirst, kWords + 1), PQC_INTERNAL);
  EXPECT_EQ(make(kFirst, ~0u), PQC_INTERNAL);
  EXPECT_EQ(make(kFirst + 4, 1), PQC_INTERNAL) << "unaligned";
  EXPECT_EQ(make(kBytes + sizeof(uint64_t), 1), PQC_INTERNAL);
  EXPECT_EQ(make(0 - sizeof(uint64_t), 1), PQC_INTERNAL);
}

TEST(LinkTest, ControlMemoryThatIsNoneIsRefused) {
  EXPECT_EQ(MakeWithPage(4096, [](ControlPage& page) { page.magic = 1; }), PQC_INTERNAL);
  EXPECT_EQ(MakeWithPage(4096, [](ControlPage& page) { page.boot_word = kBootWord + 1; }),
            PQC_UNAVAILABLE);
}

}  // namespace
}  // namespace pqcached::client
