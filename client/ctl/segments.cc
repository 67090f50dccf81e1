#include "client/ctl/segments.h"

#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "client/ctl/report.h"
#include "client/ctl/table.h"
#include "kvstore/read/image/folder.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::ctl {
namespace {

namespace fs = std::filesystem;

Json RowOf(const std::string& name, const kvstore::ParsedManifest& manifest) {
  Json indexes = Json::array();
  for (const kvstore::IndexDescriptor& index : manifest.indexes()) {
    const bool known = kvstore::FindIndexType(index) != nullptr;
    indexes.push_back(known ? kvstore::NameOf(index) : "unknown");
  }
  uint64_t bytes = manifest.header.file_bytes;
  for (const kvstore::ManifestImage& image : manifest.images) bytes += image.file_bytes;
  return {{"name", name},
          {"token_count", manifest.header.token_count},
          {"image_count", manifest.header.image_count},
          {"bytes", bytes},
          {"model_fingerprint", std::string(manifest.fingerprint())},
          {"has_names", !manifest.names.empty()},
          {"indexes", std::move(indexes)}};
}

std::string JoinIndexes(const Json& indexes) {
  std::string text;
  for (const Json& index : indexes) text += (text.empty() ? "" : ", ") + index.get<std::string>();
  return text.empty() ? "-" : text;
}

}  // namespace

Status StatusOf(const std::string& path, const kvstore::Refusal& refusal) {
  return Status(static_cast<pqc_status>(refusal.code), path + ": " + refusal.message());
}

Result<Json> ListSegments(const std::string& directory) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator each(directory, error), end; !error && each != end;
       each.increment(error)) {
    const std::string name = each->path().filename();
    if (!name.starts_with('.') && each->is_directory(error)) names.push_back(name);
  }
  if (error) return Status(PQC_NOT_FOUND, directory + ": " + error.message());
  std::sort(names.begin(), names.end());
  Json rows = Json::array();
  for (const std::string& name : names) {
    kvstore::ImageFolder folder;
    const kvstore::Refusal refusal =
        kvstore::ImageFolder::Open({}, AT_FDCWD, (fs::path(directory) / name).c_str(), &folder);
    rows.push_back(refusal.ok() ? RowOf(name, folder.manifest())
                                : Json{{"name", name}, {"error", refusal.message()}});
  }
  return rows;
}

Result<Json> VerifySegments(const std::string& path) {
  kvstore::ImageFolder folder;
  kvstore::Refusal refusal = kvstore::ImageFolder::Open({}, AT_FDCWD, path.c_str(), &folder);
  for (uint32_t number = 0; refusal.ok() && number < folder.image_count(); ++number) {
    kvstore::SegmentImageReader reader;
    refusal = folder.OpenImage(number, &reader);
    if (!refusal.ok()) break;
    refusal = reader.Verify();
    if (!refusal.ok()) {
      refusal.field = kvstore::JoinFields(kvstore::ImageName(number), refusal.field);
    }
  }
  if (!refusal.ok()) return StatusOf(path, refusal);
  return RowOf(path, folder.manifest());
}

std::string ReportSegments(const Json& rows) {
  Table table({"NAME", "TOKENS", "IMAGES", "SIZE", "INDEXES", "MODEL"});
  for (const Json& row : rows) {
    const std::string name = row.at("name");
    if (row.contains("error")) {
      table.Add({name, "-", "-", "-", "-", row.at("error").get<std::string>()});
      continue;
    }
    table.Add({name, std::to_string(Number(row.at("token_count"))),
               std::to_string(Number(row.at("image_count"))), FormatBytes(Number(row.at("bytes"))),
               JoinIndexes(row.at("indexes")), row.at("model_fingerprint").get<std::string>()});
  }
  return table.empty() ? "no exported sequences\n" : table.ToText();
}

}  // namespace pqcached::ctl
