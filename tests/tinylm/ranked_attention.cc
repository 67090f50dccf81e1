#include "tests/tinylm/ranked_attention.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

namespace tinylm {
namespace {

struct Reply {
  AttendedTokens attended;
  uint32_t float_count = 0;
  char error[512] = {};
};

// Returns the config of one rank's part of the model.
Config ConfigOfRank(Config config, uint32_t rank_count) {
  if (rank_count == 0 || config.kv_heads % rank_count != 0) {
    throw std::runtime_error("rank_count: " + std::to_string(rank_count) + " ranks cannot share " +
                             std::to_string(config.kv_heads) + " kv heads");
  }
  config.kv_heads /= rank_count;
  config.query_heads /= rank_count;
  return config;
}

// Returns the rank's heads of [tokens, heads, head_dim].
std::vector<float> Slice(const float* data, uint32_t tokens, uint32_t heads, uint32_t head_dim,
                         uint32_t rank, uint32_t rank_count) {
  const size_t part = size_t{heads} / rank_count * head_dim;
  std::vector<float> slice(tokens * part);
  for (uint32_t t = 0; t < tokens; ++t) {
    std::copy_n(data + size_t{t} * heads * head_dim + rank * part, part, &slice[t * part]);
  }
  return slice;
}

std::vector<float> Joined(std::vector<float> a, const std::vector<float>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void WriteAll(int socket, const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = send(socket, from, bytes, MSG_NOSIGNAL);
    if (count <= 0) throw std::runtime_error("a rank's process has ended");
    from += count;
    bytes -= static_cast<size_t>(count);
  }
}

bool ReadAll(int socket, void* data, size_t bytes) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count = recv(socket, to, bytes, 0);
    if (count <= 0) return false;
    to += count;
    bytes -= static_cast<size_t>(count);
  }
  return true;
}

}  // namespace

struct RankProcess::Command {
  enum class Act : uint32_t { kBegin, kPrefill, kEndPrefill, kDecode, kEndStep, kRewind, kSelect };

  Act act = Act::kBegin;
  uint32_t layer = 0, position = 0, token_count = 0;
  uint32_t float_count = 0;
  pqc_index index = {};
  double ratio = 0;
};

namespace {

using Act = RankProcess::Command::Act;

// Executes one command; returns the floats of the answer.
std::vector<float> Execute(const RankProcess::Command& command, const std::vector<float>& floats,
                           const Config& config, PqcachedAttention& attention) {
  const size_t kv_floats = size_t{config.kv_heads} * config.head_dim;
  switch (command.act) {
    case Act::kBegin:
      attention.BeginSequence();
      break;
    case Act::kPrefill:
      attention.Prefill({command.layer, command.position, command.token_count, floats.data(),
                         floats.data() + command.token_count * kv_floats});
      break;
    case Act::kEndPrefill:
      attention.EndPrefill();
      break;
    case Act::kDecode: {
      const size_t q_floats = size_t{config.query_heads} * config.head_dim;
      std::vector<float> o(q_floats);
      attention.Decode({command.layer, command.position, floats.data(), floats.data() + q_floats,
                        floats.data() + q_floats + kv_floats, o.data()});
      return o;
    }
    case Act::kEndStep:
      attention.EndStep();
      break;
    case Act::kRewind:
      attention.Rewind();
      break;
    case Act::kSelect:
      attention.SetSelection(command.index, command.ratio);
      break;
  }
  return {};
}

}  // namespace

void ServeRank(int socket, const Model& model, const PqcachedAttention::Options& options) {
  const Config config = ConfigOfRank(model.config, options.rank_count);
  Workers workers(1);
  std::unique_ptr<PqcachedAttention> attention;
  RankProcess::Command command;
  while (ReadAll(socket, &command, sizeof command)) {
    std::vector<float> floats(command.float_count), answer;
    if (!ReadAll(socket, floats.data(), floats.size() * sizeof(float))) return;
    Reply reply;
    try {
      if (!attention) {
        attention =
            std::make_unique<PqcachedAttention>(config, model.fingerprint, options, workers);
      }
      answer = Execute(command, floats, config, *attention);
      reply.attended = attention->last_attended();
    } catch (const std::exception& error) {
      std::strncpy(reply.error, error.what(), sizeof reply.error - 1);
    }
    reply.float_count = static_cast<uint32_t>(answer.size());
    WriteAll(socket, &reply, sizeof reply);
    WriteAll(socket, answer.data(), answer.size() * sizeof(float));
  }
}

RankProcess::RankProcess(const std::string& program, const std::string& model_directory,
                         const PqcachedAttention::Options& options) {
  std::vector<std::string> words = {program,
                                    model_directory,
                                    options.endpoint,
                                    options.cache_name,
                                    std::to_string(options.capacity_bytes),
                                    std::to_string(options.dtype),
                                    std::to_string(options.path),
                                    std::to_string(options.rank),
                                    std::to_string(options.rank_count)};
  for (const pqc_index& index : options.indexes) {
    words.push_back(std::to_string(index.subspaces));
    words.push_back(std::to_string(index.bits));
  }
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);

  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
    throw std::runtime_error("no socket pair");
  }
  pid_ = fork();
  if (pid_ == 0) {  // only async-signal-safe calls: the process may have other threads
    const bool placed = pair[1] == kRankSocket ? fcntl(kRankSocket, F_SETFD, 0) == 0
                                               : dup2(pair[1], kRankSocket) == kRankSocket;
    if (placed) execv(arguments[0], arguments.data());
    _exit(127);
  }
  close(pair[1]);
  socket_ = pair[0];
  if (pid_ < 0) throw std::runtime_error("cannot start a rank's process");
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : socket_(std::exchange(other.socket_, -1)), pid_(std::exchange(other.pid_, -1)) {}

RankProcess::~RankProcess() {
  if (pid_ < 0) return;
  close(socket_);
  waitpid(pid_, nullptr, 0);
}

void RankProcess::Send(const Command& command, const std::vector<float>& floats) const {
  Command sized = command;
  sized.float_count = static_cast<uint32_t>(floats.size());
  WriteAll(socket_, &sized, sizeof sized);
  WriteAll(socket_, floats.data(), floats.size() * sizeof(float));
}

AttendedTokens RankProcess::Receive(std::vector<float>& floats) const {
  Reply reply;
  if (!ReadAll(socket_, &reply, sizeof reply)) {
    throw std::runtime_error("a rank's process has ended");
  }
  floats.resize(reply.float_count);
  if (!ReadAll(socket_, floats.data(), floats.size() * sizeof(float))) {
    throw std::runtime_error("a rank's process has ended");
  }
  if (reply.error[0] != 0) throw std::runtime_error(reply.error);
  return reply.attended;
}

std::vector<RankProcess> RankedAttention::Start(const std::string& program,
                                                const std::string& model_directory,
                                                const PqcachedAttention::Options& options) {
  std::vector<RankProcess> others;
  for (uint32_t rank = 1; rank < options.rank_count; ++rank) {
    PqcachedAttention::Options of_rank = options;
    of_rank.rank = rank;
    others.emplace_back(program, model_directory, of_rank);
  }
  return others;
}

RankedAttention::RankedAttention(const Model& model, const PqcachedAttention::Options& options,
                                 std::vector<RankProcess> others, Workers& workers)
    : config_(model.config),
      rank_count_(options.rank_count),
      others_(std::move(others)),
      own_(ConfigOfRank(model.config, options.rank_count), model.fingerprint, options, workers) {}

// Executes a command on every rank, on this one last, and then receives the answers.
void RankedAttention::ExecuteOnAll(const RankProcess::Command& command) {
  for (const RankProcess& rank : others_) rank.Send(command, {});
  Execute(command, {}, ConfigOfRank(config_, rank_count_), own_);
  std::vector<float> none;
  for (const RankProcess& rank : others_) rank.Receive(none);
}

void RankedAttention::SetSelection(const pqc_index& index, double ratio) {
  ExecuteOnAll({.act = Act::kSelect, .index = index, .ratio = ratio});
}

void RankedAttention::BeginSequence() { ExecuteOnAll({.act = Act::kBegin}); }
void RankedAttention::EndPrefill() { ExecuteOnAll({.act = Act::kEndPrefill}); }
void RankedAttention::EndStep() { ExecuteOnAll({.act = Act::kEndStep}); }
void RankedAttention::Rewind() { ExecuteOnAll({.act = Act::kRewind}); }

void RankedAttention::Prefill(const KvChunk& chunk) {
  const auto part = [&](const float* data, uint32_t rank) {
    return Slice(data, chunk.token_count, config_.kv_heads, config_.head_dim, rank, rank_count_);
  };
  for (uint32_t i = 0; i < others_.size(); ++i) {
    others_[i].Send({.act = Act::kPrefill,
                     .layer = chunk.layer,
                     .position = chunk.first_position,
                     .token_count = chunk.token_count},
                    Joined(part(chunk.k, i + 1), part(chunk.v, i + 1)));
  }
  const std::vector<float> k = part(chunk.k, 0), v = part(chunk.v, 0);
  own_.Prefill({chunk.layer, chunk.first_position, chunk.token_count, k.data(), v.data()});
  std::vector<float> none;
  for (const RankProcess& rank : others_) rank.Receive(none);
}

void RankedAttention::Decode(const DecodeArgs& args) {
  const auto queries = [&](uint32_t rank) {
    return Slice(args.q, 1, config_.query_heads, config_.head_dim, rank, rank_count_);
  };
  const auto rows = [&](const float* data, uint32_t rank) {
    return Slice(data, 1, config_.kv_heads, config_.head_dim, rank, rank_count_);
  };
  for (uint32_t i = 0; i < others_.size(); ++i) {
    others_[i].Send({.act = Act::kDecode, .layer = args.layer, .position = args.position},
                    Joined(Joined(queries(i + 1), rows(args.k, i + 1)), rows(args.v, i + 1)));
  }
  const std::vector<float> q = queries(0), k = rows(args.k, 0), v = rows(args.v, 0);
  own_.Decode({args.layer, args.position, q.data(), k.data(), v.data(), args.o});
  std::vector<float> o;
  for (uint32_t i = 0; i < others_.size(); ++i) {
    others_[i].Receive(o);
    std::copy(o.begin(), o.end(), args.o + (i + 1) * q.size());
  }
}

}  // namespace tinylm
