// The index types that exist.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_INDEX_TYPES_H_
#define PQCACHED_KVSTORE_READ_INDEXES_INDEX_TYPES_H_

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kvstore/read/indexes/index_type.h"
#include "kvstore/read/indexes/plugin_names.h"

namespace pqcached::kvstore {

// Returns all types, in the order in which they are listed to users.
std::span<const IndexType* const> IndexTypes();

inline constexpr size_t kMaxPlugins = 16;
// Makes the types of plug-ins known to this process, in the place of those before. A client knows
// none: it reads plug-ins' indexes by RPCs.
//
// REQUIRES: at most kMaxPlugins types, each of an own name, that stay; no other thread and no store
// uses index types.
void SetPluginTypes(std::span<const IndexType* const> types);

// Return null when there is no such type.
const IndexType* FindIndexType(const IndexDescriptor& index);
const IndexType* FindIndexType(std::string_view name);

// REQUIRES: the type exists, as it does after CheckIndex.
const IndexType& TypeOf(const IndexDescriptor& index);

// Returns whether the index exists and is built: it has codebooks and index data.
bool IsBuilt(const IndexDescriptor& index);
// Returns whether the index needs a build, as far as this process knows: that of a plug-in does.
bool NeedsBuild(const IndexDescriptor& index);
// REQUIRES: IsBuilt.
const BuiltIndexType& BuiltTypeOf(const IndexDescriptor& index);

// Returns why an index that is not built has no build, behind the type's name.
std::string_view WhyNotBuilt(const IndexType& type);

// Returns the index with the default of every parameter.
IndexDescriptor DefaultIndex(const IndexType& type);

// A parameter by name, as users write it.
struct IndexArgument {
  std::string_view name;
  std::optional<std::string_view> value_name;  // one of IndexParameter::names; none: `number`
  uint64_t number = 0;
};

// Makes an index of a type by name; parameters without an argument have their defaults. A parameter
// may also be named by its number: "#0" is the first. Clients name those of plug-ins so; numbers
// beyond the last parameter may be 0.
//
// Errors: kInvalidArgument (`field`.type: no such type; `field`.parameters[name]: no such
// parameter, a value that its description does not allow, or given twice)
Refusal MakeIndex(std::string_view type, std::span<const IndexArgument> arguments,
                  std::string_view field, IndexDescriptor* index);

// Returns a name for messages, such as "flat" or "pq m=2 b=6".
std::string NameOf(const IndexDescriptor& index);

// Checks that an index fits keys of `key_dim` numbers. Allocates nothing when it does. Errors:
// kInvalidArgument naming the parameter in `field`.
Refusal CheckIndex(const IndexDescriptor& index, uint32_t key_dim, const char* field);

// Returns whether every parameter has a value that its description allows; the first part of
// CheckIndex.
bool HasAllowedValues(const IndexType& type, const IndexDescriptor& index);

// Returns whether the description of a parameter allows a value.
bool Allows(const IndexParameter& parameter, uint32_t value);
// Returns the allowed values behind "must": "lie in [4, 8]", "be 1, 2 or 4".
std::string ValuesOf(const IndexParameter& parameter);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_INDEX_TYPES_H_
