// What the calls that begin operations have in common.
#ifndef PQCACHED_CLIENT_ABI_OPERATIONS_H_
#define PQCACHED_CLIENT_ABI_OPERATIONS_H_

#include <cstdint>
#include <functional>

#include "client/base/operations.h"
#include "client/step/handles.h"
#include "pqcached/client.h"

namespace pqcached::client {

// The arguments that all of them have.
struct Beginning {
  pqc_sequence* sequence = nullptr;
  void* context = nullptr;
  pqc_operation** operation = nullptr;
};

// Checks the arguments, and sets *operation to NULL.
pqc_status CheckBeginning(const Beginning& beginning);

// Makes the calls of an operation, with its own handle of the sequence.
using OperationCalls = std::function<pqc_status(Operation& operation, pqc_sequence* sequence)>;

struct OperationTerms {
  Operation::Kind kind = Operation::Kind::kShort;
  pqc_sequence::Reserved reserved = pqc_sequence::Reserved::kNone;
  uint32_t layer_count = 0;  // of a load
};

// Begins an operation. REQUIRES: CheckBeginning has accepted `beginning`.
pqc_status BeginOperation(const Beginning& beginning, const OperationTerms& terms,
                          const OperationCalls& calls);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_ABI_OPERATIONS_H_
