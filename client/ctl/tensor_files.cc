#include "client/ctl/tensor_files.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "client/ctl/segments.h"
#include "kernels/base/dtype.h"
#include "kvstore/read/image/folder.h"

namespace pqcached::ctl {
namespace {

namespace fs = std::filesystem;
using kernels::DType;
using kvstore::ImageFolder;
using kvstore::SegmentImageReader;

constexpr uint32_t kBlockRows = 1024;  // that are converted at once

// The keys or the values of one layer.
struct Part {
  const char* name = "";
  uint32_t layer_slot = 0;
  kvstore::ImageLayer layer;
  uint32_t begin = 0;  // first of its dims in a row
  uint32_t dim = 0;

  DType dtype() const { return static_cast<DType>(layer.dtype); }
  std::vector<uint64_t> Shape(uint64_t tokens) const { return {tokens, layer.kv_heads, dim}; }
};

// An exported sequence, all of whose images are verified.
class Export {
 public:
  static Status Open(const std::string& path, Export* opened);

  uint64_t token_count() const { return folder_.manifest().header.token_count; }
  std::string fingerprint() const { return std::string(folder_.manifest().fingerprint()); }
  std::vector<Part> Parts() const;
  // Appends a part's elements, [tokens, kv_heads, dim], to the file.
  Status Write(const Part& part, DType dtype, std::ostream& file) const;

 private:
  Status WriteImage(const SegmentImageReader& image, const Part& part, DType dtype,
                    std::ostream& file) const;

  std::string path_;
  ImageFolder folder_;
  std::vector<kvstore::ImageLayer> layers_;
};

Status Export::Open(const std::string& path, Export* opened) {
  const Result<Json> verified = VerifySegments(path);
  if (!verified.ok()) return verified.status();
  opened->path_ = path;
  kvstore::Refusal refusal = ImageFolder::Open({}, AT_FDCWD, path.c_str(), &opened->folder_);
  SegmentImageReader first;
  if (refusal.ok()) refusal = opened->folder_.OpenImage(0, &first);
  if (!refusal.ok()) return StatusOf(path, refusal);
  opened->layers_ = first.image().layers;
  return Status();
}

std::vector<Part> Export::Parts() const {
  std::vector<Part> parts;
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    const kvstore::ImageLayer& layer = layers_[slot];
    if (layer.key_dim > 0) {
      parts.push_back({.name = "keys", .layer_slot = slot, .layer = layer, .dim = layer.key_dim});
    }
    parts.push_back({.name = "values",
                     .layer_slot = slot,
                     .layer = layer,
                     .begin = layer.key_dim,
                     .dim = layer.value_dim});
  }
  return parts;
}

Status Export::WriteImage(const SegmentImageReader& image, const Part& part, DType dtype,
                          std::ostream& file) const {
  const kvstore::ImageLayer& layer = part.layer;
  const size_t from_bytes = part.dim * kernels::DTypeBytes(part.dtype());
  const size_t to_bytes = part.dim * kernels::DTypeBytes(dtype);
  const size_t skipped = part.begin * kernels::DTypeBytes(part.dtype());
  std::vector<std::byte> rows, block;
  for (uint32_t first = 0; first < image.image().token_count(); first += kBlockRows) {
    const uint32_t count = std::min(kBlockRows, image.image().token_count() - first);
    rows.resize(size_t{count} * layer.row_bytes);
    block.resize(size_t{count} * layer.kv_heads * to_bytes);
    for (const kvstore::ImageSection& section : image.image().sections) {
      if (section.kind != kvstore::ImageSectionKind::kRows ||
          section.layer_slot != part.layer_slot) {
        continue;
      }
      const kvstore::Refusal read =
          image.ReadPart(section, uint64_t{first} * layer.row_bytes, rows);
      if (!read.ok()) return StatusOf(path_, read);
      for (uint32_t row = 0; row < count; ++row) {
        const std::byte* const from = rows.data() + size_t{row} * layer.row_bytes + skipped;
        std::byte* const to =
            block.data() + (size_t{row} * layer.kv_heads + section.part) * to_bytes;
        if (dtype == part.dtype()) {
          std::memcpy(to, from, from_bytes);
        } else {
          kernels::ConvertElements(part.dtype(), from, dtype, to, part.dim);
        }
      }
    }
    file.write(reinterpret_cast<const char*>(block.data()),
               static_cast<std::streamsize>(block.size()));
  }
  return Status();
}

Status Export::Write(const Part& part, DType dtype, std::ostream& file) const {
  for (uint32_t number = 0; number < folder_.image_count(); ++number) {
    SegmentImageReader image;
    const kvstore::Refusal refusal = folder_.OpenImage(number, &image);
    if (!refusal.ok()) return StatusOf(path_, refusal);
    const std::vector<kvstore::ImageLayer>& layers = image.image().layers;
    if (layers.size() != layers_.size() ||
        std::memcmp(layers.data(), layers_.data(), layers.size() * sizeof(layers[0])) != 0) {
      return Status(PQC_DATA_LOSS, path_ + ": " + kvstore::ImageName(number) +
                                       ".layers: other layers than the first image has");
    }
    Status written = WriteImage(image, part, dtype, file);
    if (!written.ok()) return written;
  }
  return Status();
}

// The file or folder that a conversion writes, under another name until it is complete.
class Output {
 public:
  explicit Output(std::string path) : path_(std::move(path)), partial_(path_ + ".partial") {}
  ~Output() {
    std::error_code ignored;
    if (begun_) fs::remove_all(partial_, ignored);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  const std::string& partial() const { return partial_; }
  Status Begin() {
    std::error_code error;
    if (fs::exists(path_, error)) return Status(PQC_ALREADY_EXISTS, path_ + " is there already");
    if (fs::exists(partial_, error)) {
      return Status(PQC_ALREADY_EXISTS, partial_ + " is there already");
    }
    begun_ = true;
    return Status();
  }
  Status Failed() const {
    return Status(PQC_RESOURCE_EXHAUSTED, path_ + ": " + std::strerror(errno));
  }
  Status Publish() {
    std::error_code error;
    fs::rename(partial_, path_, error);
    if (error) return Status(PQC_RESOURCE_EXHAUSTED, path_ + ": " + error.message());
    begun_ = false;
    return Status();
  }

 private:
  const std::string path_;
  const std::string partial_;
  bool begun_ = false;
};

const char* SafetensorsName(DType dtype) {
  return dtype == DType::kF16 ? "F16" : dtype == DType::kBf16 ? "BF16" : "F32";
}

// The header of a .npy file of version 1, padded so that the elements are aligned.
std::string NpyHeader(DType dtype, const std::vector<uint64_t>& shape) {
  std::string text = std::string("{'descr': '<f") + (dtype == DType::kF16 ? "2" : "4") +
                     "', 'fortran_order': False, 'shape': (";
  for (const uint64_t extent : shape) text += std::to_string(extent) + ", ";
  text += "), }";
  constexpr size_t kPreamble = 10, kAlignment = 64;
  text.append(kAlignment - (kPreamble + text.size() + 1) % kAlignment, ' ');
  text += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(text.size() & 0xff);
  header += static_cast<char>(text.size() >> 8);
  return header + text;
}

}  // namespace

Status WriteSafetensors(const std::string& path, const std::string& output) {
  Export source;
  Status status = Export::Open(path, &source);
  if (!status.ok()) return status;
  Output target(output);
  status = target.Begin();
  if (!status.ok()) return status;
  const std::vector<Part> parts = source.Parts();
  Json header = {{"__metadata__",
                  {{"model_fingerprint", source.fingerprint()},
                   {"token_count", std::to_string(source.token_count())}}}};
  uint64_t offset = 0;
  for (const Part& part : parts) {
    const uint64_t bytes =
        source.token_count() * part.layer.kv_heads * part.dim * kernels::DTypeBytes(part.dtype());
    header["layers." + std::to_string(part.layer.layer) + "." + part.name] = {
        {"dtype", SafetensorsName(part.dtype())},
        {"shape", part.Shape(source.token_count())},
        {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::ofstream file(target.partial(), std::ios::binary);
  const uint64_t header_bytes = text.size();  // little-endian, as this machine is
  file.write(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  file << text;
  for (const Part& part : parts) {
    status = source.Write(part, part.dtype(), file);
    if (!status.ok()) return status;
  }
  file.close();
  return file ? target.Publish() : target.Failed();
}

Status WriteNumpy(const std::string& path, const std::string& output) {
  Export source;
  Status status = Export::Open(path, &source);
  if (!status.ok()) return status;
  Output target(output);
  status = target.Begin();
  if (!status.ok()) return status;
  std::error_code error;
  if (!fs::create_directory(target.partial(), error)) return target.Failed();
  for (const Part& part : source.Parts()) {
    const DType dtype = part.dtype() == DType::kBf16 ? DType::kF32 : part.dtype();
    std::ofstream file(
        target.partial() + "/layer_" + std::to_string(part.layer.layer) + "_" + part.name + ".npy",
        std::ios::binary);
    file << NpyHeader(dtype, part.Shape(source.token_count()));
    status = source.Write(part, dtype, file);
    if (!status.ok()) return status;
    file.close();
    if (!file) return target.Failed();
  }
  return target.Publish();
}

}  // namespace pqcached::ctl
