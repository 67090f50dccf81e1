// What the public headers say of each call, as far as a record shows it.
#ifndef PQCACHED_CLIENT_CONFORM_CONTRACT_H_
#define PQCACHED_CLIENT_CONFORM_CONTRACT_H_

#include <cstdint>
#include <string_view>

namespace pqcached::conform {

enum class Kind {
  kClient,
  kCache,
  kSequence,
  kStep,
  kOperation,
  kGpu,
  kDecoder,
  kEvents,
  kPageCache
};

// Returns the kind of an argument's handle. REQUIRES: `key` names a handle in a recorded call.
Kind KindOf(std::string_view key);
// Returns the word for handles of a kind: "sequence".
const char* NameOf(Kind kind);

// Traits of a call; a Rule has a sum of them.
enum Trait : uint32_t {
  kChanges = 1,       // changes its sequence, and excludes other changes and steps
  kBuilds = 2,        // excludes them only as it begins
  kBeginsStep = 4,    // has the sequences of its items until the step ends
  kInStep = 8,        // a call for a layer of a step
  kPassesRows = 16,   // leaves rows on their way when it returns
  kStoresRows = 32,   // waits until the rows on their way are stored
  kOnlyReports = 64,  // changes nothing, may be repeated at will, and works after its client ends
  kCreates = 128,     // makes another sequence when it is repeated
  kHidesArguments = 256  // has arguments that are not recorded and may make it fail
};

struct Rule {
  const char* name;
  const char* opens;   // the argument that receives a new handle; nullptr = none
  const char* closes;  // the argument whose handle is closed; nullptr = none
  uint32_t traits;

  bool Has(Trait trait) const { return (traits & trait) != 0; }
};

// Returns the rule of a call; nullptr for calls that are not known.
const Rule* FindRule(std::string_view name);

}  // namespace pqcached::conform

#endif  // PQCACHED_CLIENT_CONFORM_CONTRACT_H_
