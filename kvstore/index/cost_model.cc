#include "kvstore/index/cost_model.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/dtype.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kRows = 8192;    // a prefill segment: exceeds the first cache levels
constexpr int kRepeats = 3;         // the minimum is used, because disturbances only add time
constexpr double kLeastStep = 0.1;  // share of a training that its iterations take at least
constexpr char kHeading[] = "pqcached build costs 2";

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
};
using AlignedBytes = std::unique_ptr<std::byte, AlignedDelete>;

AlignedBytes NewBytes(size_t size_bytes) {
  return AlignedBytes(static_cast<std::byte*>(
      ::operator new (std::max<size_t>(size_bytes, 1), std::align_val_t{64})));
}

template <typename Work>
double BestSeconds(Work work) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRepeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

AlignedBytes RandomRows(const LayerShape& shape) {
  AlignedBytes rows = NewBytes(size_t{kRows} * shape.row_bytes);
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(4096);
  for (float& number : numbers) number = normal(random);
  for (uint32_t row = 0; row < kRows; ++row) {
    std::byte* const begin = rows.get() + size_t{row} * shape.row_bytes;
    const size_t offset = random() % numbers.size();
    for (uint32_t i = 0; i < shape.key_dim; ++i) {
      kernels::StoreElement(shape.dtype, begin, i, numbers[(offset + i) % numbers.size()]);
    }
  }
  return rows;
}

// A codebook and the index data of one kv head, outside of any pool.
class Trial {
 public:
  Trial(const kernels::Exec& exec, const LayerShape& shape, const IndexDescriptor& index)
      : exec_(exec), shape_(OneHead(shape)), type_(BuiltTypeOf(index)), rows_(RandomRows(shape_)) {
    codebook_ = NewBytes(type_.CodebookBytes(index, shape_));
    auto* const codebook = new (codebook_.get()) CodebookHeader;
    codebook->index = index;
    codebook->kv_head_count = 1;
    codebook->key_dim = shape_.key_dim;
    type_.FormatCodebook(shape_, codebook);
    data_ = NewBytes(type_.DataBytes(index, shape_, kRows));
    std::memset(data_.get(), 0, type_.ZeroedDataBytes(index, shape_, kRows));
    auto* const data = new (data_.get()) IndexDataHeader;
    data->index = index;
    data->kv_head_count = 1;
    data->slot_capacity = kRows;
    type_.FormatData(shape_, data);
    scratch_bytes_ = std::max(
        {type_.TrainScratchBytes(exec_, Training(0)), type_.EncodeScratchBytes(index, shape_),
         type_.PrepareScratchBytes(Training(0)), type_.CloseScratchBytes(Closing())});
    scratch_ = NewBytes(scratch_bytes_);
    type_.PrepareTraining(Training(0), {scratch_.get(), scratch_bytes_});
  }

  void Train(uint32_t task, uint32_t iterations) {
    TrainingArgs args = Training(iterations);
    args.task = task;
    type_.Train(exec_, args, {scratch_.get(), scratch_bytes_});
  }

  void Code() {
    type_.Encode(exec_,
                 {.shape = shape_,
                  .codebook = &codebook(),
                  .rows = rows_.get(),
                  .slots = {0, kRows},
                  .data = &data()},
                 {scratch_.get(), scratch_bytes_});
    if (type_.HasClosing(data()))
      type_.CloseHead(exec_, Closing(), {scratch_.get(), scratch_bytes_});
  }

 private:
  static LayerShape OneHead(LayerShape shape) {
    shape.query_heads = shape.group_size();
    shape.kv_heads = 1;
    return shape;
  }

  TrainingArgs Training(uint32_t iterations) {
    return {.shape = shape_,
            .rows = {&span_, 1},
            .iterations = iterations,
            .seed = 1,
            .samples = {.rows = rows_.get(),
                        .row_stride = shape_.row_bytes,
                        .position_count = kRows,
                        .queries_per_position = 1},
            .keep_going = [] { return true; },
            .codebook = &codebook()};
  }

  CloseArgs Closing() {
    return {.shape = shape_,
            .codebook = &codebook(),
            .rows = rows_.get(),
            .slot_end = kRows,
            .data = &data()};
  }

  CodebookHeader& codebook() const { return *reinterpret_cast<CodebookHeader*>(codebook_.get()); }
  IndexDataHeader& data() const { return *reinterpret_cast<IndexDataHeader*>(data_.get()); }

  const kernels::Exec& exec_;
  const LayerShape shape_;
  const BuiltIndexType& type_;
  const AlignedBytes rows_;
  const kernels::RowSpan span_ = {.rows = rows_.get(), .token_count = kRows};
  AlignedBytes codebook_, data_, scratch_;
  size_t scratch_bytes_ = 0;
};

BuildCost Measure(const kernels::Exec& exec, const LayerShape& shape,
                  const IndexDescriptor& index) {
  constexpr uint32_t kIterations = 2;
  Trial trial(exec, shape, index);
  BuildCost cost;
  cost.load = BestSeconds([&] { trial.Train(0, 0); }) / kRows;
  const double training = BestSeconds([&] { trial.Train(0, kIterations); }) / kRows;
  // Disturbances can make the longer measurement the faster one.
  cost.step = std::max(training - cost.load, kLeastStep * training) / kIterations;
  for (uint32_t task = 1; task < BuiltTypeOf(index).TrainingTasks(index); ++task) {
    trial.Train(task, 0);
  }
  cost.code = BestSeconds([&] { trial.Code(); }) / kRows;
  return cost;
}

// Replaces the file atomically. A file that cannot be written is ignored: the next process measures
// again.
void WriteFile(const std::string& file, const std::string& text) {
  const std::string fresh = file + ".new";
  {
    std::ofstream out(fresh, std::ios::trunc);
    out << text;
    if (!out.flush()) return;
  }
  std::error_code error;
  std::filesystem::rename(fresh, file, error);
  if (error) std::filesystem::remove(fresh, error);
}

bool IsCost(double seconds) { return std::isfinite(seconds) && seconds > 0 && seconds < 1; }

}  // namespace

double BuildSeconds(const BuildCost& cost, const BuildSize& size, uint32_t iterations) {
  const double heads = static_cast<double>(size.head_count) / std::max(1u, size.worker_count);
  const double training = size.sample_count * (cost.load + iterations * cost.step);
  return heads * (size.head_tasks * training + size.row_count * cost.code);
}

uint32_t IterationsWithin(const BuildCost& cost, const BuildSize& size, double seconds,
                          uint32_t most) {
  const double without = BuildSeconds(cost, size, 0);
  const double each = BuildSeconds(cost, size, 1) - without;
  if (each <= 0) return most;
  const double fit = std::floor((seconds - without) / each);
  return static_cast<uint32_t>(std::clamp(fit, 1.0, static_cast<double>(std::max(1u, most))));
}

double PrefillSeconds(const PrefillCost& cost, uint32_t token_count) {
  if (token_count == 0) return 0;
  const double tokens = token_count;
  return cost.seconds_per_token_squared * tokens * tokens + cost.seconds_per_token * tokens +
         cost.seconds;
}

CostModel::CostModel(const kernels::Exec& exec, std::string file)
    : exec_(exec), file_(std::move(file)) {}

std::string CostModel::MachineKey(const kernels::Exec& exec) {
  std::string model = "unknown CPU";
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) != 0 || colon == std::string::npos) continue;
    model = line.substr(colon + 2);
    break;
  }
  return model + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores, " +
         std::string(kernels::LevelName(exec.level));
}

void CostModel::Load() {
  if (loaded_) return;
  loaded_ = true;
  if (file_.empty()) return;
  std::ifstream in(file_);
  std::string heading;
  std::string machine;
  if (!std::getline(in, heading) || heading != kHeading) return;
  if (!std::getline(in, machine) || machine != MachineKey(exec_)) return;
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    Kind kind;
    BuildCost cost;
    for (uint32_t& number : kind) fields >> number;
    if (!(fields >> cost.load >> cost.step >> cost.code)) {
      continue;
    }
    if (!IsCost(cost.load) || !IsCost(cost.step) || !IsCost(cost.code)) continue;
    costs_[kind] = cost;
  }
}

std::string CostModel::Text() const {
  std::ostringstream out;
  out << kHeading << "\n" << MachineKey(exec_) << "\n";
  for (const auto& [kind, cost] : costs_) {
    for (const uint32_t number : kind) out << number << " ";
    out << cost.load << " " << cost.step << " " << cost.code << "\n";
  }
  return out.str();
}

BuildCost CostModel::Measured(const LayerShape& shape, const IndexDescriptor& index) {
  const Kind kind{static_cast<uint32_t>(shape.dtype),
                  shape.key_dim,
                  shape.row_bytes,
                  index.subspace_count,
                  index.bits,
                  static_cast<uint32_t>(index.layout)};
  {
    const MutexLock lock(&mutex_);
    Load();
    if (const auto it = costs_.find(kind); it != costs_.end()) return it->second;
  }
  const BuildCost cost = Measure(exec_, shape, index);
  std::string text;
  {
    const MutexLock lock(&mutex_);
    const auto [it, added] = costs_.emplace(kind, cost);
    if (!added || file_.empty()) return it->second;
    text = Text();
  }
  WriteFile(file_, text);
  return cost;
}

}  // namespace pqcached::kvstore
