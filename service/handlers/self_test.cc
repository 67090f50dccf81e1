#include "service/handlers/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/exec.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "kvstore/store.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

using kvstore::kBlockTokens;

constexpr uint32_t kTokens = 777;  // several segments, the last one partly filled
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kGroup = 2;  // query heads per kv head
constexpr uint32_t kDim = 64;
constexpr uint32_t kBudget = 100;
constexpr double kTolerance = 1e-3;  // for fp32 sums of kDim or kTokens terms near 1
constexpr char kTenant[] = "self-test";
constexpr kvstore::IndexDescriptor kIndex = {kvstore::IndexKind::kPq, 2, 6};

// Returns `count` normally distributed numbers, the same ones for the same seed.
std::vector<float> Numbers(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(random);
  return numbers;
}

kvstore::TensorView View(const std::vector<float>& numbers, std::vector<uint64_t> shape) {
  return {.data = reinterpret_cast<const std::byte*>(numbers.data()),
          .data_bytes = numbers.size() * sizeof(float),
          .dtype = kernels::DType::kF32,
          .shape = std::move(shape),
          .strides = {}};
}

// [tokens, kv_heads, dim]
const std::vector<float>& Keys() {
  static const std::vector<float> keys = Numbers(size_t{kTokens} * kKvHeads * kDim, 1);
  return keys;
}
const std::vector<float>& Values() {
  static const std::vector<float> values = Numbers(size_t{kTokens} * kKvHeads * kDim, 2);
  return values;
}
// [1, query_heads, dim]
const std::vector<float>& Queries() {
  static const std::vector<float> queries = Numbers(size_t{kKvHeads} * kGroup * kDim, 3);
  return queries;
}

double Logit(uint32_t query_head, uint32_t token) {
  const float* query = &Queries()[size_t{query_head} * kDim];
  const float* key = &Keys()[(size_t{token} * kKvHeads + query_head / kGroup) * kDim];
  double sum = 0;
  for (uint32_t i = 0; i < kDim; ++i) sum += static_cast<double>(query[i]) * key[i];
  return sum / std::sqrt(static_cast<double>(kDim));
}

absl::Status Mismatch(absl::string_view what, double is, double must) {
  return DataLoss(absl::StrCat(what, " is ", is, ", expected ", must));
}

// Probe is a store that uses one instruction set and holds one sequence.
class Probe {
 public:
  static absl::StatusOr<std::unique_ptr<Probe>> Make(kernels::Level level) {
    kvstore::StoreOptions options;
    options.segment_tokens = 2 * kBlockTokens;
    options.tail_tokens = kBlockTokens;
    options.codebook_tokens = 2 * kBlockTokens;
    options.threads = 1;
    options.exec.level = level;
    ASSIGN_OR_RETURN(auto store, kvstore::Store::Create(options));
    kvstore::CacheSpec spec;
    spec.name = kTenant;
    spec.model_fingerprint = kTenant;
    spec.capacity_bytes = size_t{16} << 20;
    spec.groups.push_back({.kind = kvstore::LayerKind::kSelected,
                           .layers = {0},
                           .kv_heads = kKvHeads,
                           .query_heads = kKvHeads * kGroup,
                           .key_dim = kDim,
                           .value_dim = kDim,
                           .dtype = kernels::DType::kF32});
    ASSIGN_OR_RETURN(const auto cache, store->OpenCache(kTenant, spec));
    ASSIGN_OR_RETURN(const auto made,
                     store->CreateSequence(kTenant, cache.cache_id, {.session = kTenant}));
    auto probe = std::make_unique<Probe>();
    probe->store_ = std::move(store);
    probe->id_ = made.sequence_id;
    return probe;
  }

  // Stores the rows and checks that they are read back unchanged.
  absl::Status CheckRows() {
    ASSIGN_OR_RETURN(auto ingest, store_->BeginIngest(kTenant, id_));
    const std::vector<uint64_t> shape = {kTokens, kKvHeads, kDim};
    RETURN_IF_ERROR(ingest->Write(
        0, {.layer = 0, .keys = View(Keys(), shape), .values = View(Values(), shape)}));
    if (const auto count = ingest->Commit(); !count.ok()) return count.status();
    ASSIGN_OR_RETURN(const auto rows,
                     store_->FetchBlocks(kTenant, id_, 0, {0, kTokens}, kvstore::RowPart::kRow));
    const size_t row_floats = 2 * size_t{kDim};
    if (rows.data.size() != size_t{kTokens} * kKvHeads * row_floats * sizeof(float)) {
      return Mismatch("bytes of rows", static_cast<double>(rows.data.size()), 0);
    }
    for (uint32_t head = 0; head < kKvHeads; ++head) {
      for (uint32_t token = 0; token < kTokens; ++token) {
        const size_t from = (size_t{token} * kKvHeads + head) * kDim;
        const std::byte* row =
            &rows.data[(size_t{head} * kTokens + token) * row_floats * sizeof(float)];
        const auto key = std::as_bytes(std::span(Keys()).subspan(from, kDim));
        const auto value = std::as_bytes(std::span(Values()).subspan(from, kDim));
        if (std::memcmp(row, key.data(), key.size()) == 0 &&
            std::memcmp(row + key.size(), value.data(), value.size()) == 0) {
          continue;
        }
        return DataLoss(absl::StrCat("row of token ", token, ", kv head ", head,
                                     " differs from the stored row"));
      }
    }
    return absl::OkStatus();
  }

  // Checks that the selected tokens have the highest scores.
  absl::Status CheckSelect() {
    ASSIGN_OR_RETURN(const auto selected,
                     store_->TopK(kTenant, id_, MakeQuery(),
                                  {.group_rule = kvstore::GroupRule::kMeanLogit,
                                   .budget_kind = kvstore::BudgetKind::kCount,
                                   .budget_count = kBudget}));
    for (uint32_t head = 0; head < kKvHeads; ++head) {
      std::vector<double> sums(kTokens, 0);
      for (uint32_t i = 0; i < kGroup; ++i) {
        for (uint32_t token = 0; token < kTokens; ++token) {
          sums[token] += Logit(head * kGroup + i, token);
        }
      }
      std::vector<double> sorted = sums;
      std::sort(sorted.rbegin(), sorted.rend());
      for (uint32_t i = 0; i < selected.count; ++i) {
        const uint32_t token = selected.positions[size_t{head} * selected.count + i];
        if (token < kTokens && sums[token] >= sorted[selected.count - 1] - kTolerance) continue;
        return DataLoss(
            absl::StrCat("token ", token, " of kv head ", head, " is not among the best"));
      }
    }
    return absl::OkStatus();
  }

  // Checks the attention over all tokens against double precision.
  absl::Status CheckAttend() {
    ASSIGN_OR_RETURN(const auto attention,
                     store_->Attend(kTenant, id_, MakeQuery(), {}, /*want_positions=*/false));
    for (uint32_t head = 0; head < kKvHeads * kGroup; ++head) {
      std::vector<double> output(kDim, 0);
      double sum = 0;
      for (uint32_t token = 0; token < kTokens; ++token) {
        const double weight = std::exp(Logit(head, token));
        sum += weight;
        const float* value = &Values()[(size_t{token} * kKvHeads + head / kGroup) * kDim];
        for (uint32_t i = 0; i < kDim; ++i) output[i] += weight * value[i];
      }
      if (std::abs(attention.lse[head] - std::log(sum)) > kTolerance) {
        return Mismatch(absl::StrCat("lse of head ", head), attention.lse[head], std::log(sum));
      }
      for (uint32_t i = 0; i < kDim; ++i) {
        const float is = attention.output[size_t{head} * kDim + i];
        if (std::abs(is - output[i] / sum) > kTolerance) {
          return Mismatch(absl::StrCat("output[", i, "] of head ", head), is, output[i] / sum);
        }
      }
    }
    return absl::OkStatus();
  }

  // Builds an index and returns the root mean square error of its scores.
  absl::StatusOr<double> BuildAndScore() {
    RETURN_IF_ERROR(
        store_->BuildIndex(kTenant, id_, {.index = kIndex, .iterations = 4, .sink_tokens = 0}, {}));
    ASSIGN_OR_RETURN(const auto scores,
                     store_->Score(kTenant, id_, MakeQuery(), kIndex, {0, kTokens}));
    double squares = 0;
    for (uint32_t head = 0; head < kKvHeads * kGroup; ++head) {
      for (uint32_t token = 0; token < kTokens; ++token) {
        const double off = scores.logits[size_t{head} * kTokens + token] - Logit(head, token);
        squares += off * off;
      }
    }
    return std::sqrt(squares / (kKvHeads * kGroup * kTokens));
  }

 private:
  kvstore::Query MakeQuery() const {
    return {.layer = 0,
            .query_position = kTokens - 1,
            .queries = View(Queries(), {1, kKvHeads * kGroup, kDim})};
  }

  std::unique_ptr<kvstore::Store> store_;
  uint64_t id_ = 0;
};

// Compares the score error with that of the reference. Instruction sets round differently in
// training, so they may produce other codebooks, but these must not be worse.
absl::Status CompareErrors(double error, double reference) {
  constexpr double kMost = 1.05;
  if (error <= kMost * reference) return absl::OkStatus();  // false for NaN
  return Mismatch("error of scores", error, reference);
}

}  // namespace

std::vector<SelfTestCheck> RunSelfTest(const std::function<bool()>& keep_going) {
  std::vector<SelfTestCheck> checks;
  const auto check = [&](kernels::Level level, absl::string_view what, absl::string_view detail,
                         const std::function<absl::Status()>& work) {
    const std::string_view name = kernels::LevelName(level);
    const kvstore::SteadyTime began = kvstore::SteadyTime::Now();
    SelfTestCheck done{.name = absl::StrCat(std::string(name), ".", what),
                       .status = keep_going() ? work() : Cancelled("ended early"),
                       .detail = std::string(detail)};
    done.seconds = absl::ToDoubleSeconds(kvstore::SteadyTime::Now() - began);
    checks.push_back(std::move(done));
    return checks.back().status.ok();
  };
  double reference = 0;
  for (const kernels::Level level : kernels::AvailableLevels()) {
    std::unique_ptr<Probe> probe;
    const bool stored = check(level, "rows", "rows stored and read back", [&] {
      ASSIGN_OR_RETURN(auto made, Probe::Make(level));
      probe = std::move(made);
      return probe->CheckRows();
    });
    if (!stored) continue;
    check(level, "select", "selected tokens against plain loops",
          [&] { return probe->CheckSelect(); });
    check(level, "attend", "attention against double precision",
          [&] { return probe->CheckAttend(); });
    check(level, "index", "errors of PQ scores against the reference instruction set", [&] {
      ASSIGN_OR_RETURN(const auto error, probe->BuildAndScore());
      if (reference == 0) reference = error;
      return CompareErrors(error, reference);
    });
  }
  return checks;
}

}  // namespace pqcached::service
