// Tiles of samples by centroids for 16 registers. A sample's largest score is kept lane by lane and
// found in one step in the end: comparing tile by tile took a third of the time, most of it by
// branches that nothing predicts.
//
// bf16 samples are multiplied by vpmaddwd, which multiplies two 16-bit integers a lane: its
// additions need none of the units that multiply. Samples and centroids are rounded to integers,
// each with a scale of its own, by which the sums are multiplied in the end. The integers have 12
// bits for 64 dims; bf16 has 8.
#include "kernels/base/simd/simd_avx2.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/train/nearest_simd.h"

namespace pqcached::kernels {
namespace {

// The largest scores of a sample so far, and their centroids, by lane.
struct LargestLanes {
  alignas(32) float scores[8];
  alignas(32) int32_t centroids[8];
};

struct F32Tile {
  using Sums = __m256;
  using Sample = float;
  static constexpr uint32_t kStep = 1;  // dims per product
  static constexpr uint32_t kSamples = 3;

  const NearestCentroids& centroids;
  const float* samples;  // [count, dim]

  PQC_INLINE Sums LoadPart(const float* from) { return Vec::Load(from); }
  PQC_INLINE Sums Broadcast(const float* from) { return Vec::Set(*from); }
  PQC_INLINE void Add(Sums part, Sums sample, Sums* sum) { *sum = Vec::MulAdd(part, sample, *sum); }
  [[gnu::always_inline]] const float* columns() const { return centroids.columns; }
  [[gnu::always_inline]] Sums First(uint32_t lane) const {
    return Vec::Load(centroids.bias + lane);
  }
  [[gnu::always_inline]] Vec::F Score(Sums sum, uint32_t, uint32_t) const { return sum; }
};

struct Int16Tile {
  using Sums = __m256i;
  using Sample = int16_t;
  static constexpr uint32_t kStep = 2;
  static constexpr uint32_t kSamples = 2;

  const NearestCentroids& centroids;
  const int16_t* samples;
  const float* scales;  // [count]: of the samples

  PQC_INLINE Sums LoadPart(const uint32_t* from) {
    // Loaded once for all samples: the units that load would limit the loop otherwise.
    return Vec::LoadedOnce(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  PQC_INLINE Sums Broadcast(const int16_t* from) {
    int pair;
    __builtin_memcpy(&pair, from, sizeof(pair));
    return _mm256_set1_epi32(pair);
  }
  PQC_INLINE void Add(Sums part, Sums sample, Sums* sum) {
    // An addition into the sum's own register: compilers copy each sum once more.
    asm("vpaddd %1, %0, %0" : "+x"(*sum) : "x"(_mm256_madd_epi16(part, sample)));
  }
  [[gnu::always_inline]] const uint32_t* columns() const { return centroids.pairs; }
  [[gnu::always_inline]] Sums First(uint32_t) const { return _mm256_setzero_si256(); }
  [[gnu::always_inline]] Vec::F Score(Sums sum, uint32_t lane, uint32_t sample) const {
    const Vec::F product = _mm256_cvtepi32_ps(sum) * Vec::Load(centroids.pair_scale + lane);
    return Vec::MulAdd(product, Vec::Set(scales[sample]), Vec::Load(centroids.pair_bias + lane));
  }
};

// Compares kSamples samples with kVectors registers of centroids from `first` on.
template <uint32_t kVectors, uint32_t kSamples, typename Tile>
PQC_INLINE void CompareTile(const Tile& tile, uint32_t first, uint32_t sample,
                            LargestLanes* largest) {
  using Sums = typename Tile::Sums;
  const uint32_t dim = tile.centroids.dim;
  const uint32_t count = tile.centroids.count;
  Sums sums[kSamples][kVectors];
  for (uint32_t v = 0; v < kVectors; ++v) {
    for (uint32_t s = 0; s < kSamples; ++s) sums[s][v] = tile.First(first + v * Vec::kLanes);
  }
  const auto* column = tile.columns() + first;
  const auto* const samples = tile.samples + size_t{sample} * dim;
  for (uint32_t i = 0; i < dim; i += Tile::kStep, column += count) {
    Sums own[kSamples];
    for (uint32_t s = 0; s < kSamples; ++s) {
      own[s] = Tile::Broadcast(samples + size_t{s} * dim + i);
    }
    for (uint32_t v = 0; v < kVectors; ++v) {
      const Sums part = Tile::LoadPart(column + v * Vec::kLanes);
      for (uint32_t s = 0; s < kSamples; ++s) Tile::Add(part, own[s], &sums[s][v]);
    }
  }
  const __m256i lanes = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                         _mm256_set1_epi32(static_cast<int>(first)));
  for (uint32_t s = 0; s < kSamples; ++s) {
    LargestLanes& kept = largest[sample + s];
    Vec::F most = Vec::Load(kept.scores);
    Vec::F which = Vec::Load(reinterpret_cast<const float*>(kept.centroids));
    for (uint32_t v = 0; v < kVectors; ++v) {
      const Vec::F score = tile.Score(sums[s][v], first + v * Vec::kLanes, sample + s);
      const __m256i own = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(8 * v)));
      which =
          _mm256_blendv_ps(which, _mm256_castsi256_ps(own), _mm256_cmp_ps(score, most, _CMP_GT_OQ));
      most = Vec::Max(score, most);
    }
    Vec::Store(kept.scores, most);
    Vec::Store(reinterpret_cast<float*>(kept.centroids), which);
  }
}

// Sets a sample's score and code, the lowest of those with the score.
PQC_INLINE void TakeLargest(const LargestLanes& kept, uint8_t* code, float* score) {
  const Vec::F scores = Vec::Load(kept.scores);
  const float most = Vec::Largest(scores);
  const __m256i centroids = _mm256_load_si256(reinterpret_cast<const __m256i*>(kept.centroids));
  const __m256i equal = _mm256_castps_si256(_mm256_cmp_ps(scores, Vec::Set(most), _CMP_EQ_OQ));
  // The others are the largest number.
  const __m256i candidates =
      _mm256_or_si256(_mm256_srli_epi32(_mm256_andnot_si256(equal, _mm256_set1_epi32(-1)), 1),
                      _mm256_and_si256(centroids, equal));
  __m128i least =
      _mm_min_epi32(_mm256_castsi256_si128(candidates), _mm256_extracti128_si256(candidates, 1));
  least = _mm_min_epi32(least, _mm_shuffle_epi32(least, _MM_SHUFFLE(1, 0, 3, 2)));
  least = _mm_min_epi32(least, _mm_shuffle_epi32(least, _MM_SHUFFLE(2, 3, 0, 1)));
  *code = static_cast<uint8_t>(_mm_cvtsi128_si32(least));
  *score = most;
}

template <uint32_t kVectors, typename Tile>
PQC_INLINE void CompareTiles(const Tile& tile, uint32_t sample_count, LargestLanes* largest) {
  constexpr uint32_t kSamples = Tile::kSamples;
  for (uint32_t first = 0; first < tile.centroids.count; first += kVectors * Vec::kLanes) {
    uint32_t s = 0;
    for (; s + kSamples <= sample_count; s += kSamples) {
      CompareTile<kVectors, kSamples>(tile, first, s, largest);
    }
    for (; s < sample_count; ++s) CompareTile<kVectors, 1>(tile, first, s, largest);
  }
}

template <typename Tile>
inline void FindNearest(const Tile& tile, uint32_t sample_count, uint8_t* codes, float* scores) {
  LargestLanes largest[kNearestBlock];
  const Vec::F lowest = Vec::Set(-__builtin_inff());
  for (uint32_t s = 0; s < sample_count; ++s) {
    Vec::Store(largest[s].scores, lowest);
    Vec::Store(reinterpret_cast<float*>(largest[s].centroids), Vec::Set(0.0f));
  }
  if (tile.centroids.count % 32 == 0) {
    CompareTiles<4>(tile, sample_count, largest);
  } else {
    CompareTiles<2>(tile, sample_count, largest);
  }
  for (uint32_t s = 0; s < sample_count; ++s) TakeLargest(largest[s], codes + s, scores + s);
}

void FindF32Avx2(const NearestCentroids& centroids, const float* samples, uint32_t sample_count,
                 uint8_t* codes, float* scores) {
  FindNearest(F32Tile{centroids, samples}, sample_count, codes, scores);
}

constexpr uint32_t kInt16Dims = 16;  // rounded at once

// Least magnitude by which samples are scaled: quotients by smaller ones could be infinite.
constexpr float kLeastSample = 1e-30f;

// Returns the largest magnitude of a sample.
PQC_INLINE float LargestMagnitude(const uint16_t* sample, uint32_t dim) {
  __m256i most = _mm256_setzero_si256();
  for (uint32_t i = 0; i < dim; i += kInt16Dims) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sample + i));
    most = _mm256_max_epu16(most, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
  }
  // The instruction finds the least of eight.
  const __m128i halves =
      _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(halves, _mm_set1_epi16(-1)));
  const auto bits = static_cast<uint16_t>(~_mm_cvtsi128_si32(least));
  return Bf16ToF32(bits);
}

// Rounds a sample to integers, and returns the number by which they are to be multiplied.
PQC_INLINE float RoundSample(const uint16_t* sample, uint32_t dim, float limit, int16_t* rounded) {
  const float largest = LargestMagnitude(sample, dim);
  const float magnitude = largest > kLeastSample ? largest : kLeastSample;
  const __m256 factor = _mm256_set1_ps(limit / magnitude);
  const __m256i zero = _mm256_setzero_si256();
  for (uint32_t i = 0; i < dim; i += kInt16Dims) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sample + i));
    // Elements 0 to 3 and 8 to 11, and the others: packs brings them back into order.
    const __m256 low = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, bits));
    const __m256 high = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, bits));
    const __m256i integers = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(low, factor)),
                                                _mm256_cvtps_epi32(_mm256_mul_ps(high, factor)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + i), integers);
  }
  return magnitude / limit;
}

// Returns the score of a centroid without rounding: distances that are zero must come out as zero.
PQC_INLINE float ExactScore(const NearestCentroids& centroids, const uint16_t* sample,
                            uint32_t code) {
  const float* const row = centroids.rows + size_t{code} * centroids.dim;
  const auto* const bytes = reinterpret_cast<const std::byte*>(sample);
  Vec::F sum = Vec::Set(0.0f);
  Vec::F other = Vec::Set(0.0f);
  static_assert(kInt16Dims == 2 * Vec::kLanes);
  for (uint32_t i = 0; i < centroids.dim; i += kInt16Dims) {
    const uint32_t next = i + Vec::kLanes;
    sum = Vec::MulAdd(Vec::LoadRow<DType::kBf16>(bytes, i), Vec::Load(row + i), sum);
    other = Vec::MulAdd(Vec::LoadRow<DType::kBf16>(bytes, next), Vec::Load(row + next), other);
  }
  return Vec::Sum(sum + other) + centroids.bias[code];
}

// Samples are rounded shortly before they are compared, while the next ones come from memory.
void FindBf16(const NearestCentroids& centroids, const uint16_t* samples, uint32_t sample_count,
              int16_t* block, uint8_t* codes, float* scores) {
  constexpr uint32_t kAtOnce = 16;
  const uint32_t dim = centroids.dim;
  const auto limit = static_cast<float>(centroids.int16_limit);
  float scales[kAtOnce];
  for (uint32_t first = 0; first < sample_count; first += kAtOnce) {
    const uint32_t rest = sample_count - first;
    const uint32_t count = rest < kAtOnce ? rest : kAtOnce;
    for (uint32_t s = 0; s < count; ++s) {
      const uint16_t* const sample = samples + size_t{first + s} * dim;
      for (uint32_t i = 0; i < dim; i += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(sample + size_t{kAtOnce} * dim + i),
                     _MM_HINT_T0);
      }
      scales[s] = RoundSample(sample, dim, limit, block + size_t{s} * dim);
    }
    FindNearest(Int16Tile{centroids, block, scales}, count, codes + first, scores + first);
    for (uint32_t s = first; s < first + count; ++s) {
      scores[s] = ExactScore(centroids, samples + size_t{s} * dim, codes[s]);
    }
  }
}

}  // namespace

const NearestOps kNearestAvx2 = {.find = FindF32Avx2,
                                 .find_bf16 = FindBf16,
                                 .find_one = FindOne,
                                 .add = AddSamples<float>,
                                 .add_bf16 = AddSamples<uint16_t>,
                                 .pair_form = PairForm::kInt16,
                                 .bf16_dims = kInt16Dims};

}  // namespace pqcached::kernels
