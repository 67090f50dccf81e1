// Tells whether a new descriptor set still speaks to programs that were built with the old one.
//
// Only additions are compatible: new messages, fields, enum values, rpcs and services. Anything
// that the old set has must be in the new one with the same name, number, type, label and oneof.
//
// Pure function; thread-safe.
#ifndef PQCACHED_TESTS_PROTO_COMPATIBILITY_H_
#define PQCACHED_TESTS_PROTO_COMPATIBILITY_H_

#include <google/protobuf/descriptor.pb.h>

#include <string>
#include <vector>

namespace pqcached::tests {

// Returns one sentence per break, which begins with the full name of what broke; empty when
// `current` only adds to `previous`.
std::vector<std::string> FindBreaks(const google::protobuf::FileDescriptorSet& previous,
                                    const google::protobuf::FileDescriptorSet& current);

}  // namespace pqcached::tests

#endif  // PQCACHED_TESTS_PROTO_COMPATIBILITY_H_
