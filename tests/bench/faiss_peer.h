// faiss as a peer, where it is installed: Debian's libfaiss is a generic SSE build.
#ifndef PQCACHED_TESTS_BENCH_FAISS_PEER_H_
#define PQCACHED_TESTS_BENCH_FAISS_PEER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/select/pq.h"

namespace pqcached::bench {

// Whether this build has faiss. Where it does not, nothing else of this header may be called.
bool HasFaiss();

enum class FaissKind { kPq, kPqFastScan };  // IndexPQ, IndexPQFastScan

// One head's codes in a faiss index by inner product.
class FaissPeer {
 public:
  // Takes over code planes and centroids as they are.
  FaissPeer(FaissKind kind, const kernels::PqGeometry& geometry, const float* centroids,
            const uint8_t* planes, size_t plane_stride, uint32_t token_count);
  ~FaissPeer();
  FaissPeer(FaissPeer&&) noexcept;
  FaissPeer& operator=(FaissPeer&&) noexcept;

  // Returns the token with the largest score on the calling thread alone.
  uint32_t Best(const float* query) const;

 private:
  struct Index;
  std::unique_ptr<Index> index_;
};

// faiss::Clustering over all points with the given first centroids [centroid_count, dim], which
// become the last ones, on the calling thread alone.
void FaissKMeans(const float* points, uint32_t point_count, uint32_t dim, uint32_t centroid_count,
                 int iterations, float* centroids);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_FAISS_PEER_H_
