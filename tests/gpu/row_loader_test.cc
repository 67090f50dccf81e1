// RowLoader with rows that fill the staging several times, and rows of a page-locked pool.
#include "gpu/load/row_loader.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/base/dtype.h"
#include "tests/gpu/device_array.h"
#include "tests/kernels/rows/row_data.h"

extern "C" const pqcached::gpu::GpuEntry* pqcached_gpu_entry();

namespace pqcached::gpu {
namespace {

using kernels::DType;

constexpr uint32_t kHeads = 64, kKeyDim = 256, kValueDim = 128;
constexpr uint32_t kTokens = 150;  // 43 of them fit into a slot of staging
constexpr size_t kRowBytes = (kKeyDim + kValueDim) * sizeof(float);
constexpr size_t kHeadBytes = kTokens * kRowBytes;

struct LoaderCloser {
  void operator()(RowLoader* loader) const { loader->Close(); }
};

class RowLoaderTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (stream_ == nullptr) return;
    RowLoader* opened = nullptr;
    ASSERT_TRUE(pqcached_gpu_entry()->open_loader(keys_.data(), &opened).ok());
    loader_.reset(opened);
  }

  // Writes rows of random numbers, [head, token, row], to `rows`.
  void Fill(std::byte* rows) {
    numbers_ = kernels::RandomFloats(kHeads * kHeadBytes / sizeof(float), 5, 10.0f);
    std::memcpy(rows, numbers_.data(), kHeads * kHeadBytes);
    for (uint32_t head = 0; head < kHeads; ++head) rows_[head] = rows + head * kHeadBytes;
  }

  void Begin() {
    ASSERT_TRUE(loader_
                    ->Begin({.keys = {.data = keys_.data(),
                                      .dtype = DType::kF32,
                                      .token_stride = kHeads * kKeyDim,
                                      .head_stride = kKeyDim},
                             .values = {.data = values_.data(),
                                        .dtype = DType::kBf16,
                                        .token_stride = kValueDim,
                                        .head_stride = kTokens * kValueDim},
                             .token_count = kTokens,
                             .kv_heads = kHeads,
                             .key_dim = kKeyDim,
                             .value_dim = kValueDim,
                             .row_dtype = DType::kF32})
                    .ok());
  }

  void WriteAll() {
    ASSERT_TRUE(loader_->Write({.token_count = kTokens, .rows = rows_}).ok());
    ASSERT_TRUE(loader_->Finish().ok());
  }

  void ExpectRows() {
    const std::vector<float> keys = keys_.Get();
    const std::vector<uint16_t> values = values_.Get();
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t token = 0; token < kTokens; ++token) {
        const float* const row = &numbers_[(head * kTokens + token) * (kKeyDim + kValueDim)];
        ASSERT_TRUE(std::equal(row, row + kKeyDim, &keys[(token * kHeads + head) * kKeyDim]))
            << "key of token " << token << ", head " << head;
        std::byte rounded[kValueDim * 2];
        kernels::ConvertElements(DType::kF32, reinterpret_cast<const std::byte*>(row + kKeyDim),
                                 DType::kBf16, rounded, kValueDim);
        ASSERT_EQ(
            std::memcmp(&values[(head * kTokens + token) * kValueDim], rounded, sizeof(rounded)), 0)
            << "value of token " << token << ", head " << head;
      }
    }
  }

  const DeviceArray<float> keys_{kTokens * kHeads * kKeyDim};
  const DeviceArray<uint16_t> values_{kTokens * kHeads * kValueDim};
  std::vector<float> numbers_;
  const std::byte* rows_[kHeads] = {};
  std::unique_ptr<RowLoader, LoaderCloser> loader_;
};

TEST_F(RowLoaderTest, StagingIsFilledAgainAndAgain) {
  std::vector<std::byte> rows(kHeads * kHeadBytes);
  for (int layer = 0; layer < 2; ++layer) {
    Fill(rows.data());
    Begin();
    ASSERT_TRUE(loader_->Write({.token_count = kTokens, .rows = rows_}).ok());
    std::fill(rows.begin(), rows.end(), std::byte{0});  // the caller's again
    ASSERT_TRUE(loader_->Finish().ok());
    ExpectRows();
  }
}

// Page-locking works on pieces of 64 MiB.
TEST_F(RowLoaderTest, RowsInAPoolMayCrossItsPieces) {
  constexpr size_t kPiece = size_t{64} << 20, kPoolBytes = kPiece + kHeads * kHeadBytes;
  void* const mapped = mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_TRUE(mapped != MAP_FAILED);
  auto* const pool = static_cast<std::byte*>(mapped);
  Fill(pool + kPiece - kHeads * kHeadBytes / 2 - kRowBytes / 2);
  ASSERT_TRUE(loader_->SetPool(pool, kPoolBytes).ok());
  Begin();
  WriteAll();
  ExpectRows();
  ASSERT_TRUE(loader_->SetPool(nullptr, 0).ok());
  munmap(mapped, kPoolBytes);
}

TEST_F(RowLoaderTest, RefusesWhatIsOutOfRange) {
  std::vector<std::byte> rows(kHeads * kHeadBytes);
  Fill(rows.data());
  Begin();
  EXPECT_FALSE(loader_->Write({.first_token = 1, .token_count = kTokens, .rows = rows_}).ok());
  EXPECT_FALSE(loader_->Write({.first_token = kTokens + 1, .rows = rows_}).ok());
  EXPECT_FALSE(loader_->CheckTarget(rows.data()).ok());
  RowLoader* none = nullptr;
  EXPECT_FALSE(pqcached_gpu_entry()->open_loader(rows.data(), &none).ok());
  EXPECT_TRUE(none == nullptr);
  WriteAll();
  EXPECT_FALSE(loader_->Begin(LoadShape()).ok()) << "no heads";
}

}  // namespace
}  // namespace pqcached::gpu
