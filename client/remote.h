// Remote is what libpqcached_client asks of libpqcached_rpc: the sidecar's calls, their arguments
// checked already.
//
// The two libraries are bound apart (rpc_library.h) and may even have different allocators. So no
// memory changes its owner here, no type of the standard library crosses, nothing throws, and what
// a call writes goes into the caller's memory. Both sides must have the same kRemoteVersion; it
// grows with every change of this file.
//
// A Remote is thread-safe, but for Close.
#ifndef PQCACHED_CLIENT_REMOTE_H_
#define PQCACHED_CLIENT_REMOTE_H_

#include <cstddef>
#include <cstdint>

#include "pqcached/client.h"

namespace pqcached::client {

inline constexpr uint32_t kRemoteVersion = 6;
inline constexpr uint32_t kMaxBatchItems = 256;
inline constexpr char kRpcEntrySymbol[] = "pqcached_rpc_entry";

// Why a call failed, in memory of fixed size; the counterpart of kvstore::Refusal. Longer texts and
// paths are cut.
struct RefusalBuffer {
  char text[1024] = {};   // the value and the limit, without the field
  char field[256] = {};   // path of the refused field, "" = none
  uint32_t retry_ms = 0;  // when a repetition may succeed, 0 = never
};

// Where packed elements lie in the session's staging ring.
struct StagingPlace {
  uint32_t slot = 0;
  uint64_t offset_bytes = 0;  // in the slot
  uint64_t size_bytes = 0;
  uint64_t generation = 0;
  uint64_t boot_word = 0;  // of the worker that made the ring: no other one takes the place
};

// Borrowed elements; every element lies inside what the caller owns.
struct TensorView {
  const std::byte* data = nullptr;
  pqc_dtype dtype = PQC_F32;
  uint32_t ndim = 0;
  uint64_t shape[4] = {};
  int64_t strides[4] = {};  // in elements, always filled
  // Rows of a paged engine: index i of the first dimension is index i % block_tokens of block
  // blocks[i / block_tokens], and blocks are block_stride elements apart. Null = not paged.
  const uint32_t* blocks = nullptr;
  uint32_t block_tokens = 0;
  int64_t block_stride = 0;
  const StagingPlace* staging = nullptr;  // instead of `data`, when not null; then packed
};

// Of one stored layer, as its cache was opened.
struct LayerShape {
  uint32_t kv_heads = 0;
  uint32_t query_heads = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  pqc_dtype dtype = PQC_F32;
  float scale = 1;  // of logits
  float softcap = 0;
};

// K [tokens, kv_heads, key_dim] and V [tokens, kv_heads, value_dim] of one layer; tokens >= 1.
struct RowBlock {
  uint32_t layer = 0;
  TensorView keys;
  TensorView values;
};

struct QueryView {
  uint64_t sequence_id = 0;
  uint32_t layer = 0;
  uint64_t query_position = 0;
  TensorView queries;  // [query_length, query_heads, key_dim]
  LayerShape shape;
};

// Which rows to fetch, of which part.
struct FetchView {
  uint64_t sequence_id = 0;
  uint32_t layer = 0;
  LayerShape shape;
  pqc_row_part part = PQC_ROW;
};

struct PositionsView {
  const uint32_t* positions = nullptr;  // [kv_heads, count]
  uint32_t count = 0;
};

struct ScoresOut {
  float* logits = nullptr;   // [query_heads, tokens], or null
  float* max = nullptr;      // [query_heads], or null
  float* sum_exp = nullptr;  // [query_heads], or null
};

// One of the batch that TopK answers. Fills *out, but out->positions only when it is not null.
struct SelectItem {
  QueryView query;
  const pqc_selection* selection = nullptr;
  pqc_positions* out = nullptr;
};

// One of the batch that Attend answers. Exactly one of `selection` and `positions`; out->output and
// out->lse have room.
struct AttendItem {
  QueryView query;
  const pqc_selection* selection = nullptr;
  const PositionsView* positions = nullptr;
  pqc_attention* out = nullptr;
};

// A lease that the caller has; lease_id 0 = none.
struct LeaseView {
  uint64_t lease_id = 0;
  uint64_t known_version = 0;  // the oldest attachment that is still in use: older ones are let go
  uint64_t boot_word = 0;      // of the worker that gave the lease: no other one takes it
};

// Gets an attachment that came with an answer, at most once; `write` null = not wanted.
struct ImageSink {
  void* context = nullptr;
  void (*write)(void* context, uint64_t version, const std::byte* image, size_t size) = nullptr;
};

// New rows of one sequence: every stored layer once.
struct AppendItem {
  uint64_t sequence_id = 0;
  uint64_t first_position = 0;
  const RowBlock* rows = nullptr;
  uint32_t row_block_count = 0;
  LeaseView lease;
  ImageSink image;
  uint64_t token_count = 0;  // out
};

// Rows out of staging, part by part, while earlier parts are being copied.
struct StagedRows {
  enum class Next : uint32_t { kPart = 0, kEnd = 1, kGiveUp = 2 };
  // What `next` asks when it has to wait: whether the call still goes on.
  struct Probe {
    void* context = nullptr;
    bool (*stands)(void* context) = nullptr;
  };
  void* context = nullptr;
  // Fills in the next part, which is in use until the next call of it. kGiveUp: nothing is stored.
  Next (*next)(void* context, const Probe& probe, uint64_t* first_position,
               RowBlock* rows) = nullptr;
  uint64_t boot_word = 0;  // of the worker whose staging it is
};

// Whether a call of the C ABI waits for the answer: counted apart.
enum class Waiting : uint32_t { kCaller = 0, kNobody = 1 };

// Gets a text of any length, in one call.
struct TextSink {
  void* context = nullptr;
  void (*write)(void* context, const char* text, size_t size) = nullptr;
};

// Every call ends within what is left of the caller's time (RemoteOptions), but BuildIndex, which has its
// own. Errors are the sidecar's (pqc_status has gRPC's codes), and PQC_UNAVAILABLE when it cannot be
// reached, or when the worker that the arguments are of is another one by now. A session outlives
// workers; PQC_UNAVAILABLE for ever once it is lost.
class Remote {
 public:
  // Ends the session and deletes the object. No other call may be under way.
  virtual void Close() noexcept = 0;

  virtual pqc_status OpenCache(const pqc_cache_spec& spec, uint64_t* cache_id,
                               RefusalBuffer* error) noexcept = 0;
  // options: checked, all its fields.
  virtual pqc_status CreateSequence(uint64_t cache_id, const char* model_fingerprint,
                                    const pqc_sequence_options& options, uint64_t* sequence_id,
                                    uint64_t* token_count, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status ForkSequence(uint64_t sequence_id, uint64_t token_count, uint64_t* child_id,
                                  uint64_t* child_token_count, RefusalBuffer* error) noexcept = 0;
  // Of `prompt`, token_ids and extra_key alone.
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
                                      Waiting waiting, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status DescribeSequence(uint64_t sequence_id, pqc_sequence_info* info,
                                      RefusalBuffer* error) noexcept = 0;

  virtual pqc_status Ingest(uint64_t sequence_id, uint64_t first_position, const RowBlock& rows,
                            RefusalBuffer* error) noexcept = 0;
  // All or nothing. The control memory tells when the sidecar is done with a slot. PQC_CANCELLED when
  // `rows` gave up. Not repeated after PQC_UNAVAILABLE.
  virtual pqc_status IngestStaged(uint64_t sequence_id, const StagedRows& rows,
                                  RefusalBuffer* error) noexcept = 0;
  // rows: by staging reference, each layer at most once. All or nothing.
  virtual pqc_status Commit(uint64_t sequence_id, uint64_t first_position, const RowBlock* rows,
                            uint32_t row_block_count, uint64_t* token_count,
                            RefusalBuffer* error) noexcept = 0;
  // At most kMaxBatchItems. When an item fails, the message begins with "items[i]" and the items
  // before it are stored. With rows by staging reference it is not repeated after UNAVAILABLE.
  virtual pqc_status Append(AppendItem* items, uint32_t item_count, Waiting waiting,
                            RefusalBuffer* error) noexcept = 0;
  // Calls options.callback on the calling thread.
  virtual pqc_status BuildIndex(uint64_t sequence_id, const pqc_build_options& options,
                                RefusalBuffer* error) noexcept = 0;

  // Too small a capacity of an item's output is PQC_OUT_OF_RANGE with the counts of all items filled.
  virtual pqc_status TopK(const SelectItem* items, uint32_t item_count,
                          RefusalBuffer* error) noexcept = 0;
  virtual pqc_status Score(const QueryView& query, const pqc_index& index, pqc_token_range tokens,
                           const ScoresOut& out, RefusalBuffer* error) noexcept = 0;
  // `out` has room for [kv_heads, tokens, dim] elements of the cache's dtype.
  virtual pqc_status FetchRange(const FetchView& fetch, pqc_token_range tokens, std::byte* out,
                                RefusalBuffer* error) noexcept = 0;
  virtual pqc_status FetchTokens(const FetchView& fetch, const PositionsView& positions,
                                 std::byte* out, RefusalBuffer* error) noexcept = 0;
  virtual pqc_status Attend(const AttendItem* items, uint32_t item_count,
                            RefusalBuffer* error) noexcept = 0;

  // Takes a lease, or refreshes the one given.
  virtual pqc_status Attach(uint64_t sequence_id, const LeaseView& lease, uint64_t* lease_id,
                            uint32_t* word_index, const ImageSink& image,
                            RefusalBuffer* error) noexcept = 0;
  virtual pqc_status Detach(const LeaseView& lease, RefusalBuffer* error) noexcept = 0;

  // RPCs sent so far, repeats included.
  virtual void Count(uint64_t* rpcs, uint64_t* background_rpcs) noexcept = 0;

  // Names are those of the proto; 64-bit integers are strings, as protobuf's JSON mapping has it.
  virtual pqc_status AdminJson(const char* method, const char* request, const TextSink& answer,
                               RefusalBuffer* error) noexcept = 0;

 protected:
  ~Remote() = default;
};

struct RemoteOptions {
  const char* endpoint = nullptr;
  const char* tenant = nullptr;
  const char* client_name = nullptr;
  uint32_t timeout_ms = 0;
  // What is left of the time of the call that the thread is in, of `timeout_ms`.
  uint32_t (*remaining_ms)(uint32_t timeout_ms) = nullptr;
  // A session that the broker opened; null = one by a Session stream. `ended` waits until it is over for
  // ever or the time is over, and says whether it is; `detached` until it has no worker, as far as is
  // known. They are called from any thread.
  const char* session_token = nullptr;
  const char* boot_id = nullptr;
  uint64_t max_message_bytes = 0;
  void* ended_context = nullptr;
  bool (*ended)(void* context, uint32_t wait_ms) = nullptr;
  bool (*detached)(void* context, uint32_t wait_ms) = nullptr;
};

// What libpqcached_rpc's one exported function, `const RpcEntry* pqcached_rpc_entry()`, returns.
struct RpcEntry {
  uint32_t remote_version = 0;
  // Connects and opens a session.
  pqc_status (*open)(const RemoteOptions& options, Remote** remote, RefusalBuffer* error) = nullptr;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_REMOTE_H_
