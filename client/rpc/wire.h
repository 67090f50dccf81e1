// Converts values of the C ABI to protobuf messages and back. Pure; thread-safe.
#ifndef PQCACHED_CLIENT_RPC_WIRE_H_
#define PQCACHED_CLIENT_RPC_WIRE_H_

#include <cstdint>
#include <string>

#include "client/base/pack.h"
#include "client/base/remote.h"
#include "client/base/structs.h"
#include "client/rpc/refusal.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "pqcached/v1/types.pb.h"

namespace pqcached::client {

v1::DType ToWire(DType dtype);
v1::RowPart ToWire(RowPart part);

// Copies a struct of the client library, which may have another version of it. Some callers
// leave the size 0.
template <class Struct>
grpc::Status ReadStruct(const Struct& from, const char* name, Struct* to) {
  const size_t size = SizeOf(&from) == 0 ? kMinimumBytes<Struct> : SizeOf(&from);
  if (CopyStruct(&from, size, to) == StructFit::kKnown) return grpc::Status::OK;
  return Refuse(grpc::StatusCode::UNIMPLEMENTED, name,
                "a field that libpqcached_rpc does not know is set; install the library of the "
                "client's release");
}

// Returns false, and sets nothing, for PQC_INDEX_DEFAULT.
bool ToWire(const pqc_index& index, v1::IndexSpec* spec);
void ToWire(const pqc_layer_group& group, v1::LayerGroup* message);
void ToWire(const QueryView& query, v1::Query* message);

// Sets nothing for a lease of id 0; `message` returns the message to fill in.
template <class MakeMessage>
void ToWire(const LeaseView& lease, const MakeMessage& message) {
  if (lease.lease_id == 0) return;
  message()->set_lease_id(lease.lease_id);
  message()->set_known_version(lease.known_version);
}

void WriteImage(const v1::Attachment& attachment, const ImageSink& sink);

// Packs indices [begin, end) of the first dimension contiguously. A tensor in staging is converted
// as a whole, as a reference.
void ToWire(const TensorView& tensor, uint64_t begin, uint64_t end, v1::Tensor* message);
void ToWire(const RowBlock& rows, v1::LayerRows* message);
void ToWire(const pqc_row_options& names, v1::TokenNames* message);

// Returns whether a message, with `data_bytes` bytes of inline data, is a contiguous tensor of
// exactly this dtype and shape; if not, sets the reason.
bool IsTensorOf(const v1::Tensor& tensor, uint64_t data_bytes, DType dtype,
                std::initializer_list<uint64_t> shape, std::string* reason);
// Returns the bytes of a contiguous tensor of exactly this dtype and shape; null, with the reason,
// for any other.
const std::byte* TensorBytes(const v1::Tensor& tensor, DType dtype,
                             std::initializer_list<uint64_t> shape, std::string* reason);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_RPC_WIRE_H_
