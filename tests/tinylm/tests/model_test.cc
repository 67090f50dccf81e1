// Loading a model: a damaged file is refused with a message that names it, whatever is wrong.

#include "tests/tinylm/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

namespace tinylm {
namespace {

using nlohmann::json;
using testing::HasSubstr;

// A copy of the model in a directory of its own, to be damaged.
class ModelTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "tinylm_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
    std::filesystem::copy(TINYLM_DIRECTORY "/model", directory_);
    std::ifstream in(directory_ + "/model.safetensors", std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
    std::memcpy(&header_bytes_, bytes_.data(), 8);
    header_ = json::parse(bytes_.substr(8, header_bytes_));
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  void WriteWeights(const std::string& bytes) const {
    std::ofstream(directory_ + "/model.safetensors", std::ios::binary) << bytes;
  }

  // Writes the weights with a changed header and loads them.
  std::string ErrorWithHeader(const std::function<void(json&)>& change) const {
    json header = header_;
    change(header);
    const std::string text = header.dump();
    const uint64_t size = text.size();
    WriteWeights(std::string(reinterpret_cast<const char*>(&size), 8) + text +
                 bytes_.substr(8 + header_bytes_));
    return Error();
  }

  std::string Error() const {
    try {
      LoadModel(directory_);
      return "";
    } catch (const std::runtime_error& error) {
      return error.what();
    }
  }

  std::string directory_, bytes_;
  uint64_t header_bytes_ = 0;
  json header_;
};

constexpr char kTensor[] = "model.layers.2.self_attn.k_proj.weight";

TEST_F(ModelTest, LoadsTheModelOfTheConfig) {
  const Model model = LoadModel(directory_);
  EXPECT_EQ(model.config.full_layers(), (std::vector<uint32_t>{1, 3}));
  EXPECT_EQ(model.config.group_size(), 2u);
  EXPECT_EQ(model.layers.size(), 4u);
  EXPECT_THAT(model.fingerprint, HasSubstr("tinylm-"));
}

TEST_F(ModelTest, OtherWeightsHaveAnotherFingerprint) {
  const std::string before = LoadModel(directory_).fingerprint;
  bytes_.back() = static_cast<char>(bytes_.back() ^ 1);
  WriteWeights(bytes_);
  EXPECT_NE(LoadModel(directory_).fingerprint, before);
}

TEST_F(ModelTest, AMissingTensorIsNamed) {
  EXPECT_THAT(ErrorWithHeader([](json& header) { header.erase(kTensor); }), HasSubstr(kTensor));
}

TEST_F(ModelTest, AnotherShapeIsNamed) {
  EXPECT_THAT(ErrorWithHeader([](json& header) {
                header[kTensor]["shape"] = {256, 128};
              }),
              HasSubstr("[256,128]"));
}

TEST_F(ModelTest, OffsetsOutsideTheFileAreRefused) {
  for (const auto& offsets :
       {json{6000000, 6065536}, json{65536, 0}, json{0, 18446744073709551615u}}) {
    EXPECT_THAT(ErrorWithHeader([&](json& header) { header[kTensor]["data_offsets"] = offsets; }),
                HasSubstr("outside of the file"));
  }
}

TEST_F(ModelTest, ASizeThatIsNotTheShapesIsRefused) {
  EXPECT_THAT(ErrorWithHeader([](json& header) {
                header[kTensor]["data_offsets"] = {0, 65534};
              }),
              HasSubstr("size"));
}

TEST_F(ModelTest, AnUnknownDtypeIsRefused) {
  EXPECT_THAT(ErrorWithHeader([](json& header) { header[kTensor]["dtype"] = "I64"; }),
              HasSubstr("dtype"));
}

TEST_F(ModelTest, TruncatedFilesAreRefused) {
  for (const size_t size : {size_t{0}, size_t{7}, size_t{100}, bytes_.size() - 1}) {
    SCOPED_TRACE(size);
    WriteWeights(bytes_.substr(0, size));
    EXPECT_THAT(Error(), HasSubstr(directory_));
  }
}

TEST_F(ModelTest, AHeaderThatIsNoJsonIsRefused) {
  bytes_[8] = '}';
  WriteWeights(bytes_);
  EXPECT_THAT(Error(), HasSubstr(directory_));
}

TEST_F(ModelTest, AConfigThatTheEngineWasNotMadeForIsRefused) {
  std::ifstream in(directory_ + "/config.json");
  const json config = json::parse(in);
  const std::pair<json, const char*> cases[] = {
      {{{"layer_types", {"sliding", "linear"}}}, "linear"},
      {{{"head_dim", 96}}, "sizes"},
      {{{"num_key_value_heads", 0}}, "sizes"},
      {{{"num_key_value_heads", 3}}, "sizes"},
      {{{"hidden_size", "many"}}, "config.json"},
      {{{"rope_theta", nullptr}}, "config.json"},
  };
  for (const auto& [change, message] : cases) {
    SCOPED_TRACE(change.dump());
    json changed = config;
    changed.update(change);
    std::ofstream(directory_ + "/config.json") << changed;
    EXPECT_THAT(Error(), HasSubstr(message));
  }
}

}  // namespace
}  // namespace tinylm
