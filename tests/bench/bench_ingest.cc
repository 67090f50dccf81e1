// The copy of new tokens into rows, with checks and checksum, beside a copy without any; and the
// checksum beside a read. 64K tokens of 8 heads of 128 dims, fp16, as tensors [tokens, heads, dim].
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/crc32c.h"
#include "kernels/dtype.h"
#include "kernels/ingest.h"
#include "kernels/int8_row.h"
#include "tests/bench/code_arena.h"
#include "tests/bench/huge_buffer.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

using kernels::DType;

constexpr uint32_t kTokens = 64 << 10;
constexpr uint32_t kHeads = 8;
constexpr uint32_t kDim = 128;
constexpr size_t kPartBytes = kDim * sizeof(uint16_t);
constexpr size_t kTensorBytes = size_t{kTokens} * kHeads * kPartBytes;
constexpr size_t kHeadBytes = 2 * kTokens * kPartBytes;  // rows of one head

struct World {
  World() : keys(kTensorBytes), values(kTensorBytes), rows(2 * kTensorBytes) {
    const std::vector<float> floats = NormalFloats(size_t{1} << 20, 1);
    std::vector<std::byte> pool(floats.size() * sizeof(uint16_t));
    kernels::ConvertElements(DType::kF32, reinterpret_cast<const std::byte*>(floats.data()),
                             DType::kF16, pool.data(), floats.size());
    FillFromPool(keys.bytes(), pool, 2);
    FillFromPool(values.bytes(), pool, 3);
  }

  HugeBuffer keys;
  HugeBuffer values;
  HugeBuffer rows;  // head after head
};

kernels::IngestArgs Args(const World& world, uint32_t head) {
  const auto tensor = [&](const HugeBuffer& buffer) {
    return kernels::StridedTensor{buffer.data() + head * kPartBytes, DType::kF16,
                                  kHeads * kPartBytes, sizeof(uint16_t)};
  };
  kernels::IngestArgs args;
  args.token_count = kTokens;
  args.key_dim = kDim;
  args.value_dim = kDim;
  args.key = tensor(world.keys);
  args.value = tensor(world.values);
  args.row_stride_bytes = 2 * kPartBytes;
  args.rows = world.rows.bytes().subspan(head * kHeadBytes, kHeadBytes);
  return args;
}

kernels::IngestResult Ingest(const World& world, uint32_t head, DType row_dtype) {
  kernels::IngestArgs args = Args(world, head);
  args.row_dtype = row_dtype;
  return kernels::IngestRows({}, args);
}

kernels::IngestResult IngestInt8(const World& world, uint32_t head) {
  kernels::IngestArgs args = Args(world, head);
  args.row_stride_bytes = kernels::Int8RowBytes(kDim, kDim);
  return kernels::IngestInt8Rows({}, args);
}

void Check(const World& world) {
  const kernels::IngestResult result = Ingest(world, 1, DType::kF16);
  const std::span<const std::byte> rows = world.rows.bytes().subspan(kHeadBytes, kHeadBytes);
  Require(result.ok() && result.crc == kernels::Crc32c({kernels::Level::kReference}, rows),
          "ingest and its checksum");
  for (uint32_t t = 0; t < kTokens; t += 101) {
    const size_t from = (size_t{t} * kHeads + 1) * kPartBytes;
    const std::byte* row = rows.data() + t * 2 * kPartBytes;
    Require(std::memcmp(row, world.keys.data() + from, kPartBytes) == 0 &&
                std::memcmp(row + kPartBytes, world.values.data() + from, kPartBytes) == 0,
            "ingested rows");
  }
  const kernels::IngestResult int8 = IngestInt8(world, 1);
  const size_t int8_bytes = kTokens * kernels::Int8RowBytes(kDim, kDim);
  Require(int8.ok() &&
              int8.crc == kernels::Crc32c({kernels::Level::kReference}, rows.first(int8_bytes)),
          "ingest to int8 and its checksum");
}

void Run(const World& world, int threads, Report& report) {
  const uint32_t share = kHeads / static_cast<uint32_t>(threads);
  std::atomic<uint64_t> sink{0};
  Rounds rounds(threads);
  // visit(head) for `count` heads a round; units are bytes of fp16 rows.
  const auto add = [&](const char* name, uint32_t count, auto visit) {
    return rounds.Add(name, static_cast<double>(count * kHeadBytes),
                      [&, count, visit](int thread, int round) {
                        for (uint32_t i = 0; i < count; ++i) {
                          const uint32_t step = static_cast<uint32_t>(round) * count + i;
                          visit(static_cast<uint32_t>(thread) * share + step % share);
                        }
                      });
  };
  const size_t copy = add("memcpy of the same bytes", share, [&](uint32_t head) {
    std::byte* to = world.rows.data() + head * kHeadBytes;
    std::memcpy(to, world.keys.data() + head * (kHeadBytes / 2), kHeadBytes / 2);
    std::memcpy(to + kHeadBytes / 2, world.values.data() + head * (kHeadBytes / 2), kHeadBytes / 2);
  });
  const size_t same = add("ingest fp16 to fp16", share / 2, [&](uint32_t head) {
    sink = sink + Ingest(world, head, DType::kF16).crc;
  });
  const size_t convert = add("ingest fp16 to bf16", share / 2, [&](uint32_t head) {
    sink = sink + Ingest(world, head, DType::kBf16).crc;
  });
  const size_t int8 = add("ingest fp16 to int8", share / 2,
                          [&](uint32_t head) { sink = sink + IngestInt8(world, head).crc; });
  const size_t read = add("read", share, [&](uint32_t head) {
    sink = sink + StreamRead(world.rows.data() + head * kHeadBytes, kHeadBytes);
  });
  const size_t crc = add("crc32c", share, [&](uint32_t head) {
    sink = sink + kernels::Crc32c({}, world.rows.bytes().subspan(head * kHeadBytes, kHeadBytes));
  });
  rounds.Run(report.rounds());

  const std::string suffix = threads == 1 ? "" : "_2t";
  const auto figure = [&](const char* name, const char* against, size_t entry, size_t other) {
    report.Add({name + suffix, "x", against, Better::kHigher, std::nullopt},
               rounds.Speedup(entry, other));
  };
  figure("ingest_f16_vs_memcpy", "memcpy of as many bytes", same, copy);
  figure("ingest_f16_to_bf16_vs_memcpy", "memcpy of as many bytes", convert, copy);
  figure("ingest_f16_to_int8_vs_memcpy", "memcpy of as many bytes of fp16", int8, copy);
  figure("crc32c_vs_read", "plain read", crc, read);
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 7);
  const World world;
  Check(world);
  for (const int threads : {1, 2}) Run(world, threads, report);
  return report.Finish();
}
