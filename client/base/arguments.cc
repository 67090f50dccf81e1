#include "client/base/arguments.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>

#include "client/base/descriptor_words.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kMaxLayerGroups = 16;
constexpr uint64_t kMaxContentKeys = uint64_t{1} << 15;
constexpr uint64_t kMaxExtraKeyBytes = 256;
constexpr uint64_t kMaxGroupKeyBytes = 64;
using kvstore::kMaxExcludedRanges;
using kvstore::kMaxLayers;

pqc_status Unimplemented(const char* name, const char* field) {
  return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.%s", name, field),
              "not supported in this version; must be zero");
}

pqc_status CheckGroup(const pqc_layer_group& group, const char* name) {
  const uint32_t kind = RawEnum(group.kind);
  if (kind < PQC_LAYERS_SELECTED || kind > PQC_LAYERS_VALUES) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.kind", name),
                "%u, must be a pqc_layer_kind", kind);
  }
  if (kind == PQC_LAYERS_VALUES && group.key_dim) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.key_dim", name),
                "%u, must be 0 for PQC_LAYERS_VALUES", group.key_dim);
  }
  if (group.values_alias_keys) return Unimplemented(name, "values_alias_keys");
  if (kind != PQC_LAYERS_WINDOW && group.window_tokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.window_tokens", name),
                "%u, must be 0: only for PQC_LAYERS_WINDOW", group.window_tokens);
  }
  if (kind == PQC_LAYERS_WINDOW &&
      (group.window_tokens < 1 || group.window_tokens > kMaxSequenceTokens)) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.window_tokens", name),
                "%u, must be 1 to 2^30 for PQC_LAYERS_WINDOW", group.window_tokens);
  }
  if (const uint32_t layout = RawEnum(group.rope_layout); layout > PQC_ROPE_INTERLEAVED) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.rope_layout", name), "%u is unknown",
                layout);
  }
  if (group.layer_count < 1 || group.layer_count > kMaxLayers) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.layer_count", name), "%u, must be 1 to %u",
                group.layer_count, kMaxLayers);
  }
  if (!group.layers)
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.layers", name), "must not be NULL");
  if (kind == PQC_LAYERS_NONE) return PQC_OK;
  const uint32_t dtype = RawEnum(group.dtype);
  if (dtype < PQC_F16 || dtype > PQC_F32) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.dtype", name),
                "%u, must be PQC_F16, PQC_BF16 or PQC_F32", dtype);
  }
  return PQC_OK;
}

pqc_status CheckRank(const pqc_cache_spec& spec) {
  if (spec.rank_group) return PQC_OK;
  const char* field = spec.rank            ? "rank"
                      : spec.rank_count    ? "rank_count"
                      : spec.kv_head_begin ? "kv_head_begin"
                      : spec.layer_begin   ? "layer_begin"
                                           : nullptr;
  if (!field) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("spec.%s", field),
              "must be 0 without spec.rank_group");
}

// Reads a number of tokens or a position.
pqc_status ReadTokens(uint64_t tokens, const FieldPath& field, uint32_t* to) {
  *to = static_cast<uint32_t>(tokens);
  if (tokens <= kMaxSequenceTokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, field, "%llu, must be at most %llu",
              static_cast<unsigned long long>(tokens),
              static_cast<unsigned long long>(kMaxSequenceTokens));
}

pqc_status ReadMass(const pqc_selection& selection, kvstore::Selection* to) {
  if (selection.token_count) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.token_count",
                "must be 0 with PQC_BUDGET_MASS, which has least_tokens and most_tokens");
  }
  if (!(selection.attention_mass > 0 && selection.attention_mass <= 1)) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.attention_mass", "%g, must lie in (0, 1]",
                selection.attention_mass);
  }
  kvstore::Selection::MassBounds bounds;
  RETURN_IF_ERROR(ReadTokens(selection.least_tokens, "selection.least_tokens", &bounds.least));
  RETURN_IF_ERROR(ReadTokens(selection.most_tokens, "selection.most_tokens", &bounds.most));
  to->budget_kind = kvstore::BudgetKind::kMass;
  to->budget_count = kvstore::Selection::CountOf(bounds);
  to->budget_ratio = selection.attention_mass;
  return PQC_OK;
}

pqc_status ReadBudget(const pqc_selection& selection, kvstore::Selection* to) {
  const uint32_t budget = RawEnum(selection.budget);
  if (budget > PQC_BUDGET_RETRIEVED) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.budget", "%u is unknown", budget);
  }
  if (budget == PQC_BUDGET_MASS) return ReadMass(selection, to);
  if (selection.attention_mass != 0 || selection.least_tokens || selection.most_tokens) {
    const char* const field = selection.attention_mass != 0 ? "selection.attention_mass"
                              : selection.least_tokens      ? "selection.least_tokens"
                                                            : "selection.most_tokens";
    return Fail(PQC_INVALID_ARGUMENT, field, "only with PQC_BUDGET_MASS; must be 0");
  }
  to->budget_kind = budget == PQC_BUDGET_COUNT       ? kvstore::BudgetKind::kCount
                    : budget == PQC_BUDGET_RETRIEVED ? kvstore::BudgetKind::kRetrieved
                                                     : kvstore::BudgetKind::kRatio;
  to->budget_count = selection.token_count;
  to->budget_ratio = selection.ratio;
  return PQC_OK;
}

pqc_status ReadExcluded(const pqc_selection& selection, kvstore::Selection* to) {
  if (selection.excluded_count > kMaxExcludedRanges) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.excluded_count", "%u, must be at most %u",
                selection.excluded_count, kMaxExcludedRanges);
  }
  if (selection.excluded_count && !selection.excluded) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.excluded", "must not be NULL");
  }
  for (uint32_t i = 0; i < selection.excluded_count; ++i) {
    kvstore::PositionRange range;
    RETURN_IF_ERROR(ReadTokens(selection.excluded[i].begin,
                               FieldPath::Of("selection.excluded[%u].begin", i), &range.begin));
    RETURN_IF_ERROR(ReadTokens(selection.excluded[i].end,
                               FieldPath::Of("selection.excluded[%u].end", i), &range.end));
    to->excluded.push_back(range);
  }
  return PQC_OK;
}

}  // namespace

pqc_status ReportFit(StructFit fit, size_t size, size_t minimum_size, size_t known_size,
                     const char* name) {
  switch (fit) {
    case StructFit::kKnown:
      return PQC_OK;
    case StructFit::kWrongSize:
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.struct_size", name),
                  "%zu, must be %zu to %zu: set it with PQC_INIT", size, minimum_size,
                  kMaxStructBytes);
    case StructFit::kUnknownField:
      break;
  }
  return Fail(PQC_UNIMPLEMENTED, name,
              "bytes %zu to %zu belong to a field that this version does not know; must be zero",
              known_size, size);
}

pqc_status CheckCapacity(const char* name, uint64_t capacity, uint64_t needed) {
  if (capacity >= needed) return PQC_OK;
  return Fail(PQC_OUT_OF_RANGE, name, "%llu, but %llu are needed",
              static_cast<unsigned long long>(capacity), static_cast<unsigned long long>(needed));
}

namespace {

// Returns whether a descriptor is one that pqc_index_make writes for a kind.
bool IsMade(const kvstore::IndexDescriptor& index, kvstore::IndexKind kind) {
  const kvstore::IndexType* const type = kvstore::FindIndexType(index);
  return index.kind == kind && kvstore::HasAllowedValues(*type, index);
}

// Checks the words that only indexes have which pqc_index_make or pqc_client_index_make has made.
pqc_status CheckDescriptorWords(const pqc_index& index, const char* name) {
  if (!HasDescriptorWords(index)) {
    for (size_t word = 0; word < std::size(index.reserved); ++word) {
      if (word != PQC_INDEX_LAYOUT && index.reserved[word]) return Unimplemented(name, "reserved");
    }
    return PQC_OK;
  }
  const kvstore::IndexDescriptor descriptor = WordsDescriptorOf(index);
  const char* const makers =
      "must be those that pqc_index_make or pqc_client_index_make has written";
  const FieldPath field = FieldPath::Of("%s.reserved", name);
  if (index.kind != PQC_INDEX_PLUGIN) {
    const bool is_made =
        IsMade(descriptor, index.kind == PQC_INDEX_GRAPH ? kvstore::IndexKind::kGraph
                                                         : kvstore::IndexKind::kClusters);
    return is_made ? PQC_OK : Fail(PQC_INVALID_ARGUMENT, field, "%s", makers);
  }
  const std::string plugin = kvstore::PluginNameOf(descriptor);
  if (kvstore::IsPluginName(plugin) &&
      kvstore::IsSamePlugin(descriptor, kvstore::PluginIndexOf(plugin))) {
    return PQC_OK;
  }
  return Fail(PQC_INVALID_ARGUMENT, field, "%s", makers);
}

}  // namespace

pqc_status CheckIndex(const pqc_index& index, const char* name) {
  RETURN_IF_ERROR(CheckMemberSize(index, name));
  const uint32_t kind = RawEnum(index.kind);
  if (kind > PQC_INDEX_CLUSTERS) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.kind", name),
                "%u, must be PQC_INDEX_DEFAULT, PQC_INDEX_PQ, PQC_INDEX_FLAT, PQC_INDEX_PLUGIN, "
                "PQC_INDEX_GRAPH or PQC_INDEX_CLUSTERS",
                kind);
  }
  RETURN_IF_ERROR(CheckDescriptorWords(index, name));
  const uint32_t layout = index.reserved[PQC_INDEX_LAYOUT];
  if (kind != PQC_INDEX_PQ && (index.subspaces || index.bits || layout)) {
    const char* const field = index.subspaces ? "subspaces" : index.bits ? "bits" : "layout";
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.%s", name, field), "only for PQC_INDEX_PQ");
  }
  if (layout > PQC_SUBSPACES_WEIGHTED) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.layout", name),
                "%u, must be PQC_SUBSPACES_PAIRS, PQC_SUBSPACES_CONTIGUOUS or "
                "PQC_SUBSPACES_WEIGHTED",
                layout);
  }
  return PQC_OK;
}

kvstore::IndexDescriptor ToDescriptor(const pqc_index& index) {
  if (HasDescriptorWords(index)) return WordsDescriptorOf(index);
  return {kvstore::IndexKind::kPq, index.subspaces, index.bits,
          static_cast<kvstore::SubspaceLayout>(index.reserved[PQC_INDEX_LAYOUT])};
}

pqc_status ReadIndex(const pqc_index& index, const char* name,
                     const kvstore::IndexDescriptor& default_index, kvstore::IndexDescriptor* to) {
  RETURN_IF_ERROR(CheckIndex(index, name));
  switch (index.kind) {
    case PQC_INDEX_DEFAULT:
      *to = default_index;
      break;
    case PQC_INDEX_PQ:
    case PQC_INDEX_PLUGIN:
    case PQC_INDEX_GRAPH:
    case PQC_INDEX_CLUSTERS:
      *to = ToDescriptor(index);
      break;
    case PQC_INDEX_FLAT:
      *to = {};
      break;
  }
  return PQC_OK;
}

pqc_status CheckSendable(const kvstore::IndexDescriptor& index, const char* name,
                         uint32_t remote_version) {
  constexpr uint32_t kLayoutVersion = 16;  // of Remote: the first that sends a layout
  constexpr uint32_t kWeightedVersion = 19;
  constexpr uint32_t kPluginsVersion = 18;
  constexpr uint32_t kGraphVersion = 20;
  constexpr uint32_t kClustersVersion = 21;
  if (kvstore::IsPlugin(index)) {
    if (remote_version >= kPluginsVersion) return PQC_OK;
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.kind", name),
                "libpqcached_rpc is older than indexes of plug-ins; install the library of the "
                "client's release");
  }
  if (HasDescriptorWords(index)) {
    const bool is_graph = index.kind == kvstore::IndexKind::kGraph;
    if (remote_version >= (is_graph ? kGraphVersion : kClustersVersion)) return PQC_OK;
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.kind", name),
                "libpqcached_rpc is older than indexes of type %s; install the library of the "
                "client's release",
                is_graph ? "graph" : "clusters");
  }
  const uint32_t wanted = index.layout == kvstore::SubspaceLayout::kPairs        ? 0
                          : index.layout == kvstore::SubspaceLayout::kContiguous ? kLayoutVersion
                                                                                 : kWeightedVersion;
  if (remote_version >= wanted) return PQC_OK;
  return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("%s.layout", name),
              "libpqcached_rpc is older than this layout of sub-spaces; install the library of the "
              "client's release");
}

pqc_index ToIndex(const kvstore::IndexDescriptor& index) {
  pqc_index to = PQC_INIT(pqc_index);
  if (HasDescriptorWords(index)) {
    SetDescriptorWords(index, &to);
    return to;
  }
  const bool is_pq = index.kind == kvstore::IndexKind::kPq;
  to.kind = is_pq ? PQC_INDEX_PQ : PQC_INDEX_FLAT;
  to.subspaces = is_pq ? index.subspace_count : 0;
  to.bits = is_pq ? index.bits : 0;
  to.reserved[PQC_INDEX_LAYOUT] = static_cast<uint32_t>(index.layout);
  return to;
}

pqc_status ReadSelection(const pqc_selection* from, const kvstore::IndexDescriptor& default_index,
                         kvstore::Selection* to) {
  pqc_selection read;
  RETURN_IF_ERROR(ReadStruct(from, "selection", &read));
  *to = {};
  RETURN_IF_ERROR(ReadIndex(read.index, "selection.index", default_index, &to->index));
  static_assert(static_cast<int>(kvstore::GroupRule::kSumSoftmax) == PQC_SUM_SOFTMAX + 1 &&
                static_cast<int>(kvstore::GroupRule::kMaxLogit) == PQC_MAX_LOGIT + 1);
  const uint32_t rule = RawEnum(read.group_rule);
  if (rule > PQC_PER_QUERY_HEAD) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.group_rule", "%u is unknown", rule);
  }
  to->per_query_head = rule == PQC_PER_QUERY_HEAD;
  if (!to->per_query_head) to->group_rule = static_cast<kvstore::GroupRule>(rule + 1);
  RETURN_IF_ERROR(ReadTokens(read.sink_tokens, "selection.sink_tokens", &to->sink_tokens));
  RETURN_IF_ERROR(ReadTokens(read.window_tokens, "selection.window_tokens", &to->window_tokens));
  RETURN_IF_ERROR(ReadBudget(read, to));
  if (read.rerank_factor != 0) {
    if (!kvstore::IsRerankFactor(read.rerank_factor)) {
      return Fail(PQC_INVALID_ARGUMENT, "selection.rerank_factor",
                  "%g, must be 0 or lie in [1, %g]", read.rerank_factor,
                  double{kvstore::kMaxRerankFactor});
    }
    to->rerank_factor = static_cast<float>(read.rerank_factor);
  }
  if (read.tail_estimate > 1) {
    return Fail(PQC_INVALID_ARGUMENT, "selection.tail_estimate", "%u, must be 0 or 1",
                read.tail_estimate);
  }
  if (read.reserved) return Unimplemented("selection", "reserved");
  to->tail_estimate = read.tail_estimate == 1;
  return ReadExcluded(read, to);
}

pqc_status CheckPositions(uint64_t first_position, uint64_t token_count) {
  if (first_position <= kMaxSequenceTokens && token_count <= kMaxSequenceTokens - first_position) {
    return PQC_OK;
  }
  return Fail(PQC_INVALID_ARGUMENT, "first_position",
              "%llu and %llu tokens, but a sequence has at most 2^30",
              static_cast<unsigned long long>(first_position),
              static_cast<unsigned long long>(token_count));
}

pqc_status CheckTokenRange(pqc_token_range tokens) {
  if (tokens.begin < tokens.end && tokens.end <= kMaxSequenceTokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "tokens", "[%llu, %llu), must not be empty nor go beyond 2^30",
              static_cast<unsigned long long>(tokens.begin),
              static_cast<unsigned long long>(tokens.end));
}

pqc_status CheckPrompt(const pqc_sequence_options& prompt, const char* prefix) {
  if (prompt.token_id_count > kMaxSequenceTokens) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%stoken_id_count", prefix),
                "%llu, must be at most 2^30",
                static_cast<unsigned long long>(prompt.token_id_count));
  }
  if (prompt.token_id_count && !prompt.token_ids) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%stoken_ids", prefix), "must not be NULL");
  }
  if (prompt.content_key_count > kMaxContentKeys) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%scontent_key_count", prefix),
                "%llu, must be at most %llu",
                static_cast<unsigned long long>(prompt.content_key_count),
                static_cast<unsigned long long>(kMaxContentKeys));
  }
  if (prompt.content_key_count && !prompt.content_keys) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%scontent_keys", prefix), "must not be NULL");
  }
  if (prompt.extra_key_bytes > kMaxExtraKeyBytes) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%sextra_key_bytes", prefix),
                "%llu, must be at most %llu",
                static_cast<unsigned long long>(prompt.extra_key_bytes),
                static_cast<unsigned long long>(kMaxExtraKeyBytes));
  }
  if (prompt.extra_key_bytes && !prompt.extra_key) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%sextra_key", prefix), "must not be NULL");
  }
  return PQC_OK;
}

pqc_status ReadPrompt(const pqc_sequence_options* from, pqc_sequence_options* to) {
  RETURN_IF_ERROR(ReadStruct(from, "prompt", to));
  if (to->has_live_index || to->group_key_bytes) {
    return Fail(PQC_INVALID_ARGUMENT,
                to->has_live_index ? "prompt.has_live_index" : "prompt.group_key_bytes",
                "must be 0: a prompt has names and an extra_key");
  }
  return CheckPrompt(*to, "prompt.");
}

pqc_status ReadSequenceOptions(const pqc_sequence_options* from, pqc_sequence_options* to) {
  RETURN_IF_ERROR(ReadStruct(from, "options", to));
  RETURN_IF_ERROR(CheckPrompt(*to, "options."));
  if (to->group_key_bytes > kMaxGroupKeyBytes) {
    return Fail(PQC_INVALID_ARGUMENT, "options.group_key_bytes", "%llu, must be at most %llu",
                static_cast<unsigned long long>(to->group_key_bytes),
                static_cast<unsigned long long>(kMaxGroupKeyBytes));
  }
  if (to->group_key_bytes && !to->group_key) {
    return Fail(PQC_INVALID_ARGUMENT, "options.group_key", "must not be NULL");
  }
  if (to->retain > 2) {
    return Fail(PQC_INVALID_ARGUMENT, "options.retain", "%llu, must be 0, 1 or 2",
                static_cast<unsigned long long>(to->retain));
  }
  if (to->has_live_index > 1) {
    return Fail(PQC_INVALID_ARGUMENT, "options.has_live_index", "%u, must be 0 or 1",
                to->has_live_index);
  }
  RETURN_IF_ERROR(CheckIndex(to->index, "options.index"));
  if (!to->has_live_index && (to->iterations || to->seed || to->train_tokens || to->sink_tokens ||
                              to->index.kind != PQC_INDEX_DEFAULT)) {
    return Fail(PQC_INVALID_ARGUMENT, "options.has_live_index",
                "0, but options of an incremental index are set");
  }
  return PQC_OK;
}

pqc_status ReadCacheSpec(const pqc_cache_spec* from, CacheArguments* to) {
  pqc_cache_spec& spec = to->spec;
  RETURN_IF_ERROR(ReadStruct(from, "spec", &spec));
  if (!spec.name) return Fail(PQC_INVALID_ARGUMENT, "spec.name", "must not be NULL");
  if (!spec.model_fingerprint) {
    return Fail(PQC_INVALID_ARGUMENT, "spec.model_fingerprint", "must not be NULL");
  }
  RETURN_IF_ERROR(CheckIndex(spec.default_index, "spec.default_index"));
  RETURN_IF_ERROR(CheckRank(spec));
  if (spec.prefill_measured > 1) {
    return Fail(PQC_INVALID_ARGUMENT, "spec.prefill_measured", "%u, must be 0 or 1",
                spec.prefill_measured);
  }
  if (spec.group_count < 1 || spec.group_count > kMaxLayerGroups) {
    return Fail(PQC_INVALID_ARGUMENT, "spec.group_count", "%u, must be 1 to %u", spec.group_count,
                kMaxLayerGroups);
  }
  if (!spec.groups) return Fail(PQC_INVALID_ARGUMENT, "spec.groups", "must not be NULL");
  to->groups.resize(spec.group_count);
  for (uint32_t i = 0; i < spec.group_count; ++i) {
    char name[32];
    std::snprintf(name, sizeof(name), "spec.groups[%u]", i);
    RETURN_IF_ERROR(ReadElement(spec.groups, i, name, &to->groups[i]));
    RETURN_IF_ERROR(CheckGroup(to->groups[i], name));
  }
  spec.groups = to->groups.data();
  return PQC_OK;
}

}  // namespace pqcached::client
