// The prompts of one model in the sidecar. Connects when it is used, and again after the sidecar
// has restarted.
//
// Not thread-safe.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_STORED_PROMPTS_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_STORED_PROMPTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "client/engines/llama/application/state.h"
#include "pqcached/client.h"

namespace pqcached::llama {

constexpr uint64_t kStepTokens = 128;  // in which the sidecar shares prompts

class StoredPrompts {
 public:
  struct Options {
    std::string endpoint;
    std::string tenant;  // "" is the client's default
    std::string name;    // of the cache
    std::string fingerprint;
    KvShape shape;
    pqc_dtype dtype = PQC_F16;
    uint32_t timeout_ms = 0;
    uint32_t thread_count = 0;
  };

  explicit StoredPrompts(Options options);
  ~StoredPrompts();
  StoredPrompts(const StoredPrompts&) = delete;
  StoredPrompts& operator=(const StoredPrompts&) = delete;

  // Sets *stored to how many of the tokens are stored.
  pqc_status Match(std::span<const uint32_t> tokens, uint64_t* stored);
  // A state and the places of its rows.
  struct Rows {
    std::span<std::byte> state;
    StateRows places;
  };
  // Stores the rows of all tokens, a multiple of kStepTokens, as far as they are not stored.
  // `state` gives the rows when they are needed, at most once.
  using GetRows = std::function<pqc_status(Rows* rows)>;
  pqc_status Save(std::span<const uint32_t> tokens, const GetRows& get_rows);
  // Loads the rows of the stored tokens at the beginning, at most `most` of them, and sets *loaded
  // to their number. `make_rows` gives room for them when there are any.
  using MakeRows = std::function<pqc_status(uint64_t count, Rows* rows)>;
  pqc_status Load(std::span<const uint32_t> tokens, uint64_t most, const MakeRows& make_rows,
                  uint64_t* loaded);

  // Describes the last failure of a request.
  const std::string& message() const { return message_; }

 private:
  // Runs a request with a connection, and once more when it was lost.
  pqc_status Repeat(const std::function<pqc_status()>& request);
  pqc_status Connect();
  void Disconnect();
  // Remembers the message of a failure, and returns the status.
  pqc_status Note(pqc_status status);
  // Creates sequence_ with the stored beginning of the tokens, and sets *stored to its length.
  pqc_status Begin(std::span<const uint32_t> tokens, uint64_t* stored);
  void End();
  pqc_status Send(const Rows& rows, uint64_t begin, uint64_t end);
  pqc_status Receive(const Rows& rows, uint64_t end);
  // Makes layer_rows_ those of the tokens from `begin` on.
  void SetLayerRows(const Rows& rows, uint64_t begin, uint64_t count);
  uint64_t ChunkTokens() const;

  const Options options_;
  pqc_client* client_ = nullptr;
  pqc_cache* cache_ = nullptr;
  pqc_sequence* sequence_ = nullptr;
  std::string message_;
  bool has_lost_connection_ = false;  // by the last request that failed
  std::vector<pqc_layer_rows> layer_rows_;
  uint64_t key_shape_[4] = {};
  uint64_t value_shape_[4] = {};
  pqc_block_table cells_ = PQC_INIT(pqc_block_table);
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_STORED_PROMPTS_H_
