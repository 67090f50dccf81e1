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

inline constexpr uint32_t kRemoteVersion = 1;
inline constexpr char kRpcEntrySymbol[] = "pqcached_rpc_entry";

// Why a call failed: the field and its limit. Cut when longer.
struct ErrorText {
  char text[1024] = {};
};

// Borrowed elements; every element lies inside what the caller owns.
struct TensorView {
  const std::byte* data = nullptr;
  pqc_dtype dtype = PQC_F32;
  uint32_t ndim = 0;
  uint64_t shape[4] = {};
  int64_t strides[4] = {};  // in elements, always filled
};

// Of one stored layer, as its cache was opened.
struct LayerShape {
  uint32_t kv_heads = 0;
  uint32_t query_heads = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  pqc_dtype dtype = PQC_F32;
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
  TensorView queries;  // [1, query_heads, key_dim]
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

// Gets a text of any length, in one call.
struct TextSink {
  void* context = nullptr;
  void (*write)(void* context, const char* text, size_t size) = nullptr;
};

// Every call ends within the client's timeout, but BuildIndex, which has its own. Errors are the
// sidecar's (pqc_status has gRPC's codes), and kUnavailable for ever once the session is lost.
class Remote {
 public:
  // Ends the session and deletes the object. No other call may be under way.
  virtual void Close() noexcept = 0;

  virtual pqc_status OpenCache(const pqc_cache_spec& spec, uint64_t* cache_id,
                               ErrorText* error) noexcept = 0;
  virtual pqc_status CreateSequence(uint64_t cache_id, const char* model_fingerprint,
                                    uint64_t* sequence_id, ErrorText* error) noexcept = 0;
  virtual pqc_status DropSequence(uint64_t sequence_id, ErrorText* error) noexcept = 0;
  virtual pqc_status TruncateSequence(uint64_t sequence_id, uint64_t token_count,
                                      ErrorText* error) noexcept = 0;
  virtual pqc_status DescribeSequence(uint64_t sequence_id, pqc_sequence_info* info,
                                      ErrorText* error) noexcept = 0;

  virtual pqc_status Ingest(uint64_t sequence_id, uint64_t first_position, const RowBlock& rows,
                            ErrorText* error) noexcept = 0;
  virtual pqc_status Append(uint64_t sequence_id, uint64_t first_position, const RowBlock* rows,
                            uint32_t row_block_count, uint64_t* token_count,
                            ErrorText* error) noexcept = 0;
  // Calls options.callback on the calling thread.
  virtual pqc_status BuildIndex(uint64_t sequence_id, const pqc_build_options& options,
                                ErrorText* error) noexcept = 0;

  // Fills *out, but out->positions only when it is not null; too small a capacity is
  // PQC_OUT_OF_RANGE with the counts filled.
  virtual pqc_status TopK(const QueryView& query, const pqc_selection& selection,
                          pqc_positions* out, ErrorText* error) noexcept = 0;
  virtual pqc_status Score(const QueryView& query, const pqc_index& index, pqc_token_range tokens,
                           const ScoresOut& out, ErrorText* error) noexcept = 0;
  // `out` has room for [kv_heads, tokens, dim] elements of the cache's dtype.
  virtual pqc_status FetchRange(const FetchView& fetch, pqc_token_range tokens, std::byte* out,
                                ErrorText* error) noexcept = 0;
  virtual pqc_status FetchTokens(const FetchView& fetch, const PositionsView& positions,
                                 std::byte* out, ErrorText* error) noexcept = 0;
  // Exactly one of `selection` and `positions`. out->output and out->lse have room.
  virtual pqc_status Attend(const QueryView& query, const pqc_selection* selection,
                            const PositionsView* positions, pqc_attention* out,
                            ErrorText* error) noexcept = 0;

  // Names are those of the proto; 64-bit integers are strings, as protobuf's JSON mapping has it.
  virtual pqc_status AdminJson(const char* method, const char* request, const TextSink& answer,
                               ErrorText* error) noexcept = 0;

 protected:
  ~Remote() = default;
};

struct RemoteOptions {
  const char* endpoint = nullptr;
  const char* tenant = nullptr;
  const char* client_name = nullptr;
  uint32_t timeout_ms = 0;
};

// What libpqcached_rpc's one exported function, `const RpcEntry* pqcached_rpc_entry()`, returns.
struct RpcEntry {
  uint32_t remote_version = 0;
  // Connects and opens a session.
  pqc_status (*open)(const RemoteOptions& options, Remote** remote, ErrorText* error) = nullptr;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_REMOTE_H_
