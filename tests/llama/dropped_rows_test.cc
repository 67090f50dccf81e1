// Memory that is given back while no sidecar answers: what must not be read is never read as if it
// were right. drop_test.py has the rest, with a real sidecar.
#include "client/engines/llama/dropped_rows.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/skip.h"

namespace pqcached::llama {
namespace {

constexpr uint32_t kCells = 64;
constexpr uint32_t kDropped = 32;

class DroppedRowsTest : public testing::Test {
 protected:
  DroppedRowsTest() : row_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE)) / 2) {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
    settings_.endpoint = "unix:///nowhere/pqcached.sock";
    layers_.shape.kv_heads = 8;
    layers_.shape.key_dim = layers_.shape.value_dim = static_cast<uint32_t>(row_bytes_ / 2 / 8);
    layers_.shape.cell_bytes = row_bytes_;
    layers_.arrays.push_back({&tensors_[0], &tensors_[1], Map(), Map()});
    sidecar_ = std::make_unique<Sidecar>(settings_, layers_, nullptr, nullptr, 1);
    std::string problem;
    rows_ =
        DroppedRows::Open(layers_, kCells, sidecar_.get(), std::chrono::milliseconds(20), &problem);
    problem_ = problem;
    stored_.history = std::make_shared<History>(kCells);
    for (uint32_t cell = 0; cell < kCells; ++cell) {
      stored_.history->cells.push_back(cell);
      stored_.history->prints.push_back(1000 + cell);
    }
  }
  ~DroppedRowsTest() override {
    rows_.reset();
    for (std::byte* each : mapped_) munmap(each, kCells * row_bytes_);
  }
  void SetUp() override {
    if (rows_ == nullptr) PQC_SKIP("userfaultfd") << problem_;
  }

  std::byte* Map() {
    void* const memory = mmap(nullptr, kCells * row_bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::memset(memory, 7, kCells * row_bytes_);
    return mapped_.emplace_back(static_cast<std::byte*>(memory));
  }
  static CellSet Seen(uint32_t cell) {
    CellSet seen(kCells);
    seen.Add(cell);
    return seen;
  }

  size_t row_bytes_;
  Settings settings_;
  GgmlTensor tensors_[2]{};
  std::vector<std::byte*> mapped_;
  Layers layers_;
  std::unique_ptr<Sidecar> sidecar_;
  std::unique_ptr<DroppedRows> rows_;
  std::string problem_;
  StoredHistory stored_;
};

TEST_F(DroppedRowsTest, GivesBackWholePagesAndKeepsTheFingerprints) {
  rows_->Drop(stored_.history, 1, kDropped, &stored_);
  EXPECT_EQ(stored_.history->offloaded_begin, 1u);
  EXPECT_EQ(stored_.history->offloaded_end, kDropped);
  EXPECT_FALSE(rows_->IsAway(0));
  EXPECT_FALSE(rows_->IsAway(1)) << "its page has the row of another token";
  for (uint32_t cell = 2; cell < kDropped; ++cell) {
    EXPECT_TRUE(rows_->IsAway(cell)) << cell;
    EXPECT_EQ(rows_->PrintOf(cell), 1000 + cell);
  }
  EXPECT_FALSE(rows_->IsAway(kDropped));
  EXPECT_EQ(rows_->given_back_bytes(), 2 * (kDropped - 2) * row_bytes_);
  EXPECT_EQ(*layers_.KeyRow(0, 1), std::byte{7});
  EXPECT_EQ(*layers_.KeyRow(0, kDropped), std::byte{7});
  std::vector<uint32_t> away;
  rows_->FindAway(Seen(5), &away);
  EXPECT_EQ(away, std::vector<uint32_t>{5});
}

TEST_F(DroppedRowsTest, RowsThatCannotBeFetchedAreLostUntilTheyAreWritten) {
  rows_->Drop(stored_.history, 0, kDropped, &stored_);
  EXPECT_FALSE(rows_->SeesLost(Seen(5)));
  const uint32_t cell = 5;
  EXPECT_FALSE(rows_->Bring({&cell, 1}));
  EXPECT_FALSE(rows_->has_lost());
  rows_->Return(*stored_.history, 4);
  EXPECT_GT(rows_->losses(), 0u);
  EXPECT_TRUE(rows_->SeesLost(Seen(5)));
  EXPECT_FALSE(rows_->SeesLost(Seen(3))) << "the history keeps it";
  EXPECT_FALSE(rows_->SeesLost(Seen(kDropped)));
  rows_->Write(std::vector<uint32_t>{5});
  EXPECT_FALSE(rows_->SeesLost(Seen(5)));
  EXPECT_TRUE(rows_->SeesLost(Seen(6)));
  std::memset(const_cast<std::byte*>(layers_.KeyRow(0, 5)), 9, row_bytes_);  // a write may happen
  EXPECT_EQ(*layers_.KeyRow(0, 5), std::byte{9});
  std::vector<uint32_t> all;
  for (uint32_t i = 0; i < kDropped; ++i) all.push_back(i);
  rows_->Write(all);
  EXPECT_FALSE(rows_->has_lost());
}

TEST_F(DroppedRowsTest, AReadOfLostRowsEndsTheProcess) {
  EXPECT_DEATH(
      {
        rows_->Drop(stored_.history, 0, kDropped, &stored_);
        rows_->Return(*stored_.history, 0);
        volatile std::byte read = *layers_.KeyRow(0, 5);
        static_cast<void>(read);
      },
      "ends the process: rows that were given back cannot be read");
}

}  // namespace
}  // namespace pqcached::llama
