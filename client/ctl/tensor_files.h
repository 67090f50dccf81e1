// Writes the rows of an exported sequence as tensors that other programs read.
//
// Each stored layer has keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim].
// All images are verified first. The output appears when it is complete; one that is there already
// stays, and is an error.
//
// Thread-safe: functions of the files.
#ifndef PQCACHED_CLIENT_CTL_TENSOR_FILES_H_
#define PQCACHED_CLIENT_CTL_TENSOR_FILES_H_

#include <string>

#include "pqcached/client.hpp"

namespace pqcached::ctl {

// Writes one file with the tensors "layers.N.keys" and "layers.N.values" in the rows' dtypes.
//
// Errors: those of the readers of manifests and images; PQC_ALREADY_EXISTS  `output`;
// PQC_RESOURCE_EXHAUSTED  `output` cannot be written
Status WriteSafetensors(const std::string& path, const std::string& output);
// Writes a folder with the files "layer_N_keys.npy" and "layer_N_values.npy". Numpy has no bf16:
// such rows become fp32, with the same values. Errors: as WriteSafetensors
Status WriteNumpy(const std::string& path, const std::string& output);

}  // namespace pqcached::ctl

#endif  // PQCACHED_CLIENT_CTL_TENSOR_FILES_H_
