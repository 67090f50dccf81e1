#include "tests/bench/faiss_peer.h"

#include <cstdlib>

#ifdef PQCACHED_BENCH_FAISS

#include <faiss/Clustering.h>
#include <faiss/IndexFlat.h>
#include <faiss/IndexPQ.h>
#include <faiss/IndexPQFastScan.h>
#include <omp.h>

#include <algorithm>
#include <utility>

namespace pqcached::bench {

bool HasFaiss() { return true; }

struct FaissPeer::Index {
  std::unique_ptr<faiss::Index> index;
};

FaissPeer::FaissPeer(FaissKind kind, const kernels::PqGeometry& geometry, const float* centroids,
                     const uint8_t* planes, size_t plane_stride, uint32_t token_count)
    : index_(std::make_unique<Index>()) {
  auto pq =
      std::make_unique<faiss::IndexPQ>(static_cast<int>(geometry.key_dim), geometry.subspace_count,
                                       geometry.bits, faiss::METRIC_INNER_PRODUCT);
  pq->pq.centroids.assign(centroids, centroids + kernels::CentroidFloats(geometry));
  pq->is_trained = true;
  pq->ntotal = token_count;
  pq->codes.assign(token_count * pq->pq.code_size, 0);
  for (uint32_t t = 0; t < token_count; ++t) {
    faiss::PQEncoderGeneric encoder(pq->codes.data() + t * pq->pq.code_size,
                                    static_cast<int>(geometry.bits));
    for (uint32_t j = 0; j < geometry.subspace_count; ++j) {
      encoder.encode(kernels::GetCode(geometry, planes, plane_stride, j, t));
    }
  }
  if (kind == FaissKind::kPqFastScan) {
    index_->index = std::make_unique<faiss::IndexPQFastScan>(*pq);
  } else {
    index_->index = std::move(pq);
  }
}

FaissPeer::~FaissPeer() = default;
FaissPeer::FaissPeer(FaissPeer&&) noexcept = default;
FaissPeer& FaissPeer::operator=(FaissPeer&&) noexcept = default;

uint32_t FaissPeer::Best(const float* query) const {
  omp_set_num_threads(1);
  float score = 0.0f;
  faiss::Index::idx_t label = 0;
  index_->index->search(1, query, 1, &score, &label);
  return static_cast<uint32_t>(label);
}

void FaissKMeans(const float* points, uint32_t point_count, uint32_t dim, uint32_t centroid_count,
                 int iterations, float* centroids) {
  omp_set_num_threads(1);
  faiss::ClusteringParameters parameters;
  parameters.niter = iterations;
  parameters.max_points_per_centroid = static_cast<int>(point_count / centroid_count + 1);
  faiss::Clustering clustering(static_cast<int>(dim), static_cast<int>(centroid_count), parameters);
  clustering.centroids.assign(centroids, centroids + size_t{centroid_count} * dim);
  faiss::IndexFlatL2 assigner(dim);
  clustering.train(point_count, points, assigner);
  std::copy(clustering.centroids.begin(), clustering.centroids.end(), centroids);
}

}  // namespace pqcached::bench

#else

namespace pqcached::bench {

bool HasFaiss() { return false; }

struct FaissPeer::Index {};

FaissPeer::FaissPeer(FaissKind, const kernels::PqGeometry&, const float*, const uint8_t*, size_t,
                     uint32_t) {
  std::abort();
}
FaissPeer::~FaissPeer() = default;
FaissPeer::FaissPeer(FaissPeer&&) noexcept = default;
FaissPeer& FaissPeer::operator=(FaissPeer&&) noexcept = default;
uint32_t FaissPeer::Best(const float*) const { std::abort(); }
void FaissKMeans(const float*, uint32_t, uint32_t, uint32_t, int, float*) { std::abort(); }

}  // namespace pqcached::bench

#endif
