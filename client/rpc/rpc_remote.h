// RpcRemote implements Remote by calls over gRPC.
//
// Every call has a deadline and carries the session's token and the boot word of the worker that
// granted its leases and staging places, so that no other worker takes them for its own. A call is
// sent when there is a connection. A call that is harmless to repeat is repeated after UNAVAILABLE,
// with growing pauses, until its deadline or the worker's end: then it fails, and the next call
// waits for the next worker. A session outlives workers (Session); a lost session does not return,
// because the sidecar no longer knows its sequences.
#ifndef PQCACHED_CLIENT_RPC_RPC_REMOTE_H_
#define PQCACHED_CLIENT_RPC_RPC_REMOTE_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "client/base/remote.h"
#include "client/rpc/event_stream.h"
#include "client/rpc/pending_call.h"
#include "client/rpc/rows_answer.h"
#include "client/rpc/secure/credentials.h"
#include "client/rpc/session.h"
#include "kernels/base/mutex.h"
#include "pqcached/v1/admin.grpc.pb.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"

namespace pqcached::client {

// The steady clock, because the system clock may be set at any time.
using Deadline = std::chrono::steady_clock::time_point;

// Converts to gRPC's own steady clock.
gpr_timespec ToGrpc(Deadline deadline);

// Pauses before repetitions of a call: each is twice the one before, up to the longest.
inline constexpr std::chrono::milliseconds kFirstPause(10);
inline constexpr std::chrono::milliseconds kLongestPause(1000);

inline std::chrono::milliseconds Remaining(Deadline deadline) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(deadline -
                                                               std::chrono::steady_clock::now());
}

class RpcRemote final : public Remote {
 public:
  static grpc::Status Open(const RemoteOptions& options, const SecurityOptions& security,
                           RpcRemote** remote);

  void Close() noexcept override { delete this; }

  pqc_status OpenCache(const pqc_cache_spec& spec, uint64_t* cache_id,
                       RefusalBuffer* error) noexcept override;
  pqc_status CreateSequence(uint64_t cache_id, const char* model_fingerprint,
                            const pqc_sequence_options& options, uint64_t* sequence_id,
                            uint64_t* token_count, RefusalBuffer* error) noexcept override;
  pqc_status ForkSequences(ForkItem* items, uint32_t item_count, const uint64_t* dropped_ids,
                           uint32_t dropped_count, RefusalBuffer* error) noexcept override;
  pqc_status ForkSequence(uint64_t sequence_id, uint64_t token_count, uint64_t* child_id,
                          uint64_t* child_token_count, RefusalBuffer* error) noexcept override;
  pqc_status MatchPrefix(uint64_t cache_id, const pqc_sequence_options& prompt,
                         uint64_t* token_count, RefusalBuffer* error) noexcept override;
  pqc_status PrefixKeys(uint64_t cache_id, const pqc_sequence_options& prompt, pqc_prefix_key* root,
                        pqc_prefix_key* keys, uint64_t capacity, uint64_t* count,
                        RefusalBuffer* error) noexcept override;
  pqc_status WatchEvents(uint64_t cache_id, uint64_t epoch, uint64_t number, uint64_t* watch_id,
                         RefusalBuffer* error) noexcept override;
  pqc_status NextEvents(uint64_t watch_id, uint32_t timeout_ms, pqc_cache_event* out,
                        uint32_t capacity, uint32_t* count, RefusalBuffer* error) noexcept override;
  void EndWatch(uint64_t watch_id) noexcept override;
  pqc_status FindSequence(uint64_t cache_id, uint64_t sequence_id, uint64_t* token_count,
                          pqc_index* live_index, RefusalBuffer* error) noexcept override;
  pqc_status CheckConnected(RefusalBuffer* error) noexcept override;
  pqc_status TopPages(const TopPagesItem* items, uint32_t item_count,
                      RefusalBuffer* error) noexcept override;
  pqc_status Admit(uint64_t cache_id, uint64_t token_count, uint64_t output_token_count,
                   pqc_admission* admission, RefusalBuffer* error) noexcept override;
  pqc_status AdmitIndexed(uint64_t cache_id, uint64_t token_count, uint64_t output_token_count,
                          const pqc_index& index, pqc_admission* admission,
                          RefusalBuffer* error) noexcept override;
  pqc_status PinSequence(uint64_t sequence_id, uint64_t ttl_ms,
                         RefusalBuffer* error) noexcept override;
  pqc_status SuspendSequence(uint64_t sequence_id, RefusalBuffer* error) noexcept override;
  pqc_status ResumeSequence(uint64_t sequence_id, uint64_t* token_count,
                            RefusalBuffer* error) noexcept override;
  pqc_status DropSequence(uint64_t sequence_id, RefusalBuffer* error) noexcept override;
  pqc_status TruncateSequence(uint64_t sequence_id, uint64_t token_count, const LeaseView& lease,
                              const ImageSink& image, RefusalBuffer* error) noexcept override;
  pqc_status DescribeSequence(uint64_t sequence_id, pqc_sequence_info* info,
                              RefusalBuffer* error) noexcept override;
  pqc_status Ingest(uint64_t sequence_id, uint64_t first_position, const RowBlock& rows,
                    RefusalBuffer* error) noexcept override;
  pqc_status IngestStaged(uint64_t sequence_id, const StagedRows& rows,
                          RefusalBuffer* error) noexcept override;
  pqc_status Commit(uint64_t sequence_id, uint64_t first_position, const RowBlock* rows,
                    uint32_t row_block_count, uint64_t* token_count,
                    RefusalBuffer* error) noexcept override;
  pqc_status NameTokens(uint64_t sequence_id, const pqc_row_options& names,
                        RefusalBuffer* error) noexcept override;
  pqc_status Append(AppendItem* items, uint32_t item_count, RefusalBuffer* error) noexcept override;
  pqc_status ClosePrefill(uint64_t sequence_id, RefusalBuffer* error) noexcept override;
  pqc_status BuildIndex(uint64_t sequence_id, const pqc_build_options& options,
                        RefusalBuffer* error) noexcept override;
  pqc_status TopK(const TopKItem* items, uint32_t item_count,
                  RefusalBuffer* error) noexcept override;
  pqc_status Score(const QueryView& query, const kvstore::IndexDescriptor& index,
                   kvstore::TokenRange tokens, const ScoresOut& out,
                   RefusalBuffer* error) noexcept override;
  pqc_status FetchBlocks(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* out,
                         RefusalBuffer* error) noexcept override;
  pqc_status FetchTokens(const FetchView& fetch, const PositionsView& positions, std::byte* out,
                         RefusalBuffer* error) noexcept override;
  pqc_status Attend(const AttendItem* items, uint32_t item_count,
                    RefusalBuffer* error) noexcept override;
  pqc_status AttendRange(const AttendRangeItem* items, uint32_t item_count,
                         RefusalBuffer* error) noexcept override;
  pqc_status Attach(uint64_t sequence_id, const LeaseView& lease, uint64_t* lease_id,
                    uint32_t* word_index, const ImageSink& image,
                    RefusalBuffer* error) noexcept override;
  pqc_status Detach(const LeaseView& lease, RefusalBuffer* error) noexcept override;
  pqc_status OpenPageCache(const char* name, uint64_t capacity_bytes, uint64_t quota_bytes,
                           uint64_t* cache_id, RefusalBuffer* error) noexcept override;
  pqc_status PutPages(uint64_t cache_id, PutPageItem* items, uint32_t item_count,
                      RefusalBuffer* error) noexcept override;
  pqc_status GetPages(uint64_t cache_id, GetPageItem* items, uint32_t item_count,
                      RefusalBuffer* error) noexcept override;
  pqc_status FindPages(uint64_t cache_id, FindPageItem* items, uint32_t item_count,
                       uint64_t lease_ms, RefusalBuffer* error) noexcept override;
  void SetClientVersion(uint32_t version) noexcept override { client_version_ = version; }
  pqc_status AttendScored(const ScoredItem* items, uint32_t item_count,
                          RefusalBuffer* error) noexcept override;
  pqc_status FetchRows(const FetchView& fetch, kvstore::TokenRange tokens, std::byte* out,
                       uint64_t* rows_epoch, RefusalBuffer* error) noexcept override;
  pqc_status ReadRows(const FetchView* layers, uint32_t layer_count, kvstore::TokenRange tokens,
                      const RowRunSink& sink, uint64_t* rows_epoch,
                      RefusalBuffer* error) noexcept override;
  pqc_status MakeIndex(const char* type, const pqc_index_parameter* parameters,
                       uint32_t parameter_count, pqc_index* index,
                       RefusalBuffer* error) noexcept override;
  pqc_status AddSamples(uint64_t sequence_id, const SampleBlock* samples, uint32_t sample_count,
                        RefusalBuffer* error) noexcept override;
  void Count(uint64_t* rpcs, uint64_t* background_rpcs) noexcept override;
  pqc_status AdminJson(const char* method, const char* request, const TextSink& answer,
                       RefusalBuffer* error) noexcept override;

 private:
  enum class Repeat { kNever, kHarmless };

  // `credentials`: null = plain connections.
  RpcRemote(const RemoteOptions& options, std::shared_ptr<const Credentials> credentials);
  ~RpcRemote() = default;

  // Wraps every call: catches exceptions, and converts the status and its reason to the C ABI's.
  pqc_status Finish(const char* method, RefusalBuffer* error,
                    const std::function<grpc::Status()>& call) const noexcept;
  // Returns the status that a caller sees, which explains a lost session.
  grpc::Status Explain(const char* method, const grpc::Status& status) const;

  // Returns the deadline of the call that the thread is in.
  Deadline CallDeadline() const {
    const auto timeout_ms = static_cast<uint32_t>(timeout_.count());
    return std::chrono::steady_clock::now() +
           std::chrono::milliseconds(remaining_ms_ ? remaining_ms_(timeout_ms) : timeout_ms);
  }
  using Context = std::shared_ptr<grpc::ClientContext>;

  // `boot_word` is that of the worker to which the arguments belong; 0 = any worker.
  void Prepare(grpc::ClientContext* context, Deadline deadline, uint64_t boot_word = 0) const;
  // Waits for a worker, when the session has none, and for a connection.
  grpc::Status Connect(grpc::Channel& channel, Deadline deadline) const;
  // Repeats `attempt` with a prepared context until it returns anything but UNAVAILABLE.
  grpc::Status Attempt(Repeat repeat, Deadline deadline,
                       const std::function<grpc::Status(const Context&)>& attempt,
                       uint64_t boot_word = 0) const;
  // Makes a unary call that ends by its deadline, even if the worker is stalled.
  template <class Stub, class Prepared, class Request, class Response>
  grpc::Status Call(Stub& stub, Prepared prepared, const Context& context, const Request& request,
                    Response* response) const {
    return CallUnary(abandoned_calls_, stub, prepared, context, request, response);
  }
  grpc::Status IngestOnce(const Context& context, Deadline deadline, uint64_t sequence_id,
                          uint64_t first_position, const RowBlock& rows);
  grpc::Status AddSamplesOnce(const Context& context, uint64_t sequence_id,
                              const SampleBlock* samples, uint32_t sample_count);
  grpc::Status IngestStagedOnce(const Context& context, uint64_t sequence_id,
                                const StagedRows& rows);
  // Rows of one FetchBlocks call, a part of a larger read.
  struct FetchPart {
    uint32_t layer = 0;  // its number in the read
    kvstore::TokenRange tokens;
  };
  // Returns the part that follows, of layer `layers.size()` after the last one. The first one
  // follows the empty part at the range's end.
  FetchPart PartAfter(FetchPart part, std::span<const FetchView> layers,
                      kvstore::TokenRange tokens) const;
  using FetchCall = UnaryCall<grpc::ByteBuffer>;
  std::unique_ptr<FetchCall> StartFetch(const std::shared_ptr<grpc::Channel>& channel,
                                        const Context& context, const FetchView& fetch,
                                        kvstore::TokenRange tokens) const;
  // Takes the answer of a call that has ended, and repeats it when it failed; the first call of a
  // read only when it is worth a repetition.
  grpc::Status TakeAnswer(const FetchView& fetch, kvstore::TokenRange tokens, Deadline deadline,
                          bool is_first, FetchCall& ended, grpc::ByteBuffer* answer) const;
  // Fetches the rows of a range of several layers in parts, several at a time and in turn by both
  // connections. Takes them layer by layer, and in each the last part first. False of `take` ends
  // the call. `rows_epoch`: that of FetchRows.
  grpc::Status FetchParts(
      std::span<const FetchView> layers, kvstore::TokenRange tokens, uint64_t* rows_epoch,
      const std::function<bool(const RowsAnswer& rows, const FetchPart& part)>& take) const;
  // Reads of a selection what the client's version has.
  void EncodeSelection(const kvstore::Selection& selection, v1::Selection* message) const;
  // Returns the number of sets of a selection, as EncodeSelection encodes it.
  uint32_t SetCount(const kvstore::Selection& selection, const LayerShape& shape) const;
  grpc::Status ScorePart(const QueryView& query, const kvstore::IndexDescriptor& index,
                         kvstore::TokenRange tokens, Deadline deadline,
                         v1::ScoreResponse* response);
  grpc::Status TopKPart(const TopKItem* items, uint32_t item_count, Deadline deadline,
                        bool* too_small);
  grpc::Status TopPagesPart(const TopPagesItem* items, uint32_t item_count, Deadline deadline);
  grpc::Status AttendScoredPart(const ScoredItem* items, uint32_t item_count, Deadline deadline);
  grpc::Status AttendRangePart(const AttendRangeItem* parts, uint32_t part_count,
                               Deadline deadline);
  grpc::Status AttendPart(const AttendItem* items, uint32_t item_count, Deadline deadline,
                          bool* too_small);
  // Stores the items [first, first + count) by one RPC.
  grpc::Status PutPagesPart(uint64_t cache_id, PutPageItem* items, uint32_t first, uint32_t count,
                            Deadline deadline);
  // Reads pages of the first items by one RPC; *got_count is their number, at least 1.
  grpc::Status GetPagesPart(uint64_t cache_id, GetPageItem* items, uint32_t count,
                            Deadline deadline, uint32_t* got_count);
  grpc::Status NextOf(EventStream& stream, Deadline deadline, pqc_cache_event* out,
                      uint32_t capacity, uint32_t* count);
  // Returns the number of row bytes for one message: small enough for the sidecar, large enough to
  // be fast.
  uint64_t PayloadBytes(uint64_t wanted_bytes) const;

  const std::string endpoint_;
  const std::shared_ptr<const Credentials> credentials_;
  const std::chrono::milliseconds timeout_;
  uint32_t (*const remaining_ms_)(uint32_t timeout_ms);
  bool (*const in_call_)();
  uint32_t client_version_ = 0;                   // 0 = older than SetClientVersion
  mutable AbandonedCalls abandoned_calls_;        // outlives the channels
  const std::shared_ptr<grpc::Channel> channel_;  // for all other calls
  // Separate channel for long rows: with a stalled worker, the bytes that fill its socket do not
  // block other calls. Long reads use both.
  const std::shared_ptr<grpc::Channel> bulk_channel_;
  const std::unique_ptr<v1::KvCache::Stub> kv_;
  const std::unique_ptr<v1::Admin::Stub> admin_;
  Session session_;  // uses kv_
  mutable std::atomic<uint64_t> rpcs_ = 0;
  mutable std::atomic<uint64_t> background_rpcs_ = 0;
  base::Mutex watches_mutex_;
  uint64_t last_watch_id_ PQCACHED_GUARDED_BY(watches_mutex_) = 0;
  // Shared with the call that reads one.
  std::map<uint64_t, std::shared_ptr<EventStream>> watches_ PQCACHED_GUARDED_BY(watches_mutex_);
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_RPC_REMOTE_H_
