// Exported sequences as files: folders of segment images, which are read without a sidecar.
//
// Thread-safe: functions of the files.
#ifndef PQCACHED_CLIENT_CTL_SEGMENTS_H_
#define PQCACHED_CLIENT_CTL_SEGMENTS_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "kvstore/read/refusal.h"
#include "pqcached/client.hpp"

namespace pqcached::ctl {

using Json = nlohmann::json;

// Returns a reader's refusal as a status; `path` stands before its field.
Status StatusOf(const std::string& path, const kvstore::Refusal& refusal);

// Returns a row for each exported sequence in a directory. A row of one that cannot be read has an
// "error". Errors: PQC_NOT_FOUND  the directory
Result<Json> ListSegments(const std::string& directory);
// Reads all bytes of an exported sequence, and compares them with their checksums. Returns its row.
//
// Errors: those of the readers of manifests and images (kvstore/read/image)
Result<Json> VerifySegments(const std::string& path);

// Formats rows of ListSegments.
std::string ReportSegments(const Json& rows);

}  // namespace pqcached::ctl

#endif  // PQCACHED_CLIENT_CTL_SEGMENTS_H_
