// Remote is the interface of libpqcached_rpc for libpqcached_client: the sidecar's calls, with
// arguments that are already checked.
//
// The two libraries are bound separately (abi/rpc_library.h) and may even have different
// allocators. So no memory changes its owner across this interface, it has no owning types of the
// standard library, it does not throw, and calls write their results into the caller's memory.
//
// The two may be of adjacent minor versions, so this interface only grows: functions are added at
// the end of Remote, with an increase of kRemoteVersion, and the client calls them only where the
// library's version has them. The structs below keep their layout (tests/client/base); a call that
// needs more gets a struct of its own, or a field where there was none, which libpqcached_rpc reads
// only of a client that has it (SetClientVersion). Structs of the C ABI are read by their
// struct_size.
//
// A Remote is thread-safe, but for Close.
#ifndef PQCACHED_CLIENT_BASE_REMOTE_H_
#define PQCACHED_CLIENT_BASE_REMOTE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/reader.h"
#include "kvstore/read/select/token_pages.h"
#include "kvstore/read/selection.h"
#include "pqcached/cache_events.h"
#include "pqcached/client.h"

namespace pqcached::client {

using kernels::DType;
using kvstore::LayerShape;
using kvstore::RowPart;
using kvstore::ScoresOut;

// 21 is the first that sends PQC_INDEX_CLUSTERS, tail_estimate and attention_mass; 22 that has TLS.
inline constexpr uint32_t kRemoteVersion = 22;
// The oldest version of the other library that this one works with.
inline constexpr uint32_t kOldestRemoteVersion = 10;
inline constexpr uint32_t kMaxBatchItems = 256;
inline constexpr char kRpcEntrySymbol[] = "pqcached_rpc_entry";

// Refusal in memory of fixed size, for calls between the libraries; the counterpart of
// kvstore::Refusal. Longer texts and paths are truncated.
struct RefusalBuffer {
  char text[1024] = {};   // the value and the limit, without the field
  char field[256] = {};   // path of the refused field, "" = none
  uint32_t retry_ms = 0;  // when a repetition may succeed, 0 = never
};

// Place of packed elements in the session's staging ring.
struct StagingPlace {
  uint32_t slot = 0;
  uint64_t offset_bytes = 0;  // in the slot
  uint64_t size_bytes = 0;
  uint64_t generation = 0;
  uint64_t boot_word = 0;  // of the worker that made the ring; other workers refuse the place
};

// Borrowed elements; every element lies inside what the caller owns.
struct TensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  uint32_t ndim = 0;
  uint64_t shape[4] = {};
  int64_t strides[4] = {};  // in elements, always filled
  // Block table of a paged engine: index i of the first dimension is index i % block_tokens of
  // block blocks[i / block_tokens], and blocks are block_stride elements apart. Null = not paged.
  const uint32_t* blocks = nullptr;
  uint32_t block_tokens = 0;
  int64_t block_stride = 0;
  uint64_t first_token = 0;  // added to the index
  // Slot mapping in place of `blocks`: index i is slot slots[i], of block slots[i] / block_tokens.
  const int64_t* slots = nullptr;
  bool paged() const { return blocks || slots; }
  // replaces `data` when not null; the tensor is then packed
  const StagingPlace* staging = nullptr;
};

// K [tokens, kv_heads, key_dim] and V [tokens, kv_heads, value_dim] of one layer; tokens >= 1.
struct RowBlock {
  uint32_t layer = 0;
  TensorView keys;
  TensorView values;
  // Names that the call records when it stores the rows; null = none. Ingest and Commit read them
  // from the first block.
  const pqc_row_options* names = nullptr;
};

// Returns the name of the first part of rows: "keys", or "values" where they have no keys.
inline const char* FirstPart(const RowBlock& rows) {
  return rows.keys.shape[2] > 0 ? "keys" : "values";
}

struct QueryView {
  uint64_t sequence_id = 0;
  uint32_t layer = 0;
  uint64_t query_position = 0;
  TensorView queries;  // [query_length, query_heads, key_dim]
  LayerShape shape;
};

// Layer and part of the rows to fetch.
struct FetchView {
  uint64_t sequence_id = 0;
  uint32_t layer = 0;
  LayerShape shape;
  RowPart part = RowPart::kRow;
};

// Queries of some tokens of one layer. Since version 19.
struct SampleBlock {
  uint32_t layer = 0;
  const uint64_t* positions = nullptr;  // [queries.shape[0]]
  TensorView queries;                   // [positions, query_heads, key_dim]
};

// Receives rows of all kv heads at consecutive positions of layers[layer]. `rows` [kv_heads], and
// the rows, stay until `take` returns. False ends the call.
struct RowRunSink {
  void* context = nullptr;
  bool (*take)(void* context, uint32_t layer, uint32_t first_position, uint32_t token_count,
               const std::byte* const* rows) = nullptr;
};

struct PositionsView {
  const uint32_t* positions = nullptr;  // [kv_heads, count]
  uint32_t count = 0;
};

// One item of a TopK batch. The call fills *out; out->positions only when it is not null.
struct TopKItem {
  QueryView query;
  const kvstore::Selection* selection = nullptr;
  pqc_positions* out = nullptr;
};

// One item of a TopPages batch. `out` has room for lists of `length` pages, which the caller has
// planned (kvstore::PlanPages). Since version 14.
struct TopPagesItem {
  QueryView query;
  const kvstore::Selection* selection = nullptr;
  kvstore::PageTerms terms;
  kvstore::PageLists out;
  uint32_t length = 0;
};

// One item of an Attend batch. Exactly one of `selection` and `positions` is set; `out` has room.
struct AttendItem {
  QueryView query;
  const kvstore::Selection* selection = nullptr;
  const PositionsView* positions = nullptr;
  kvstore::AttentionOut out;
  pqc_positions* selected = nullptr;  // out; positions only when selected->positions is not null
};

// One item of an AttendScored batch: `logits` has logits [query_length, query_heads, count] of the
// positions where other queries have keys; `out` has room. Since version 17.
struct ScoredItem {
  QueryView logits;
  PositionsView positions;
  kvstore::AttentionOut out;
};

// One item of an AttendRange batch: a query of any number of tokens, and the range, which may be
// empty; `out` has room.
struct AttendRangeItem {
  QueryView query;
  kvstore::TokenRange tokens;
  kvstore::AttentionOut out;
};

// Lease of the caller; lease_id 0 = none.
struct LeaseView {
  uint64_t lease_id = 0;
  uint64_t known_version = 0;  // the oldest attachment still in use; older ones are released
  uint64_t boot_word = 0;      // of the worker that granted the lease; other workers refuse it
};

// Receives an attachment that is part of an answer, at most once; null `write` = not wanted.
struct ImageSink {
  void* context = nullptr;
  void (*write)(void* context, uint64_t version, const std::byte* image, size_t size) = nullptr;
};

// New rows of one sequence: each stored layer exactly once.
struct AppendItem {
  uint64_t sequence_id = 0;
  uint64_t first_position = 0;
  const RowBlock* rows = nullptr;
  uint32_t row_block_count = 0;
  const pqc_row_options* names = nullptr;  // null = none
  LeaseView lease;
  ImageSink image;
  uint64_t token_count = 0;  // out
};

// Rows in staging, passed part by part, while the sidecar copies earlier parts.
struct StagedRows {
  enum class Next : uint32_t { kPart = 0, kEnd = 1, kGiveUp = 2 };
  // Lets `next` check, while it waits, that the call is still in progress.
  struct Probe {
    void* context = nullptr;
    bool (*in_progress)(void* context) = nullptr;
  };
  void* context = nullptr;
  // Fills in the next part, which must stay valid until the next invocation. After kGiveUp nothing
  // is stored.
  Next (*next)(void* context, const Probe& probe, uint64_t* first_position,
               RowBlock* rows) = nullptr;
  uint64_t boot_word = 0;                  // of the worker that made the staging ring
  const pqc_row_options* names = nullptr;  // null = none
};

// A fork that one call makes with others. Since version 11.
struct ForkItem {
  uint64_t parent_id = 0;
  uint64_t child_id = 0;           // out
  uint64_t child_token_count = 0;  // out
};

// Most pages with staging of one call, so that one RPC takes them all.
inline constexpr uint32_t kMaxStagedPages = 256;

// A page to store, with key and size within the limits. Since version 14.
struct PutPageItem {
  const void* key = nullptr;
  uint64_t key_bytes = 0;
  const void* data = nullptr;
  uint64_t data_bytes = 0;
  const StagingPlace* staging = nullptr;  // replaces `data` when not null
  uint32_t outcome = 0;                   // out: pqc_page_outcome; 0 = the call has failed before
};

// Memory for a page. Since version 14.
struct GetPageItem {
  const void* key = nullptr;
  uint64_t key_bytes = 0;
  void* data = nullptr;
  uint64_t capacity_bytes = 0;
  const StagingPlace* staging = nullptr;  // the content may be written there instead of to `data`
  uint64_t size_bytes = 0;  // out: 0 = no page has the key; nothing is written beyond the capacity
  bool answered = false;    // out
  bool is_staged = false;   // out: the content is in staging
};

// A key to look for. Since version 14.
struct FindPageItem {
  const void* key = nullptr;
  uint64_t key_bytes = 0;
  uint64_t size_bytes = 0;  // out: 0 = no page has the key
};

// Receives a text of any length, in one call.
struct TextSink {
  void* context = nullptr;
  void (*write)(void* context, const char* text, size_t size) = nullptr;
};

// Every call ends within the remaining time of the caller's call (RemoteOptions), except
// BuildIndex, which has its own timeout. Errors are the sidecar's (pqc_status has gRPC's codes);
// PQC_UNAVAILABLE when the sidecar cannot be reached, or when another worker has replaced the one
// that the arguments refer to. A session outlives workers; after the session is lost, every call
// returns PQC_UNAVAILABLE.
class Remote {
 public:
  // Ends the session and deletes the object. No other call may be in progress.
  virtual void Close() noexcept = 0;

  virtual pqc_status OpenCache(const pqc_cache_spec& spec, uint64_t* cache_id,
                               RefusalBuffer* error) noexcept = 0;
  // All fields of `options` are checked.
  virtual pqc_status CreateSequence(uint64_t cache_id, const char* model_fingerprint,
                                    const pqc_sequence_options& options, uint64_t* sequence_id,
                                    uint64_t* token_count, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status ForkSequence(uint64_t sequence_id, uint64_t token_count, uint64_t* child_id,
                                  uint64_t* child_token_count, RefusalBuffer* error) noexcept = 0;
  // Uses only token_ids, content_keys and extra_key of `prompt`.
  virtual pqc_status MatchPrefix(uint64_t cache_id, const pqc_sequence_options& prompt,
                                 uint64_t* token_count, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status Admit(uint64_t cache_id, uint64_t token_count, uint64_t output_token_count,
                           pqc_admission* admission, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status PinSequence(uint64_t sequence_id, uint64_t ttl_ms,
                                 RefusalBuffer* error) noexcept = 0;
  virtual pqc_status SuspendSequence(uint64_t sequence_id, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status ResumeSequence(uint64_t sequence_id, uint64_t* token_count,
                                    RefusalBuffer* error) noexcept = 0;
  virtual pqc_status DropSequence(uint64_t sequence_id, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status TruncateSequence(uint64_t sequence_id, uint64_t token_count,
                                      const LeaseView& lease, const ImageSink& image,
                                      RefusalBuffer* error) noexcept = 0;
  virtual pqc_status DescribeSequence(uint64_t sequence_id, pqc_sequence_info* info,
                                      RefusalBuffer* error) noexcept = 0;

  virtual pqc_status Ingest(uint64_t sequence_id, uint64_t first_position, const RowBlock& rows,
                            RefusalBuffer* error) noexcept = 0;
  // Stores all rows or none. The control memory reports when the sidecar is done with a slot.
  // Returns PQC_CANCELLED when `rows` gave up. Not repeated after PQC_UNAVAILABLE.
  virtual pqc_status IngestStaged(uint64_t sequence_id, const StagedRows& rows,
                                  RefusalBuffer* error) noexcept = 0;
  // Stores all rows or none. `rows` are staging references, each layer at most once.
  virtual pqc_status Commit(uint64_t sequence_id, uint64_t first_position, const RowBlock* rows,
                            uint32_t row_block_count, uint64_t* token_count,
                            RefusalBuffer* error) noexcept = 0;
  // Records names without rows.
  virtual pqc_status NameTokens(uint64_t sequence_id, const pqc_row_options& names,
                                RefusalBuffer* error) noexcept = 0;
  // Appends at most kMaxBatchItems items. When an item fails, the field begins with "items[i]"
  // and the items before it are stored. Calls with staging references are not repeated after
  // UNAVAILABLE.
  virtual pqc_status Append(AppendItem* items, uint32_t item_count,
                            RefusalBuffer* error) noexcept = 0;
  // Ends the prefill of a sequence with a live index; does not wait for the index.
  virtual pqc_status ClosePrefill(uint64_t sequence_id, RefusalBuffer* error) noexcept = 0;
  // Invokes options.callback on the calling thread.
  virtual pqc_status BuildIndex(uint64_t sequence_id, const pqc_build_options& options,
                                RefusalBuffer* error) noexcept = 0;

  // Returns PQC_OUT_OF_RANGE, with the counts of all items filled, when an item's output is too
  // small.
  virtual pqc_status TopK(const TopKItem* items, uint32_t item_count,
                          RefusalBuffer* error) noexcept = 0;
  virtual pqc_status Score(const QueryView& query, const kvstore::IndexDescriptor& index,
                           kvstore::TokenRange tokens, const ScoresOut& out,
                           RefusalBuffer* error) noexcept = 0;
  // `out` has room for [kv_heads, tokens, dim] elements of the cache's dtype.
  virtual pqc_status FetchBlocks(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* out,
                                 RefusalBuffer* error) noexcept = 0;
  virtual pqc_status FetchTokens(const FetchView& fetch, const PositionsView& positions,
                                 std::byte* out, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status Attend(const AttendItem* items, uint32_t item_count,
                            RefusalBuffer* error) noexcept = 0;
  // Splits queries so that requests and answers fit into messages.
  virtual pqc_status AttendRange(const AttendRangeItem* items, uint32_t item_count,
                                 RefusalBuffer* error) noexcept = 0;

  // Acquires a lease, or refreshes the given one.
  virtual pqc_status Attach(uint64_t sequence_id, const LeaseView& lease, uint64_t* lease_id,
                            uint32_t* word_index, const ImageSink& image,
                            RefusalBuffer* error) noexcept = 0;
  virtual pqc_status Detach(const LeaseView& lease, RefusalBuffer* error) noexcept = 0;

  // Returns the numbers of RPCs sent so far, repeats included: `rpcs` by threads inside a call of
  // the C ABI (RemoteOptions), which wait for the answer, and `background_rpcs` by other threads.
  virtual void Count(uint64_t* rpcs, uint64_t* background_rpcs) noexcept = 0;

  // Field names are the proto's; 64-bit integers are strings, as in protobuf's JSON mapping.
  virtual pqc_status AdminJson(const char* method, const char* request, const TextSink& answer,
                               RefusalBuffer* error) noexcept = 0;

  // Since version 11: forks whole sequences, and then drops others; the fields of errors begin with
  // "items[i]". Not repeated after UNAVAILABLE. PQC_UNIMPLEMENTED with an older sidecar.
  virtual pqc_status ForkSequences(ForkItem* items, uint32_t item_count,
                                   const uint64_t* dropped_ids, uint32_t dropped_count,
                                   RefusalBuffer* error) noexcept = 0;

  // Since version 12: Admit of a sequence that will have this index.
  virtual pqc_status AdmitIndexed(uint64_t cache_id, uint64_t token_count,
                                  uint64_t output_token_count, const pqc_index& index,
                                  pqc_admission* admission, RefusalBuffer* error) noexcept = 0;
  // Since version 12: computes the keys of a prompt, of which it reads the fields that MatchPrefix
  // uses. PQC_OUT_OF_RANGE, with *count set, when there is too little room; PQC_UNIMPLEMENTED with
  // an older sidecar.
  virtual pqc_status PrefixKeys(uint64_t cache_id, const pqc_sequence_options& prompt,
                                pqc_prefix_key* root, pqc_prefix_key* keys, uint64_t capacity,
                                uint64_t* count, RefusalBuffer* error) noexcept = 0;
  // Since version 12: begins to read the events of a cache after a position. No RPC. The remote
  // owns the state until EndWatch or Close.
  virtual pqc_status WatchEvents(uint64_t cache_id, uint64_t epoch, uint64_t number,
                                 uint64_t* watch_id, RefusalBuffer* error) noexcept = 0;
  // Since version 12: waits for events. For each watch one call at a time. *count is 0 when the
  // time is over.
  virtual pqc_status NextEvents(uint64_t watch_id, uint32_t timeout_ms, pqc_cache_event* out,
                                uint32_t capacity, uint32_t* count,
                                RefusalBuffer* error) noexcept = 0;
  // Since version 12. REQUIRES: NextEvents of this watch is not in progress.
  virtual void EndWatch(uint64_t watch_id) noexcept = 0;
  // Since version 13: finds a sequence of the cache, of any session of the tenant. *live_index is
  // of kind PQC_INDEX_DEFAULT where the sequence has no live index. PQC_UNIMPLEMENTED with an older
  // sidecar.
  virtual pqc_status FindSequence(uint64_t cache_id, uint64_t sequence_id, uint64_t* token_count,
                                  pqc_index* live_index, RefusalBuffer* error) noexcept = 0;
  // Since version 14: returns PQC_UNAVAILABLE at once while no worker is known to serve the
  // session; the connection to the next one is made in the background. No RPC.
  virtual pqc_status CheckConnected(RefusalBuffer* error) noexcept = 0;
  // Since version 14: selects pages, which are not padded. PQC_UNIMPLEMENTED with an older sidecar.
  virtual pqc_status TopPages(const TopPagesItem* items, uint32_t item_count,
                              RefusalBuffer* error) noexcept = 0;

  // Since version 14: page caches. The fields of errors are "pages[i]" and "keys[i]". Put and Get
  // split the items so that requests and answers fit into messages; after a failure the items say
  // what was done before. PQC_UNIMPLEMENTED with an older sidecar.
  virtual pqc_status OpenPageCache(const char* name, uint64_t capacity_bytes, uint64_t quota_bytes,
                                   uint64_t* cache_id, RefusalBuffer* error) noexcept = 0;
  // Items with staging are all of one worker, are not sent again after UNAVAILABLE, and are at most
  // kMaxStagedPages.
  virtual pqc_status PutPages(uint64_t cache_id, PutPageItem* items, uint32_t item_count,
                              RefusalBuffer* error) noexcept = 0;
  virtual pqc_status GetPages(uint64_t cache_id, GetPageItem* items, uint32_t item_count,
                              RefusalBuffer* error) noexcept = 0;
  virtual pqc_status FindPages(uint64_t cache_id, FindPageItem* items, uint32_t item_count,
                               uint64_t lease_ms, RefusalBuffer* error) noexcept = 0;
  // Since version 15: says kRemoteVersion of the client library, before any other call. Of a client
  // that does not, kvstore::Selection::rerank_factor is not read, because it has no such field; nor
  // is per_query_head of one before version 18, and tail_estimate of one before 21. No RPC.
  virtual void SetClientVersion(uint32_t version) noexcept = 0;
  // Since version 17: attends to positions by logits that the engine has computed. The fields of
  // errors begin with "items[i]". PQC_UNIMPLEMENTED with an older sidecar.
  virtual pqc_status AttendScored(const ScoredItem* items, uint32_t item_count,
                                  RefusalBuffer* error) noexcept = 0;
  // Since version 17: FetchBlocks, whose rows have to be stored at the same time as those of an
  // earlier call that has set *rows_epoch (PQC_ABORTED); 0 = the first call. *rows_epoch stays 0
  // with an older sidecar, with which nothing is checked.
  virtual pqc_status FetchRows(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* out,
                               uint64_t* rows_epoch, RefusalBuffer* error) noexcept = 0;
  // Since version 18: gives the rows of a range of several layers while more are received: layer by
  // layer, and in each from the range's end to its begin. *rows_epoch is that of FetchRows. PQC_OK
  // when the sink has ended the call.
  virtual pqc_status ReadRows(const FetchView* layers, uint32_t layer_count,
                              kvstore::TokenRange tokens, const RowRunSink& sink,
                              uint64_t* rows_epoch, RefusalBuffer* error) noexcept = 0;
  // Since version 18, which sends indexes of kind PQC_INDEX_PLUGIN: makes an index of a type that
  // the sidecar describes. The parameters are checked structs of this version.
  virtual pqc_status MakeIndex(const char* type, const pqc_index_parameter* parameters,
                               uint32_t parameter_count, pqc_index* index,
                               RefusalBuffer* error) noexcept = 0;
  // Since version 19, which sends indexes of layout PQC_SUBSPACES_WEIGHTED: adds query samples, all
  // or none. PQC_UNIMPLEMENTED with an older sidecar.
  virtual pqc_status AddSamples(uint64_t sequence_id, const SampleBlock* samples,
                                uint32_t sample_count, RefusalBuffer* error) noexcept = 0;

 protected:
  ~Remote() = default;
};

// Receives layer groups, one by one; a group and its layers stay until `add` returns.
struct GroupSink {
  void* context = nullptr;
  void (*add)(void* context, const pqc_layer_group& group) = nullptr;
};

struct RemoteOptions {
  const char* endpoint = nullptr;
  const char* tenant = nullptr;
  const char* client_name = nullptr;
  uint32_t timeout_ms = 0;
  bool admin = false;  // the endpoint is an admin socket, which has no sessions
  // Returns the remaining part of `timeout_ms` for the call that the thread is in.
  uint32_t (*remaining_ms)(uint32_t timeout_ms) = nullptr;
  // Returns whether the thread is inside a call of the C ABI; null = always.
  bool (*in_call)() = nullptr;
  // Token of a session that the broker opened; null = open one by a Session stream. `ended` waits
  // until the session is over for good or the time is over, and returns true if it is over;
  // `detached` waits until the session is known to have no worker. Both are called from any thread.
  const char* session_token = nullptr;
  const char* boot_id = nullptr;
  uint64_t max_message_bytes = 0;
  void* ended_context = nullptr;
  bool (*ended)(void* context, uint32_t wait_ms) = nullptr;
  bool (*detached)(void* context, uint32_t wait_ms) = nullptr;
};

// Security of a connection over TCP, as in pqc_client_options.
struct SecurityOptions {
  const char* tls_ca = nullptr;  // null: the connection is plain, and the rest is not read
  const char* tls_certificate = nullptr;
  const char* tls_key = nullptr;
  const char* tls_server_name = nullptr;
  const char* token_file = nullptr;
};

// Return type of libpqcached_rpc's only exported function, `const RpcEntry* pqcached_rpc_entry()`.
struct RpcEntry {
  uint32_t remote_version = 0;
  // Connects and opens a session.
  pqc_status (*open)(const RemoteOptions& options, Remote** remote, RefusalBuffer* error) = nullptr;
  // Since version 10: the oldest version of a client library that this library works with.
  uint32_t oldest_client_version = 0;
  // Since version 16: reads the layer groups of a model from its config.json. No session is needed.
  pqc_status (*read_model_config)(const char* config_json, const GroupSink& sink,
                                  RefusalBuffer* error) noexcept = nullptr;
  // Since version 22: `open` with TLS.
  pqc_status (*open_secured)(const RemoteOptions& options, const SecurityOptions& security,
                             Remote** remote, RefusalBuffer* error) = nullptr;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_REMOTE_H_
