// Changes protobuf messages by a fuzzer's choices.
#ifndef PQCACHED_TESTS_FUZZ_MESSAGES_H_
#define PQCACHED_TESTS_FUZZ_MESSAGES_H_

#include <google/protobuf/message.h>

#include "tests/fuzz/bytes.h"

namespace pqcached::fuzz {

// Changes one field somewhere in the message: sets, clears, repeats or removes it. Whatever protobuf can
// carry may come of it.
void Mutate(google::protobuf::Message& message, Bytes& bytes);

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_MESSAGES_H_
