// Reads the arguments that callers pass to the C ABI: copies structs, which may be of an earlier,
// smaller version or of a later, larger one, checks them, and names the invalid field in the error.
// Checks that need the sidecar's state or limits (dims, budgets, ids, finite numbers) are left to
// the sidecar.
//
// Every function returns PQC_OK or the status that Fail returned. Pure but for the last error;
// thread-safe.
#ifndef PQCACHED_CLIENT_BASE_ARGUMENTS_H_
#define PQCACHED_CLIENT_BASE_ARGUMENTS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "client/base/error.h"
#include "client/base/remote.h"
#include "client/base/structs.h"
#include "kernels/base/status_macros.h"
#include "pqcached/client.h"

namespace pqcached::client {

using kvstore::kMaxQueryLength;
inline constexpr uint64_t kMaxSequenceTokens = kvstore::kMaxSequenceTokens;

// Returns the number in an enum field of the caller's, which may hold any value.
template <class Enum>
uint32_t RawEnum(const Enum& field) {
  static_assert(sizeof(Enum) == sizeof(uint32_t));
  uint32_t number;
  std::memcpy(&number, &field, sizeof(number));
  return number;
}

// Returns PQC_OK for a struct that was read, and the refusal of another one.
pqc_status ReportFit(StructFit fit, size_t size, size_t minimum_size, size_t known_size,
                     const char* name);

// Copies a caller's struct, by the rule of client.h (structs.h).
template <class Struct>
pqc_status ReadStruct(const Struct* from, const char* name, Struct* to) {
  *to = {};
  if (!from) return Fail(PQC_INVALID_ARGUMENT, name, "must not be NULL");
  return ReportFit(CopyStruct(from, SizeOf(from), to), SizeOf(from), kMinimumBytes<Struct>,
                   sizeof(Struct), name);
}

// Copies element `index` of a caller's array. Elements are read in order, so that the first one's
// size is checked before it is used.
template <class Struct>
pqc_status ReadElement(const Struct* array, uint32_t index, const char* name, Struct* to) {
  *to = {};
  if (!array) return Fail(PQC_INVALID_ARGUMENT, name, "must not be NULL");
  const Struct* element = ElementOf(array, index);
  if (SizeOf(element) != SizeOf(array)) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.struct_size", name),
                "%zu, must be that of the array's first element, %zu", SizeOf(element),
                SizeOf(array));
  }
  return ReadStruct(element, name, to);
}

// Checks the struct_size of a struct that is a member of another struct.
template <class Struct>
pqc_status CheckMemberSize(const Struct& member, const char* name) {
  if (member.struct_size == 0 || member.struct_size == sizeof(Struct)) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.struct_size", name), "%zu, must be %zu or 0",
              member.struct_size, sizeof(Struct));
}

// Device and stream on which a call accepts its tensors.
struct TensorPlace {
  pqc_device device = PQC_CPU;
  const void* stream = nullptr;  // the stream that tensors on a device may name
};
inline constexpr TensorPlace kOnHost = {};

pqc_status ReadTensor(const pqc_tensor& tensor, const char* name, TensorView* view,
                      const TensorPlace& place = kOnHost);
// Checks that a caller's buffer of `capacity` elements has room for `needed`.
pqc_status CheckCapacity(const char* name, uint64_t capacity, uint64_t needed);
pqc_status CheckIndex(const pqc_index& index, const char* name);
// Reads an index; PQC_INDEX_DEFAULT is `default_index`.
pqc_status ReadIndex(const pqc_index& index, const char* name,
                     const kvstore::IndexDescriptor& default_index, kvstore::IndexDescriptor* to);
// Converts an index of kind pq or plug-in that was checked.
kvstore::IndexDescriptor ToDescriptor(const pqc_index& index);
// Refuses an index of which a libpqcached_rpc of this version would leave a part out.
pqc_status CheckSendable(const kvstore::IndexDescriptor& index, const char* name,
                         uint32_t remote_version);
// Returns the struct of the C ABI for an index.
pqc_index ToIndex(const kvstore::IndexDescriptor& index);

// Reads a selection. The result refers to none of the caller's memory.
pqc_status ReadSelection(const pqc_selection* from, const kvstore::IndexDescriptor& default_index,
                         kvstore::Selection* to);

// Reads the K and V of one layer, [tokens, kv_heads, dim] each. Error texts put `name` before the
// fields' names.
pqc_status ReadRows(const pqc_tensor& keys, const pqc_tensor& values, const LayerShape& shape,
                    const char* name, RowBlock* rows, const TensorPlace& place = kOnHost);

// Checks that a sequence can hold rows at these positions.
pqc_status CheckPositions(uint64_t first_position, uint64_t token_count);

// Checks a range of tokens that may not be empty; the field is "tokens".
pqc_status CheckTokenRange(pqc_token_range tokens);

// Reads a tensor to which results are written: of this shape, of which the first dimension may be
// left out when it is 1.
pqc_status ReadTarget(const pqc_tensor& tensor, const char* name,
                      std::initializer_list<uint64_t> shape, TensorView* view,
                      const TensorPlace& place = kOnHost);
// `from`: a pqc_log_base as the caller passes it (RawEnum).
pqc_status ReadLogBase(uint32_t from, const char* name, kvstore::LogBase* to);
ptrdiff_t StrideBytes(const TensorView& view, uint32_t dim);

// The fields by which a caller says where an attention is written: those of pqc_attention and of
// pqc_step_attention.
struct AttentionOutFields {
  template <class Out>
  explicit AttentionOutFields(const Out& out)
      : output(out.output),
        output_capacity(out.output_capacity),
        lse(out.lse),
        lse_capacity(out.lse_capacity),
        output_tensor(out.output_tensor),
        lse_tensor(out.lse_tensor),
        lse_base(RawEnum(out.lse_base)) {}

  float* output;
  uint64_t output_capacity;
  float* lse;
  uint64_t lse_capacity;
  const pqc_tensor* output_tensor;
  const pqc_tensor* lse_tensor;
  uint32_t lse_base;  // a pqc_log_base, unchecked
};
// Reads the place of the attention of that many query tokens.
pqc_status ReadAttentionOut(const AttentionOutFields& fields, const LayerShape& shape,
                            uint64_t tokens, kvstore::AttentionOut* to);

// Reads the queries of one or more tokens as [query_length, query_heads, key_dim].
// `of_range`: of an attention over a range, whose queries may be longer.
pqc_status ReadQueries(const pqc_tensor& queries, const LayerShape& shape, TensorView* view,
                       bool of_range = false);
// Refuses (PQC_FAILED_PRECONDITION, `field`) a layer of values only, which queries cannot read.
pqc_status CheckHasKeys(const LayerShape& shape, const char* field);
pqc_status CheckQueryLength(uint64_t length, const LayerShape& shape, const char* name);

// Reads the options of a new sequence; token_ids, content_keys and extra_key still point to the
// caller's memory.
pqc_status ReadSequenceOptions(const pqc_sequence_options* from, pqc_sequence_options* to);
// Checks only token_ids, content_keys and extra_key; error texts put `prefix` before the fields'
// names.
pqc_status CheckPrompt(const pqc_sequence_options& prompt, const char* prefix);

// Reads and checks a prompt: its other fields must be 0.
pqc_status ReadPrompt(const pqc_sequence_options* from, pqc_sequence_options* to);

// Checked arguments of a cache to open. Neither copyable nor movable, because `spec` points into
// the object.
struct CacheArguments {
  CacheArguments() = default;
  CacheArguments(const CacheArguments&) = delete;
  CacheArguments& operator=(const CacheArguments&) = delete;

  pqc_cache_spec spec{};
  std::vector<pqc_layer_group> groups;
};
pqc_status ReadCacheSpec(const pqc_cache_spec* from, CacheArguments* to);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_ARGUMENTS_H_
