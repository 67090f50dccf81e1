// Owners of the objects of Verbs. An object must be destroyed before those that it was made of:
// members are declared in the order of the dependence.
#ifndef PQCACHED_SERVICE_RDMA_OBJECTS_H_
#define PQCACHED_SERVICE_RDMA_OBJECTS_H_

#include <memory>

#include "service/rdma/verbs.h"

namespace pqcached::service::rdma {

// Destroys an object by the verbs that have made it, which must outlive it.
struct Destroyer {
  Verbs* verbs = nullptr;
  template <typename Object>
  void operator()(Object* object) const {
    verbs->Destroy(object);
  }
};

template <typename Object>
using Owned = std::unique_ptr<Object, Destroyer>;

}  // namespace pqcached::service::rdma

#endif  // PQCACHED_SERVICE_RDMA_OBJECTS_H_
