// k-means of one sub-space beside faiss and OpenBLAS: 128K points of 64 dims, 64 centroids (m = 2,
// b = 6, d = 128), all points, ten iterations from the same first centroids; and encoding.
//
// Ours begins at bf16 rows of 512 bytes and includes making the compact copy; the peers begin at a
// compact fp32 copy of the same points.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/train/kmeans.h"
#include "kernels/train/pq_encode.h"
#include "tests/bench/blas_peer.h"
#include "tests/bench/code_arena.h"
#include "tests/bench/faiss_peer.h"
#include "tests/bench/huge_buffer.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

using kernels::DType;

constexpr uint32_t kPoints = 128 << 10;
constexpr uint32_t kDim = 64;
constexpr uint32_t kCentroids = 64;
constexpr int kIterations = 10;
constexpr uint32_t kSets = 4;
constexpr size_t kRowBytes = 512;
constexpr kernels::PqGeometry kGeometry{2 * kDim, 2, 6};

// Points around 300 centers, more spread in some dims than in others, in both forms.
class PointSet {
 public:
  explicit PointSet(uint64_t seed)
      : rows_(kPoints * kRowBytes), compact_(size_t{kPoints} * kDim * sizeof(float)) {
    constexpr uint32_t kCenters = 300;
    const std::vector<float> centers = NormalFloats(kCenters * kDim, seed);
    const std::vector<float> noise = NormalFloats(size_t{1} << 20, seed + 1);
    std::mt19937_64 random(seed + 2);
    for (uint32_t i = 0; i < kPoints; ++i) {
      const float* center = centers.data() + random() % kCenters * kDim;
      const float* offset = noise.data() + random() % (noise.size() - 2 * kDim);
      std::byte* row = rows_.data() + i * kRowBytes;
      for (uint32_t d = 0; d < 2 * kDim; ++d) {
        const float spread = 0.2f + 0.8f * static_cast<float>(d % 8) / 8;
        kernels::StoreElement(DType::kBf16, row, d, center[d % kDim] + spread * offset[d]);
      }
      for (uint32_t d = 0; d < kDim; ++d) {
        compact_.As<float>()[i * kDim + d] = kernels::LoadElement(DType::kBf16, row, d);
      }
    }
  }

  const std::byte* rows() const { return rows_.data(); }
  const float* compact() const { return compact_.As<float>(); }

 private:
  HugeBuffer rows_;
  HugeBuffer compact_;
};

// What one thread writes.
class Trainer {
 public:
  explicit Trainer(kernels::Exec exec = {})
      : exec_(exec),
        samples_(size_t{kPoints} * kDim * sizeof(float)),
        scratch_(std::max(kernels::KMeansStepScratchBytes(kDim, kCentroids),
                          kernels::PqEncodeScratchBytes(kGeometry))),
        planes_(kernels::CodePlanesBytes(kGeometry, kPoints)),
        centroids_(kernels::CentroidFloats(kGeometry)) {}

  std::span<float> centroids() { return std::span(centroids_).first(kCentroids * kDim); }

  void Load(const PointSet& points, DType sample_type) {
    kernels::KMeansLoad(exec_, {.source_type = DType::kBf16,
                                .rows = points.rows(),
                                .row_stride = kRowBytes,
                                .row_count = kPoints,
                                .dim = kDim,
                                .sample_type = sample_type,
                                .samples = samples_.data()});
    problem_ = {sample_type, samples_.data(), kPoints, kDim, kCentroids, centroids()};
  }

  // The first centroids that all start from.
  std::vector<float> FirstCentroids(const PointSet& points) {
    Load(points, DType::kF32);
    kernels::KMeansInit(problem_, 1);
    return {centroids().begin(), centroids().end()};
  }

  void Train(const PointSet& points, std::span<const float> first, DType sample_type) {
    Load(points, sample_type);
    std::ranges::copy(first, centroids().begin());
    for (int i = 0; i < kIterations; ++i) kernels::KMeansStep(exec_, problem_, scratch_.bytes());
  }

  // Codes of both sub-spaces, both by the trained centroids.
  void Encode(const PointSet& points) {
    std::ranges::copy(centroids(), centroids_.begin() + kCentroids * kDim);
    kernels::PqEncode(exec_,
                      {kGeometry, DType::kBf16, points.rows(), kRowBytes, kPoints, centroids_,
                       planes_.As<uint8_t>(), kernels::PlaneStride(kPoints), 0, scratch_.bytes()});
  }

  uint8_t code(uint32_t point) const { return planes_.As<uint8_t>()[point]; }

 private:
  kernels::Exec exec_;
  HugeBuffer samples_;
  HugeBuffer scratch_;
  HugeBuffer planes_;
  std::vector<float> centroids_;
  kernels::KMeansProblem problem_;
};

double Distance(const float* a, const float* b) {
  double sum = 0.0;
  for (uint32_t d = 0; d < kDim; ++d) {
    const double difference = static_cast<double>(a[d] - b[d]);
    sum += difference * difference;
  }
  return sum;
}

// Sum of squared distances to the nearest centroids.
double Inertia(const PointSet& points, std::span<const float> centroids) {
  double inertia = 0.0;
  for (uint32_t i = 0; i < kPoints; i += 7) {
    double best = Distance(points.compact() + size_t{i} * kDim, centroids.data());
    for (uint32_t c = 1; c < kCentroids; ++c) {
      best = std::min(best, Distance(points.compact() + size_t{i} * kDim, &centroids[c * kDim]));
    }
    inertia += best;
  }
  return inertia;
}

struct World {
  World() {
    Trainer trainer;
    for (uint32_t i = 0; i < kSets; ++i) {
      sets.push_back(std::make_unique<PointSet>(10 * i));
      first.push_back(trainer.FirstCentroids(*sets.back()));
    }
  }

  std::vector<std::unique_ptr<PointSet>> sets;
  std::vector<std::vector<float>> first;
};

// Trains on every set as bf16 and as fp32, checks that the peers find clusters as good as ours, and
// reports what bf16 costs. `suffix`: of the figure's name.
void CheckAndReportInertia(const World& world, kernels::Exec exec, const char* suffix,
                           Report& report) {
  Trainer trainer(exec);
  std::vector<double> ratios;
  for (uint32_t i = 0; i < kSets; ++i) {
    const PointSet& points = *world.sets[i];
    trainer.Train(points, world.first[i], DType::kF32);
    const double fp32 = Inertia(points, trainer.centroids());
    trainer.Train(points, world.first[i], DType::kBf16);
    const double bf16 = Inertia(points, trainer.centroids());
    ratios.push_back(bf16 / fp32);
    if (i != 0) continue;
    Require(fp32 < 0.99 * Inertia(points, world.first[i]), "k-means does not improve");
    trainer.Encode(points);
    for (uint32_t t = 0; t < kPoints; t += 97) {
      const float* point = points.compact() + size_t{t} * kDim;
      double best = Distance(point, trainer.centroids().data());
      for (uint32_t c = 1; c < kCentroids; ++c) {
        best = std::min(best, Distance(point, &trainer.centroids()[c * kDim]));
      }
      Require(Distance(point, &trainer.centroids()[trainer.code(t) * kDim]) <= best * 1.01,
              "codes");
    }
    std::vector<float> centroids = world.first[i];
    if (HasFaiss()) {
      FaissKMeans(points.compact(), kPoints, kDim, kCentroids, kIterations, centroids.data());
      Require(bf16 < 1.02 * Inertia(points, centroids), "faiss finds better clusters");
    }
    if (HasBlas()) {
      centroids = world.first[i];
      BlasKMeans(points.compact(), kPoints, kDim, kCentroids, kIterations, centroids.data());
      Require(bf16 < 1.02 * Inertia(points, centroids), "OpenBLAS finds better clusters");
    }
  }
  report.Add({std::string("kmeans_inertia_ratio") + suffix, "x", "training on fp32 samples",
              Better::kLower, 1.001},
             StatOf(ratios));
}

constexpr kernels::Exec kAvx2{kernels::Level::kAvx2};

bool HasAvx2() { return kernels::HasLevel(kernels::Level::kAvx2); }

const std::string kFaissRow = "faiss Clustering, all points (Debian's generic SSE build)";
const std::string kBlasRow = "OpenBLAS sgemm and a loop for the largest, fp32";

// Figures of our code limited to AVX2, whose speeds are null where they could not be measured.
void ReportAvx2(const std::optional<Stat>& faiss, const std::optional<Stat>& blas, Report& report) {
  const char* const limited = "; our code limited to AVX2";
  const Figure vs_faiss{"kmeans_vs_faiss_avx2", "x", kFaissRow + limited, Better::kHigher, 4};
  const Figure vs_blas{"kmeans_vs_openblas_avx2", "x", kBlasRow + limited, Better::kHigher,
                       std::nullopt};
  const char* const reason = HasAvx2() ? "not installed" : "no AVX2";
  if (faiss) {
    report.Add(vs_faiss, *faiss);
  } else {
    report.AddAbsent(vs_faiss, reason);
  }
  if (blas) {
    report.Add(vs_blas, *blas);
  } else {
    report.AddAbsent(vs_blas, reason);
  }
}

void Run(const World& world, int threads, Report& report) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<std::vector<float>> centroids(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) trainers.push_back(std::make_unique<Trainer>());
  Rounds rounds(threads);
  // visit(thread, set); units are steps of k-means, or encodings.
  const auto add = [&](const char* name, int units, auto visit) {
    return rounds.Add(name, units, [&, visit](int thread, int round) {
      visit(static_cast<size_t>(thread),
            (static_cast<uint32_t>(round) + static_cast<uint32_t>(thread) * 2) % kSets);
    });
  };
  const size_t ours = add("k-means, bf16", kIterations, [&](size_t thread, uint32_t set) {
    trainers[thread]->Train(*world.sets[set], world.first[set], DType::kBf16);
  });
  const size_t fp32 = add("k-means, fp32", kIterations, [&](size_t thread, uint32_t set) {
    trainers[thread]->Train(*world.sets[set], world.first[set], DType::kF32);
  });
  const size_t encode = add("encode", 1, [&](size_t thread, uint32_t set) {
    trainers[thread]->Encode(*world.sets[set]);
  });
  const bool with_avx2 = threads == 1 && HasAvx2();
  std::optional<Trainer> limited;
  size_t avx2 = 0;
  size_t avx2_fp32 = 0;
  size_t avx2_encode = 0;
  if (with_avx2) {
    limited.emplace(kAvx2);
    avx2 = add("k-means, limited to AVX2", kIterations, [&](size_t, uint32_t set) {
      limited->Train(*world.sets[set], world.first[set], kernels::KMeansSampleType(kAvx2));
    });
    avx2_fp32 = add("k-means, limited to AVX2, fp32", kIterations, [&](size_t, uint32_t set) {
      limited->Train(*world.sets[set], world.first[set], DType::kF32);
    });
    avx2_encode = add("encode, limited to AVX2", 1,
                      [&](size_t, uint32_t set) { limited->Encode(*world.sets[set]); });
  }
  size_t faiss = 0;
  size_t blas = 0;
  if (HasFaiss()) {
    faiss = add("faiss Clustering", kIterations, [&](size_t thread, uint32_t set) {
      centroids[thread] = world.first[set];
      FaissKMeans(world.sets[set]->compact(), kPoints, kDim, kCentroids, kIterations,
                  centroids[thread].data());
    });
  }
  if (HasBlas()) {
    blas = add("OpenBLAS", kIterations, [&](size_t thread, uint32_t set) {
      centroids[thread] = world.first[set];
      BlasKMeans(world.sets[set]->compact(), kPoints, kDim, kCentroids, kIterations,
                 centroids[thread].data());
    });
  }
  rounds.Run(report.rounds());

  const std::string suffix = threads == 1 ? "" : "_2t";
  const auto goal = [&](double value) {
    return threads == 1 ? std::optional(value) : std::nullopt;
  };
  const Figure vs_faiss{"kmeans_vs_faiss" + suffix, "x", kFaissRow, Better::kHigher, goal(4)};
  const Figure vs_blas{"kmeans_vs_openblas" + suffix, "x", kBlasRow, Better::kHigher, goal(2.5)};
  if (HasFaiss()) {
    report.Add(vs_faiss, rounds.Speedup(ours, faiss));
  } else {
    report.AddAbsent(vs_faiss, "not installed");
  }
  if (HasBlas()) {
    report.Add(vs_blas, rounds.Speedup(ours, blas));
  } else {
    report.AddAbsent(vs_blas, "not installed");
  }
  if (threads == 1) {
    const auto speedup = [&](bool has_peer, size_t peer) {
      return with_avx2 && has_peer ? std::optional(rounds.Speedup(avx2, peer)) : std::nullopt;
    };
    ReportAvx2(speedup(HasFaiss(), faiss), speedup(HasBlas(), blas), report);
  }
  const auto beside_own = [&](CodeLevel level, size_t train, size_t train_fp32, size_t encode_all) {
    report.AddSpeedup(level,
                      {"kmeans_bf16_vs_fp32" + suffix, "x",
                       kernels::KMeansSampleType(ExecOf(level)) == DType::kBf16
                           ? "our own fp32 form"
                           : "our own fp32 form (no bf16 products on this CPU)",
                       Better::kHigher, std::nullopt},
                      rounds, train, train_fp32);
    report.AddSpeedup(
        level,
        {"encode_vs_kmeans_step" + suffix, "x",
         "a tenth of the k-means (encode: two sub-spaces, fp32)", Better::kHigher, std::nullopt},
        rounds, encode_all, train);
  };
  beside_own(CodeLevel::kBest, ours, fp32, encode);
  if (threads == 1) beside_own(CodeLevel::kAvx2, avx2, avx2_fp32, avx2_encode);
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 9);
  const World world;
  CheckAndReportInertia(world, {}, "", report);
  if (HasAvx2()) CheckAndReportInertia(world, kAvx2, "_avx2", report);
  for (const int threads : {1, 2}) Run(world, threads, report);
  return report.Finish();
}
