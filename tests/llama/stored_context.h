// A sequence of any length without a prefill: a state with random keys and values, which
// llama_state_seq_set_data loads. The format is that of the sequence that the context saves itself.
#ifndef PQCACHED_TESTS_LLAMA_STORED_CONTEXT_H_
#define PQCACHED_TESTS_LLAMA_STORED_CONTEXT_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "llama.h"

namespace pqcached::llama_test {

// Reads a saved state and writes one of other cells, step by step in the same order.
class StateRewriter {
 public:
  StateRewriter(std::vector<uint8_t> from, uint32_t tokens)
      : from_(std::move(from)), tokens_(tokens) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    halves_.resize((1 << 20) + 7);  // a prime length: rows repeat, and not in step with the heads
    for (_Float16& half : halves_) half = static_cast<_Float16>(normal(random));
  }

  std::vector<uint8_t> Rewrite() {
    Keep(8);  // magic number, sequence
    Keep(4);  // streams
    const uint32_t cells = Take<uint32_t>();
    Put(tokens_);
    for (uint32_t i = 0; i < cells; ++i) {
      Take<int32_t>();
      TakeBytes(size_t{Take<uint32_t>()} * 4);
    }
    for (uint32_t i = 0; i < tokens_; ++i) {
      Put(static_cast<int32_t>(i));
      Put(uint32_t{1});
      Put(int32_t{0});
    }
    const bool is_transposed = Keep4() != 0;
    const uint32_t layers = Keep4();
    for (uint32_t i = 0; i < layers; ++i) Rows(cells);
    for (uint32_t i = 0; i < layers; ++i) is_transposed ? Columns(cells) : Rows(cells);
    if (at_ != from_.size()) {
      std::fprintf(stderr, "error: this version saves states in another format\n");
      std::exit(1);
    }
    return std::move(to_);
  }

 private:
  template <class Value>
  Value Take() {
    Value value;
    std::memcpy(&value, TakeBytes(sizeof(value)), sizeof(value));
    return value;
  }
  const uint8_t* TakeBytes(size_t count) {
    if (count > from_.size() - at_) {
      std::fprintf(stderr, "error: this version saves states in another format\n");
      std::exit(1);
    }
    at_ += count;
    return from_.data() + at_ - count;
  }
  void Keep(size_t count) {
    const uint8_t* const bytes = TakeBytes(count);
    to_.insert(to_.end(), bytes, bytes + count);
  }
  uint32_t Keep4() {
    Keep(4);
    uint32_t value;
    std::memcpy(&value, to_.data() + to_.size() - 4, 4);
    return value;
  }
  template <class Value>
  void Put(Value value) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(&value);
    to_.insert(to_.end(), bytes, bytes + sizeof(value));
  }
  void PutRandom(size_t bytes) {
    const size_t begin = to_.size();
    to_.resize(begin + bytes);
    for (size_t done = 0; done < bytes;) {
      const size_t part = std::min(bytes - done, (halves_.size() - next_) * 2);
      std::memcpy(to_.data() + begin + done, halves_.data() + next_, part);
      done += part;
      next_ = (next_ + part / 2) % halves_.size();
    }
  }
  void Rows(uint32_t cells) {
    Keep4();  // type
    Keep(8);
    uint64_t row;
    std::memcpy(&row, to_.data() + to_.size() - 8, 8);
    TakeBytes(row * cells);
    PutRandom(row * tokens_);
  }
  void Columns(uint32_t cells) {
    Keep4();  // type
    const uint64_t element = Keep4();
    const uint64_t columns = Keep4();
    TakeBytes(columns * element * cells);
    PutRandom(columns * element * tokens_);
  }

  std::vector<uint8_t> from_;
  std::vector<uint8_t> to_;
  size_t at_ = 0;
  uint32_t tokens_;
  std::vector<_Float16> halves_;
  size_t next_ = 0;
};

// Gives sequence 0 of an F16 context `tokens` tokens.
inline void StoreContext(llama_context* context, uint32_t tokens) {
  llama_token token = 1;
  llama_decode(context, llama_batch_get_one(&token, 1));
  std::vector<uint8_t> state(llama_state_seq_get_size(context, 0));
  llama_state_seq_get_data(context, state.data(), state.size(), 0);
  const std::vector<uint8_t> stored = StateRewriter(std::move(state), tokens).Rewrite();
  llama_memory_clear(llama_get_memory(context), true);
  if (llama_state_seq_set_data(context, stored.data(), stored.size(), 0) == 0) {
    std::fprintf(stderr, "error: the stored context could not be loaded\n");
    std::exit(1);
  }
}

}  // namespace pqcached::llama_test

#endif  // PQCACHED_TESTS_LLAMA_STORED_CONTEXT_H_
