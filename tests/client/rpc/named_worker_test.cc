// Which calls name the worker that they are meant for: all whose arguments (leases, places in staging)
// belong to one worker, so that the next one refuses them. The other side is fake_sidecar.cc.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "client/base/remote.h"
#include "tests/client/process.h"

namespace pqcached::client {
namespace {

constexpr uint64_t kWorker = 0x12345, kOther = 0x54321;
constexpr char kForWorker[] = " for 0000000000012345";

class NamedWorkerTest : public ::testing::Test {
 protected:
  NamedWorkerTest() : sidecar_({PQCACHED_FAKE_SIDECAR, folder_.File("s"), "good"}) {
    EXPECT_TRUE(sidecar_.WaitForLine("ready"));
    void* library = dlopen(PQCACHED_RPC_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(library, nullptr) << dlerror();
    const auto entry = reinterpret_cast<const RpcEntry* (*)()>(dlsym(library, kRpcEntrySymbol));
    const std::string endpoint = "unix:" + folder_.File("s");
    EXPECT_EQ(entry()->open({.endpoint = endpoint.c_str(),
                             .tenant = "",
                             .client_name = "test",
                             .timeout_ms = 60000},
                            &remote_, &error_),
              PQC_OK)
        << error_.text;
    keys_.staging = values_.staging = &place_;
    keys_.ndim = values_.ndim = 3;
    for (uint64_t& size : keys_.shape) size = 1;
    for (uint64_t& size : values_.shape) size = 1;
  }
  ~NamedWorkerTest() override { remote_->Close(); }

  // Expects that the call succeeded and that the sidecar has received it with these words.
  void Expect(const std::string& words, pqc_status status) {
    EXPECT_EQ(status, PQC_OK) << words << ": " << error_.text;
    std::string line = sidecar_.ReadLine();
    while (line == "heartbeat" || line.rfind("Session ", 0) == 0) line = sidecar_.ReadLine();
    EXPECT_EQ(line, words);
  }

  pqc_status Append(uint64_t lease_worker, uint64_t place_worker) {
    place_.boot_word = place_worker;
    const RowBlock rows = {.layer = 0, .keys = keys_, .values = values_};
    AppendItem item = {.sequence_id = 1,
                       .rows = &rows,
                       .row_block_count = place_worker == 0 ? 0u : 1u,
                       .lease = {.lease_id = 1, .boot_word = lease_worker},
                       .image = {}};
    return remote_->Append(&item, 1, &error_);
  }

  const testing::TempFolder folder_;
  testing::Process sidecar_;
  Remote* remote_ = nullptr;
  RefusalBuffer error_;
  StagingPlace place_ = {.slot = 0, .size_bytes = 4, .generation = 1, .boot_word = kWorker};
  TensorView keys_, values_;
};

TEST_F(NamedWorkerTest, CallsWithLeasesNameTheWorkerThatGrantedThem) {
  const LeaseView lease = {.lease_id = 1, .known_version = 1, .boot_word = kWorker};
  uint64_t lease_id = 0;
  uint32_t word = 0;
  Expect(std::string("Attach") + kForWorker,
         remote_->Attach(1, lease, &lease_id, &word, {}, &error_));
  Expect(std::string("Detach") + kForWorker, remote_->Detach(lease, &error_));
  Expect(std::string("TruncateSequence") + kForWorker,
         remote_->TruncateSequence(1, 0, lease, {}, &error_));
  Expect(std::string("Append") + kForWorker, Append(kWorker, 0));
}

TEST_F(NamedWorkerTest, CallsWithPlacesInStagingNameTheWorkerThatMadeTheRing) {
  Expect(std::string("Append") + kForWorker, Append(0, kWorker));
  const RowBlock rows = {.layer = 0, .keys = keys_, .values = values_};
  uint64_t token_count = 0;
  Expect(std::string("Commit") + kForWorker,
         remote_->Commit(1, 0, &rows, 1, &token_count, &error_));
  const StagedRows nothing = {.next = [](void*, const StagedRows::Probe&, uint64_t*,
                                         RowBlock*) { return StagedRows::Next::kEnd; },
                              .boot_word = kWorker};
  Expect(std::string("Ingest") + kForWorker, remote_->IngestStaged(1, nothing, &error_));
}

TEST_F(NamedWorkerTest, ArgumentsOfTwoWorkersAreNotSent) {
  EXPECT_EQ(Append(kWorker, kOther), PQC_UNAVAILABLE);
  Expect("Append", Append(0, 0));  // the only call that has arrived
}

TEST_F(NamedWorkerTest, OtherCallsAreForAnyWorker) {
  Expect("Append", Append(0, 0));
  Expect("TruncateSequence", remote_->TruncateSequence(1, 0, {}, {}, &error_));
}

}  // namespace
}  // namespace pqcached::client
