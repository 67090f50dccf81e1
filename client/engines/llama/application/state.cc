#include "client/engines/llama/application/state.h"

#include <cstring>
#include <utility>

namespace pqcached::llama {
namespace {

constexpr uint32_t kStateMagic = 0xaf143cd8;
constexpr uint32_t kMostStreams = 256;  // LLAMA_MAX_SEQ
constexpr size_t kCellBytes = 12;       // position, 1, sequence
constexpr size_t kRowsHeadBytes = 12;   // type, bytes of a row

// Reads numbers one after the other. Behind the end, all are 0 and ok() is false.
class StateReader {
 public:
  explicit StateReader(std::span<const std::byte> state) : state_(state) {}

  template <class Number>
  Number Take() {
    Number number = 0;
    if (Skip(sizeof(number)))
      std::memcpy(&number, state_.data() + at_ - sizeof(number), sizeof(number));
    return number;
  }
  bool Skip(uint64_t bytes) {
    is_ok_ = is_ok_ && bytes <= state_.size() - at_;
    if (is_ok_) at_ += bytes;
    return is_ok_;
  }
  bool ok() const { return is_ok_; }
  size_t at() const { return at_; }
  bool IsAtEnd() const { return is_ok_ && at_ == state_.size(); }

 private:
  std::span<const std::byte> state_;
  size_t at_ = 0;
  bool is_ok_ = true;
};

class StateWriter {
 public:
  explicit StateWriter(std::span<std::byte> state) : state_(state) {}

  template <class Number>
  void Put(Number number) {
    std::memcpy(state_.data() + at_, &number, sizeof(number));
    at_ += sizeof(number);
  }
  // Returns the place of the bytes that are left out.
  size_t LeaveOut(size_t bytes) { return std::exchange(at_, at_ + bytes); }

 private:
  std::span<std::byte> state_;
  size_t at_ = 0;
};

StateResult OtherFormat(const std::string& part) {
  return {PQC_UNIMPLEMENTED,
          "this llama.cpp, or this kind of model, has states of another format: " + part};
}

std::string TypeName(int32_t type) {
  switch (type) {
    case 0:
      return "f32";
    case 1:
      return "f16";
    case 30:
      return "bf16";
    default:
      return "type " + std::to_string(type) + " of ggml";
  }
}

StateResult ReadHead(StateReader* reader, uint32_t* streams) {
  if (reader->Take<uint32_t>() != kStateMagic) return OtherFormat("its magic number");
  reader->Take<int32_t>();  // the sequence, which llama.cpp does not read either
  *streams = reader->Take<uint32_t>();
  if (!reader->ok() || *streams < 1 || *streams > kMostStreams) return OtherFormat("its streams");
  return {};
}

StateResult ReadCells(StateReader* reader, StateRows* rows) {
  constexpr int64_t kNone = -1;
  std::vector<int64_t> cell_of_position(rows->cells, kNone);
  bool is_in_order = true;
  for (uint32_t cell = 0; cell < rows->cells; ++cell) {
    const auto position = reader->Take<int32_t>();
    const auto sequences = reader->Take<uint32_t>();
    reader->Take<int32_t>();
    if (sequences != 1) return OtherFormat("its cells");
    if (position < 0 || static_cast<uint32_t>(position) >= rows->cells ||
        cell_of_position[static_cast<uint32_t>(position)] != kNone) {
      return {PQC_FAILED_PRECONDITION, "the sequence has " + std::to_string(rows->cells) +
                                           " cells, and position " + std::to_string(position) +
                                           " is not one of 0 to n - 1, each once"};
    }
    cell_of_position[static_cast<uint32_t>(position)] = cell;
    is_in_order = is_in_order && static_cast<uint32_t>(position) == cell;
  }
  if (!is_in_order) rows->cell_of_position = std::move(cell_of_position);
  return {};
}

// K or V of all layers.
StateResult ReadRows(StateReader* reader, const KvShape& shape, uint64_t row_bytes, uint32_t cells,
                     const std::string& name, std::vector<size_t>* places) {
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const auto type = reader->Take<int32_t>();
    const auto bytes = reader->Take<uint64_t>();
    const std::string part = name + " of layer " + std::to_string(layer);
    if (!reader->ok()) return OtherFormat("it ends before " + part);
    if (type != 0 && type != 1 && type != 30) {
      return {PQC_UNIMPLEMENTED,
              part + " has " + TypeName(type) + ", and only f16, bf16 and f32 can be stored"};
    }
    if (type != shape.type) {
      return {PQC_FAILED_PRECONDITION, "kv_dtype: " + part + " is " + TypeName(type) +
                                           ", and the options say " + TypeName(shape.type)};
    }
    if (bytes != row_bytes) {
      return {PQC_UNIMPLEMENTED, part + " has rows of " + std::to_string(bytes) +
                                     " bytes, and the model's description says " +
                                     std::to_string(row_bytes)};
    }
    places->push_back(reader->at());
    if (!reader->Skip(bytes * cells)) return OtherFormat("it ends within " + part);
  }
  return {};
}

StateResult ReadStream(StateReader* reader, const KvShape& shape, StateRows* rows) {
  // A cell takes at least kCellBytes, which limits what is allocated for them.
  StateReader behind_cells = *reader;
  if (!behind_cells.Skip(rows->cells * uint64_t{kCellBytes})) return OtherFormat("its cells");
  if (StateResult result = ReadCells(reader, rows); result.status != PQC_OK) return result;
  const auto is_transposed = reader->Take<uint32_t>();
  const auto layers = reader->Take<uint32_t>();
  if (!reader->ok() || is_transposed > 1) return OtherFormat("its layers");
  if (is_transposed != 0) {
    return {PQC_UNIMPLEMENTED,
            "V is transposed: the context has to be made with flash attention (-fa on)"};
  }
  if (layers != shape.layers) {
    return {PQC_UNIMPLEMENTED, std::to_string(layers) +
                                   " layers have a KV cache, and the model has " +
                                   std::to_string(shape.layers)};
  }
  StateResult result = ReadRows(reader, shape, shape.KeyRowBytes(), rows->cells, "K", &rows->keys);
  if (result.status != PQC_OK) return result;
  return ReadRows(reader, shape, shape.ValueRowBytes(), rows->cells, "V", &rows->values);
}

}  // namespace

StateResult FindRows(std::span<const std::byte> state, const KvShape& shape, StateRows* rows) {
  *rows = {};
  StateReader reader(state);
  uint32_t streams = 0;
  if (StateResult result = ReadHead(&reader, &streams); result.status != PQC_OK) return result;
  for (uint32_t stream = 0; stream < streams; ++stream) {
    const auto cells = reader.Take<uint32_t>();
    if (cells == 0) continue;
    if (rows->cells != 0) return OtherFormat("its streams");
    rows->cells = cells;
    if (StateResult result = ReadStream(&reader, shape, rows); result.status != PQC_OK)
      return result;
  }
  if (!reader.IsAtEnd()) return OtherFormat("its end");
  return {};
}

StateResult CountStreams(std::span<const std::byte> state, uint32_t* streams) {
  StateReader reader(state);
  if (StateResult result = ReadHead(&reader, streams); result.status != PQC_OK) return result;
  for (uint32_t stream = 0; stream < *streams; ++stream) {
    if (reader.Take<uint32_t>() != 0) return OtherFormat("cells of an empty sequence");
  }
  if (!reader.IsAtEnd()) return OtherFormat("its end");
  return {};
}

size_t StateBytes(const KvShape& shape, uint32_t streams, uint32_t cells) {
  return size_t{12} + size_t{4} * streams + cells * kCellBytes + 8 +
         2 * shape.layers * kRowsHeadBytes + cells * shape.TokenBytes();
}

void WriteState(const KvShape& shape, uint32_t streams, uint32_t cells, std::span<std::byte> state,
                StateRows* rows) {
  *rows = {};
  rows->cells = cells;
  StateWriter writer(state);
  writer.Put(kStateMagic);
  writer.Put(int32_t{0});
  writer.Put(streams);
  writer.Put(cells);
  for (uint32_t cell = 0; cell < cells; ++cell) {
    writer.Put(static_cast<int32_t>(cell));
    writer.Put(uint32_t{1});
    writer.Put(int32_t{0});
  }
  writer.Put(uint32_t{0});  // V is not transposed
  writer.Put(shape.layers);
  for (const bool is_key : {true, false}) {
    const uint64_t row_bytes = is_key ? shape.KeyRowBytes() : shape.ValueRowBytes();
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      writer.Put(shape.type);
      writer.Put(row_bytes);
      (is_key ? rows->keys : rows->values).push_back(writer.LeaveOut(cells * row_bytes));
    }
  }
  for (uint32_t stream = 1; stream < streams; ++stream) writer.Put(uint32_t{0});
}

}  // namespace pqcached::llama
