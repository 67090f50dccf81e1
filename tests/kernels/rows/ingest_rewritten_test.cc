// The ingest copies load each element once: a source that another thread rewrites between any two
// loads is refused, or stored as it was checked.
//
// The test takes the place of that thread. The source is in a page that may not be read, so that a
// signal precedes each load; the handler permits it, and sets the processor's trap flag for another
// signal behind it. There an element is rewritten after the first, the second, ... and the last
// load.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <vector>

#include "kernels/base/crc32c.h"
#include "kernels/rows/ingest.h"
#include "kernels/rows/int8_row.h"
#include "tests/kernels/rows/row_data.h"
#include "tests/kernels/tensor_data.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kDim = 64;        // at least two loads at every level
constexpr uint32_t kRewritten = 51;  // the element that changes: not in the first load
constexpr greg_t kTrapFlag = 0x100;

// The page of the source, and what the signal handlers do to it.
struct Rewriter {
  std::byte* page = nullptr;
  size_t page_bytes = 0;
  uint32_t loads = 0;          // so far
  uint32_t rewrite_after = 0;  // this many; 0: never
  std::byte* element = nullptr;
  std::byte to[sizeof(float)] = {};
  size_t size = 0;
};
Rewriter rewriter;

greg_t& FlagsOf(void* context) {
  return static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL];
}

void Protect(int protection) {
  if (mprotect(rewriter.page, rewriter.page_bytes, protection) != 0) abort();
}

void BeforeALoad(int, siginfo_t* info, void* context) {
  const auto* at = static_cast<const std::byte*>(info->si_addr);
  if (at < rewriter.page || at >= rewriter.page + rewriter.page_bytes) abort();  // a defect
  Protect(PROT_READ | PROT_WRITE);
  FlagsOf(context) |= kTrapFlag;
}

void BehindALoad(int, siginfo_t*, void* context) {
  FlagsOf(context) &= ~kTrapFlag;
  if (++rewriter.loads == rewriter.rewrite_after) {
    for (size_t i = 0; i < rewriter.size; ++i) rewriter.element[i] = rewriter.to[i];
    return;  // the page stays readable: nothing more happens
  }
  Protect(PROT_NONE);
}

enum class Copy { kHeads, kRows, kInt8Rows };

struct Case {
  const char* name;
  Copy copy;
  DType from;
  DType to;
  size_t offset = 0;  // of the row from a cache line: aligned rows are streamed
};

constexpr Case kCases[] = {
    {"heads, f16", Copy::kHeads, DType::kF16, DType::kF16},
    {"heads, bf16", Copy::kHeads, DType::kBf16, DType::kBf16},
    {"heads, f16 unaligned", Copy::kHeads, DType::kF16, DType::kF16, 2},
    {"heads, f16 to bf16", Copy::kHeads, DType::kF16, DType::kBf16},
    {"heads, f32 to f16", Copy::kHeads, DType::kF32, DType::kF16},
    {"heads, f32 to f16 unaligned", Copy::kHeads, DType::kF32, DType::kF16, 2},
    {"heads, f32", Copy::kHeads, DType::kF32, DType::kF32},
    {"rows, f16", Copy::kRows, DType::kF16, DType::kF16},
    {"rows, bf16 to f16", Copy::kRows, DType::kBf16, DType::kF16},
    {"rows, f32 to bf16", Copy::kRows, DType::kF32, DType::kBf16},
    {"int8 rows, f16", Copy::kInt8Rows, DType::kF16, DType::kF16},
    {"int8 rows, f32", Copy::kInt8Rows, DType::kF32, DType::kF16},
};

class IngestRewrittenTest : public testing::TestWithParam<Level> {
 protected:
  void SetUp() override {
    rewriter.page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* page = mmap(nullptr, rewriter.page_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(page, MAP_FAILED);
    rewriter.page = static_cast<std::byte*>(page);
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO;
    action.sa_sigaction = BeforeALoad;
    ASSERT_EQ(sigaction(SIGSEGV, &action, &segv_before_), 0);
    action.sa_sigaction = BehindALoad;
    ASSERT_EQ(sigaction(SIGTRAP, &action, &trap_before_), 0);
  }
  void TearDown() override {
    ASSERT_EQ(sigaction(SIGSEGV, &segv_before_, nullptr), 0);
    ASSERT_EQ(sigaction(SIGTRAP, &trap_before_, nullptr), 0);
    ASSERT_EQ(munmap(rewriter.page, rewriter.page_bytes), 0);
  }

  // One key row, of which an element becomes `next` after some loads; 0: never.
  IngestResult Run(const Case& c, float first, float next, uint32_t rewrite_after) {
    const size_t source_bytes = kDim * DTypeBytes(c.from);
    std::byte* source = rewriter.page + rewriter.page_bytes - source_bytes;
    for (uint32_t i = 0; i < kDim; ++i) {
      StoreElement(c.from, source, i, 0.25f * static_cast<float>(i));
    }
    StoreElement(c.from, source, kRewritten, first);
    row_bytes_ = c.copy == Copy::kInt8Rows ? Int8RowBytes(kDim, 0) : kDim * DTypeBytes(c.to);
    target_.assign(row_bytes_ + 128, kUntouched);
    row_ = target_.data() + 64 - reinterpret_cast<uintptr_t>(target_.data()) % 64 + c.offset;
    rewriter.loads = 0;
    rewriter.rewrite_after = rewrite_after;
    rewriter.element = source + kRewritten * DTypeBytes(c.from);
    rewriter.size = DTypeBytes(c.from);
    StoreElement(c.from, rewriter.to, 0, next);
    const StridedTensor key = {source, c.from, static_cast<ptrdiff_t>(source_bytes),
                               static_cast<ptrdiff_t>(DTypeBytes(c.from))};
    std::byte* rows[] = {row_};
    const Exec exec{GetParam()};
    IngestResult result;
    Protect(PROT_NONE);
    if (c.copy == Copy::kHeads) {
      result = IngestHeads(exec, {.token_count = 1,
                                  .key_dim = kDim,
                                  .value_dim = 0,
                                  .key = key,
                                  .key_head_stride_bytes = key.token_stride_bytes,
                                  .value = {},
                                  .row_dtype = c.to,
                                  .row_stride_bytes = row_bytes_,
                                  .rows = rows});
    } else {
      const IngestArgs args = {.token_count = 1,
                               .key_dim = kDim,
                               .value_dim = 0,
                               .key = key,
                               .value = {},
                               .row_dtype = c.to,
                               .row_stride_bytes = row_bytes_,
                               .rows = {row_, row_bytes_}};
      result = c.copy == Copy::kRows ? IngestRows(exec, args) : IngestInt8Rows(exec, args);
    }
    Protect(PROT_READ | PROT_WRITE);
    return result;
  }

  std::vector<std::byte> Row() const { return {row_, row_ + row_bytes_}; }
  // The row of a source that does not change.
  std::vector<std::byte> RowOf(const Case& c, float value) {
    EXPECT_TRUE(Run(c, value, value, 0).ok());
    return Row();
  }

  std::vector<std::byte> target_;
  std::byte* row_ = nullptr;
  size_t row_bytes_ = 0;

 private:
  struct sigaction segv_before_ = {}, trap_before_ = {};
};

// The reference loads element by element as the portable level does; once is enough.
std::vector<Level> LevelsButTheReference() {
  std::vector<Level> levels = AvailableLevels();
  std::erase(levels, Level::kReference);
  return levels;
}

INSTANTIATE_TEST_SUITE_P(Levels, IngestRewrittenTest, testing::ValuesIn(LevelsButTheReference()),
                         LevelTestName);

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST_P(IngestRewrittenTest, AnElementThatWasNotFiniteAtAnyTimeIsNotStored) {
  for (const Case& c : kCases) {
    const std::vector<std::byte> finite = RowOf(c, 1.0f);
    const uint32_t loads = rewriter.loads;
    ASSERT_GT(loads, 1u) << c.name;
    for (const bool finite_first : {true, false}) {
      uint32_t refused = 0;
      for (uint32_t n = 1; n <= loads; ++n) {
        const float first = finite_first ? 1.0f : kNan;
        if (!Run(c, first, finite_first ? kNan : 1.0f, n).ok()) {
          ++refused;
        } else {
          ASSERT_EQ(Row(), finite) << c.name << ", rewritten after load " << n << " of " << loads
                                   << (finite_first ? " to" : " from") << " NaN";
        }
      }
      // A copy that finds a bad element may look again for its place, and find that it is fine.
      if (finite_first) {
        EXPECT_GT(refused, 0u) << c.name;
      }
      EXPECT_LT(refused, loads) << c.name;
    }
  }
}

TEST_P(IngestRewrittenTest, TheChecksumIsThatOfTheBytesThatWereStored) {
  for (const Case& c : kCases) {
    if (c.copy == Copy::kHeads) continue;  // computes none
    const std::vector<std::byte> before = RowOf(c, 1.0f);
    const uint32_t loads = rewriter.loads;
    const std::vector<std::byte> after = RowOf(c, 7.5f);
    for (uint32_t n = 1; n <= loads; ++n) {
      const IngestResult result = Run(c, 1.0f, 7.5f, n);
      ASSERT_TRUE(result.ok());
      EXPECT_EQ(result.crc, Crc32c(Exec{GetParam()}, Row())) << c.name << ", load " << n;
      ASSERT_TRUE(Row() == before || Row() == after) << c.name << ", load " << n;
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels
