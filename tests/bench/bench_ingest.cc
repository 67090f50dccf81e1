// The copy of new tokens into rows, with checks and checksum, beside a copy without any; that of all heads,
// with checks alone, beside a non-temporal one; and the checksum beside a read. 64K tokens of 8 heads of
// 128 dims, fp16, as tensors [tokens, heads, dim].
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/crc32c.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/rows/ingest.h"
#include "kernels/rows/int8_row.h"
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
constexpr uint32_t kPieces = 4;                          // of all tokens, for what takes all heads
constexpr uint32_t kPieceTokens = kTokens / kPieces;
constexpr size_t kPieceBytes = 2 * kPieceTokens * kHeads * kPartBytes;

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

kernels::IngestResult Ingest(const World& world, kernels::Exec exec, uint32_t head,
                             DType row_dtype) {
  kernels::IngestArgs args = Args(world, head);
  args.row_dtype = row_dtype;
  return kernels::IngestRows(exec, args);
}

kernels::IngestResult IngestInt8(const World& world, kernels::Exec exec, uint32_t head) {
  kernels::IngestArgs args = Args(world, head);
  args.row_stride_bytes = kernels::Int8RowBytes(kDim, kDim);
  return kernels::IngestInt8Rows(exec, args);
}

// The tokens of one piece, all heads.
kernels::IngestResult IngestPiece(const World& world, kernels::Exec exec, uint32_t piece,
                                  DType row_dtype) {
  std::array<std::byte*, kHeads> rows;
  for (uint32_t head = 0; head < kHeads; ++head) {
    rows[head] = world.rows.data() + head * kHeadBytes + piece * (kHeadBytes / kPieces);
  }
  kernels::IngestHeadsArgs args;
  args.token_count = kPieceTokens;
  args.key_dim = kDim;
  args.value_dim = kDim;
  for (auto [tensor, buffer] :
       {std::pair(&args.key, &world.keys), std::pair(&args.value, &world.values)}) {
    *tensor = {buffer->data() + piece * (kTensorBytes / kPieces), DType::kF16, kHeads * kPartBytes,
               sizeof(uint16_t)};
  }
  args.key_head_stride_bytes = kPartBytes;
  args.value_head_stride_bytes = kPartBytes;
  args.row_dtype = row_dtype;
  args.row_stride_bytes = 2 * kPartBytes;
  args.rows = rows;
  return kernels::IngestHeads(exec, args);
}

// As many bytes, from the same memory to the same memory.
void CopyPiece(const World& world, kernels::Exec exec, uint32_t piece) {
  std::span<std::byte> to = world.rows.bytes().subspan(piece * kPieceBytes, kPieceBytes);
  for (const HugeBuffer* from : {&world.keys, &world.values}) {
    constexpr size_t kBytes = kPieceBytes / 2;
    kernels::StreamRows(exec, {.rows = from->data() + piece * kBytes,
                               .row_stride_bytes = kBytes,
                               .row_bytes = kBytes,
                               .row_count = 1,
                               .target = to.first(kBytes)});
    to = to.subspan(kBytes);
  }
}

void CheckPieces(const World& world, kernels::Exec exec, DType row_dtype) {
  for (uint32_t piece = 0; piece < kPieces; ++piece) {
    Require(IngestPiece(world, exec, piece, row_dtype).ok(), "ingest of all heads");
  }
  std::array<std::byte, 2 * kPartBytes> expected;
  for (size_t t = 0; t < kTokens; t += 101) {
    for (size_t head = 0; head < kHeads; ++head) {
      const size_t from = (t * kHeads + head) * kPartBytes;
      kernels::ConvertElements(DType::kF16, world.keys.data() + from, row_dtype, expected.data(),
                               kDim);
      kernels::ConvertElements(DType::kF16, world.values.data() + from, row_dtype,
                               expected.data() + kPartBytes, kDim);
      const std::byte* row = world.rows.data() + head * kHeadBytes + t * expected.size();
      Require(std::memcmp(row, expected.data(), expected.size()) == 0, "rows of all heads");
    }
  }
}

void Check(const World& world, CodeLevel level) {
  if (!CanRun(level)) return;
  const kernels::Exec exec = ExecOf(level);
  const kernels::IngestResult result = Ingest(world, exec, 1, DType::kF16);
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
  const kernels::IngestResult int8 = IngestInt8(world, exec, 1);
  const size_t int8_bytes = kTokens * kernels::Int8RowBytes(kDim, kDim);
  Require(int8.ok() &&
              int8.crc == kernels::Crc32c({kernels::Level::kReference}, rows.first(int8_bytes)),
          "ingest to int8 and its checksum");
  for (const DType row_dtype : {DType::kF16, DType::kBf16}) CheckPieces(world, exec, row_dtype);
  CopyPiece(world, exec, 1);
  Require(std::memcmp(world.rows.data() + kPieceBytes, world.keys.data() + kPieceBytes / 2,
                      kPieceBytes / 2) == 0,
          "non-temporal copy");
}

void Run(const World& world, int threads, CodeLevel level, Report& report) {
  const kernels::Exec exec = ExecOf(level);
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
    sink = sink + Ingest(world, exec, head, DType::kF16).crc;
  });
  const size_t convert = add("ingest fp16 to bf16", share / 2, [&](uint32_t head) {
    sink = sink + Ingest(world, exec, head, DType::kBf16).crc;
  });
  const size_t int8 = add("ingest fp16 to int8", share / 2,
                          [&](uint32_t head) { sink = sink + IngestInt8(world, exec, head).crc; });
  const size_t read = add("read", share, [&](uint32_t head) {
    sink = sink + StreamRead(world.rows.data() + head * kHeadBytes, kHeadBytes);
  });
  const size_t crc = add("crc32c", share, [&](uint32_t head) {
    sink = sink + kernels::Crc32c(exec, world.rows.bytes().subspan(head * kHeadBytes, kHeadBytes));
  });
  // visit(piece) for half of a thread's pieces a round: as many bytes as half of its heads.
  const uint32_t pieces = kPieces / static_cast<uint32_t>(threads);
  const auto add_pieces = [&](const char* name, auto visit) {
    const uint32_t count = pieces / 2;
    return rounds.Add(name, static_cast<double>(count * kPieceBytes),
                      [pieces, count, visit](int thread, int round) {
                        for (uint32_t i = 0; i < count; ++i) {
                          const uint32_t step = static_cast<uint32_t>(round) * count + i;
                          visit(static_cast<uint32_t>(thread) * pieces + step % pieces);
                        }
                      });
  };
  const size_t copy_pieces = add_pieces("non-temporal copy of the same bytes",
                                        [&](uint32_t piece) { CopyPiece(world, exec, piece); });
  const size_t heads_same = add_pieces("ingest of all heads, fp16 to fp16", [&](uint32_t piece) {
    sink = sink + IngestPiece(world, exec, piece, DType::kF16).bad_token;
  });
  const size_t heads_convert = add_pieces("ingest of all heads, fp16 to bf16", [&](uint32_t piece) {
    sink = sink + IngestPiece(world, exec, piece, DType::kBf16).bad_token;
  });
  if (CanRun(level)) rounds.Run(report.rounds());

  const std::string suffix = threads == 1 ? "" : "_2t";
  const auto figure = [&](const char* name, const char* against, size_t entry, size_t other) {
    report.AddSpeedup(level, {name + suffix, "x", against, Better::kHigher, std::nullopt}, rounds,
                      entry, other);
  };
  figure("ingest_f16_vs_memcpy", "memcpy of as many bytes", same, copy);
  figure("ingest_f16_to_bf16_vs_memcpy", "memcpy of as many bytes", convert, copy);
  figure("ingest_f16_to_int8_vs_memcpy", "memcpy of as many bytes of fp16", int8, copy);
  figure("ingest_heads_f16_vs_ntcopy", "non-temporal copy of the same bytes", heads_same,
         copy_pieces);
  figure("ingest_heads_f16_to_bf16_vs_ntcopy", "non-temporal copy of the same bytes", heads_convert,
         copy_pieces);
  figure("crc32c_vs_read", "plain read", crc, read);
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 7);
  const World world;
  for (const CodeLevel level : {CodeLevel::kBest, CodeLevel::kAvx2}) Check(world, level);
  for (const int threads : {1, 2}) Run(world, threads, CodeLevel::kBest, report);
  Run(world, 1, CodeLevel::kAvx2, report);
  return report.Finish();
}
