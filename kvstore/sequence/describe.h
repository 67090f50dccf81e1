// Describe: summarises a sequence for admin tools and metrics.
#ifndef PQCACHED_KVSTORE_SEQUENCE_DESCRIBE_H_
#define PQCACHED_KVSTORE_SEQUENCE_DESCRIBE_H_

#include "kvstore/sequence/cache.h"
#include "kvstore/sequence/sequence.h"

namespace pqcached::kvstore {

SequenceInfo Describe(const Cache& cache, const Sequence& sequence, const Snapshot& snapshot);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_DESCRIBE_H_
