// pqcachectl segment: sequences of a real pqcached as files, which numpy and safetensors read.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "client/ctl/report.h"
#include "kernels/base/dtype.h"
#include "pqcached/client.hpp"
#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using ctl::Json;
using ctl::Number;
using kernels::DType;
using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::Outcome;
using testing::RunProgram;
using testing::SpecOf;
using testing::TempFolder;

namespace fs = std::filesystem;

constexpr uint64_t kTokens = 300;

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class SegmentTest : public ::testing::Test {
 protected:
  Outcome Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {PQCACHED_CTL, "--endpoint", daemon_.endpoint(),
                                         "--timeout-ms", "60000", "segment"});
    return RunProgram(arguments);
  }
  Json RunJson(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return outcome.exit_code == 0 ? Json::parse(outcome.output) : Json();
  }
  std::string CacheId(const std::string& name) {
    const Outcome outcome =
        RunProgram({PQCACHED_CTL, "--endpoint", daemon_.endpoint(), "ls", "--json"});
    const Json listed = Json::parse(outcome.output);
    for (const Json& cache : listed.at("caches")) {
      if (cache.at("name") == name) return cache.at("cache_id");
    }
    return {};
  }
  std::string path(const std::string& name) const { return images_.File(name); }

  // Makes a sequence of the layers 0 and 2 and exports it.
  void Export(pqc_dtype dtype, const std::string& name) {
    caches_.push_back(Must(client_.OpenCache(SpecOf("cache-" + name, {0, 2}, dtype))));
    sequences_.push_back(Must(caches_.back().CreateSequence()));
    Sequence& sequence = sequences_.back();
    for (const uint32_t layer : {0u, 2u}) {
      ASSERT_TRUE(
          sequence.Ingest(layer, 0, layer_.keys(0, kTokens), layer_.values(0, kTokens)).ok());
    }
    ASSERT_TRUE(sequence.BuildIndex({.iterations = 1}).ok());
    const Json exported = RunJson({"export", std::to_string(sequence.id()), name});
    ASSERT_EQ(Number(exported.at("token_count")), kTokens);
  }
  // Compares [tokens, kv_heads, dim] elements with the rows that were ingested.
  void ExpectElements(const char* data, DType rows, DType dtype, bool keys) {
    const uint32_t dim = keys ? Layer::kKeyDim : Layer::kValueDim;
    size_t index = 0;
    for (uint64_t token = 0; token < kTokens; ++token) {
      for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
        const float* const row = keys ? layer_.key(token, head) : layer_.value(token, head);
        for (uint32_t i = 0; i < dim; ++i, ++index) {
          std::byte stored[4];
          kernels::StoreElement(rows, stored, 0, row[i]);
          ASSERT_EQ(kernels::LoadElement(dtype, reinterpret_cast<const std::byte*>(data), index),
                    kernels::LoadElement(rows, stored, 0))
              << "token " << token << " head " << head << " dim " << i;
        }
      }
    }
  }

  TempFolder images_;
  Daemon daemon_{{"--image-directory", images_.path()}};
  Client client_ = daemon_.OpenClient();
  Layer layer_{kTokens, 1};
  std::vector<Cache> caches_;
  std::vector<Sequence> sequences_;
};

TEST_F(SegmentTest, ImportedPrefixIsSharedByItsTokens) {
  std::vector<uint32_t> tokens(kTokens);
  std::iota(tokens.begin(), tokens.end(), 5u);
  Cache cache = Must(client_.OpenCache(SpecOf("cache-one", {0})));
  {
    Sequence sequence = Must(cache.CreateSequence({.prompt = {tokens}}));
    ASSERT_TRUE(sequence.Ingest(0, 0, layer_.keys(0, kTokens), layer_.values(0, kTokens)).ok());
    ASSERT_TRUE(sequence.BuildIndex({.iterations = 1}).ok());
    EXPECT_EQ(Run({"export", std::to_string(sequence.id()), "one"}).exit_code, 0);
  }
  EXPECT_EQ(RunJson({"list", images_.path()}).at(0).at("name"), "one");
  const Outcome list = Run({"list", images_.path()});
  for (const char* part : {"one", " 300 ", "pq m=4 b=8", "model of cache-one"}) {
    EXPECT_NE(list.output.find(part), std::string::npos) << part << " in\n" << list.output;
  }
  EXPECT_EQ(Run({"verify", path("one")}).exit_code, 0);
  // Another sidecar, which knows nothing of it.
  Daemon other({"--image-directory", images_.path()});
  Client client = other.OpenClient();
  cache = Must(client.OpenCache(SpecOf("cache-one", {0})));
  const auto import = [&] {
    return RunProgram(
        {PQCACHED_CTL, "--endpoint", other.endpoint(), "segment", "import", "1", "one", "--json"});
  };
  Outcome outcome = import();
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(Number(Json::parse(outcome.output)["token_count"]), kTokens);
  EXPECT_EQ(Number(Json::parse(outcome.output)["shared_tokens"]), 0u);
  outcome = import();
  EXPECT_EQ(Number(Json::parse(outcome.output)["shared_tokens"]), 256u) << outcome.output;
  uint64_t stored = 0;
  const Sequence sequence = Must(cache.CreateSequence({.prompt = {tokens}}, &stored));
  EXPECT_EQ(stored, 256u);
}

TEST_F(SegmentTest, ErrorsNameTheFieldAndEndWithOne) {
  Export(PQC_F16, "one");
  const std::string id = std::to_string(sequences_[0].id());
  const auto refused = [&](const std::vector<std::string>& arguments, const std::string& text) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    EXPECT_NE(outcome.output.find(text), std::string::npos) << outcome.output;
  };
  refused({"export", id, "one"}, "name: one is there already");
  refused({"export", id, "../two"}, "name: must be");
  refused({"import", CacheId("cache-one"), "two"}, "name: two");
  refused({"list", path("nowhere")}, "nowhere");
  refused({"verify", path("two")}, "name");
  std::string image = Read(path("one/segment-000000"));
  image[5000] = static_cast<char>(image[5000] ^ 1);
  std::ofstream(path("one/segment-000000"), std::ios::binary) << image;
  refused({"verify", path("one")}, "segment-000000.checksums[0]");
  refused({"to-numpy", path("one"), path("out")}, "segment-000000.checksums[0]");
  refused({"import", CacheId("cache-one"), "one"}, "segment-000000.checksums[0]");
  EXPECT_FALSE(fs::exists(path("out")));
  EXPECT_FALSE(fs::exists(path("out.partial")));
}

TEST_F(SegmentTest, NumpyFilesHaveTheRows) {
  struct Case {
    pqc_dtype dtype;
    DType rows, file;
    const char* descr;
  };
  for (const Case& one : {Case{PQC_F16, DType::kF16, DType::kF16, "'<f2'"},
                          Case{PQC_BF16, DType::kBf16, DType::kF32, "'<f4'"},
                          Case{PQC_F32, DType::kF32, DType::kF32, "'<f4'"}}) {
    const std::string name = "np-" + std::to_string(one.dtype);
    Export(one.dtype, name);
    ASSERT_EQ(Run({"to-numpy", path(name), path(name + "-out")}).exit_code, 0);
    for (const bool keys : {true, false}) {
      const std::string file =
          Read(path(name + "-out/layer_2_") + (keys ? "keys.npy" : "values.npy"));
      ASSERT_EQ(file.substr(0, 8), std::string("\x93NUMPY\x01\x00", 8));
      uint16_t header_bytes = 0;
      std::memcpy(&header_bytes, file.data() + 8, sizeof(header_bytes));
      const size_t begin = 10 + header_bytes;
      EXPECT_EQ(begin % 64, 0u);
      const std::string header = file.substr(10, header_bytes);
      const uint32_t dim = keys ? Layer::kKeyDim : Layer::kValueDim;
      EXPECT_NE(header.find(one.descr), std::string::npos) << header;
      EXPECT_NE(header.find("(300, 2, " + std::to_string(dim)), std::string::npos) << header;
      ASSERT_EQ(file.size() - begin,
                kTokens * Layer::kKvHeads * dim * kernels::DTypeBytes(one.file));
      ExpectElements(file.data() + begin, one.rows, one.file, keys);
    }
    const Outcome again = Run({"to-numpy", path(name), path(name + "-out")});
    EXPECT_EQ(again.exit_code, 1);
    // Numpy itself, where it is installed.
    const Outcome numpy =
        RunProgram({"/usr/bin/env", "python3", "-c",
                    "import sys\ntry:\n import numpy\nexcept ImportError:\n sys.exit(0)\n"
                    "a = numpy.load(sys.argv[1])\nassert a.shape == (300, 2, 64), a.shape",
                    path(name + "-out/layer_0_keys.npy")});
    EXPECT_EQ(numpy.exit_code, 0) << numpy.output;
  }
}

TEST_F(SegmentTest, SafetensorsHaveTheRows) {
  for (const auto& [dtype, rows, text] :
       {std::tuple{PQC_F16, DType::kF16, "F16"}, std::tuple{PQC_BF16, DType::kBf16, "BF16"},
        std::tuple{PQC_F32, DType::kF32, "F32"}}) {
    const std::string name = "st-" + std::to_string(dtype);
    Export(dtype, name);
    const std::string output = path(name + ".safetensors");
    ASSERT_EQ(Run({"to-safetensors", path(name), output}).exit_code, 0);
    const std::string file = Read(output);
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
    ASSERT_EQ(header_bytes % 8, 0u);
    const Json header = Json::parse(file.substr(8, header_bytes));
    EXPECT_EQ(header.size(), 5u);  // two layers' keys and values, and the metadata
    for (const bool keys : {true, false}) {
      const Json& tensor = header.at(keys ? "layers.2.keys" : "layers.2.values");
      EXPECT_EQ(tensor.at("dtype"), text);
      EXPECT_EQ(tensor.at("shape"),
                Json({kTokens, Layer::kKvHeads, keys ? Layer::kKeyDim : Layer::kValueDim}));
      const uint64_t begin = tensor.at("data_offsets").at(0), end = tensor.at("data_offsets").at(1);
      ASSERT_LE(8 + header_bytes + end, file.size());
      EXPECT_EQ(end - begin, kTokens * Layer::kKvHeads *
                                 (keys ? Layer::kKeyDim : Layer::kValueDim) *
                                 kernels::DTypeBytes(rows));
      ExpectElements(file.data() + 8 + header_bytes + begin, rows, rows, keys);
    }
  }
}

}  // namespace
}  // namespace pqcached
