// RecordWriter and RecordReader: serialize the fields of a record one after the other.
//
// A reader does not trust the record: it never reads beyond the bytes, and reports at the end
// whether they held all requested fields.
//
// Single-thread.
#ifndef PQCACHED_KVSTORE_RECORDS_RECORD_BYTES_H_
#define PQCACHED_KVSTORE_RECORDS_RECORD_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvstore/memory/durable_store.h"

namespace pqcached::kvstore {

class RecordWriter {
 public:
  explicit RecordWriter(std::span<std::byte> out) : out_(out) {}

  template <typename T>
  void Add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    Append(&value, sizeof(value));
  }
  template <typename T>
  void AddAll(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    Append(values.data(), values.size_bytes());
  }
  void AddText(std::string_view text) {
    Add(static_cast<uint32_t>(text.size()));
    Append(text.data(), text.size());
  }

  // Returns whether all added fields fitted.
  bool ok() const { return ok_; }
  size_t size_bytes() const { return used_; }

 private:
  void Append(const void* data, size_t size_bytes) {
    ok_ = ok_ && size_bytes <= out_.size() - used_;
    if (!ok_ || size_bytes == 0) return;
    PQC_CRASH_POINT();
    std::memcpy(out_.data() + used_, data, size_bytes);
    used_ += size_bytes;
  }

  std::span<std::byte> out_;
  size_t used_ = 0;
  bool ok_ = true;
};

class RecordReader {
 public:
  explicit RecordReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T Get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    Take(&value, sizeof(value));
    return value;
  }
  template <typename T>
  std::vector<T> GetAll(size_t count) {
    std::vector<T> values;
    if (!ok_ || count > bytes_.size() / sizeof(T)) {
      ok_ = false;
      return values;
    }
    values.resize(count);
    Take(values.data(), count * sizeof(T));
    return values;
  }
  std::string GetText() {
    const std::vector<char> text = GetAll<char>(Get<uint32_t>());
    return std::string(text.begin(), text.end());
  }

  // Returns whether the bytes held all fields read so far.
  bool ok() const { return ok_; }
  // Returns whether the bytes held all fields read so far, and nothing else.
  bool done() const { return ok_ && bytes_.empty(); }

 private:
  void Take(void* data, size_t size_bytes) {
    ok_ = ok_ && size_bytes <= bytes_.size();
    if (!ok_ || size_bytes == 0) return;
    std::memcpy(data, bytes_.data(), size_bytes);
    bytes_ = bytes_.subspan(size_bytes);
  }

  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RECORDS_RECORD_BYTES_H_
