// Images that are broken, foreign, forged or too large, and directories that cannot be written: each
// is refused with the field and the limit, and leaves the store, its memory and the directory as
// they were.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "tests/kvstore/content.h"
#include "tests/kvstore/image/images_fixture.h"
#include "tests/kvstore/small_volume.h"
#include "tests/skip.h"

namespace pqcached::kvstore {
namespace {

using testing::Dump;
using testing::Forge;
using ::testing::HasSubstr;
using testing::HeaderOf;
using testing::ImageDirectory;
using ::testing::IsEmpty;
using testing::kTenant;
using testing::Pq;
using testing::PutManifest;
using testing::ReadFile;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::SmallVolume;
using testing::TestSequence;
using testing::WriteFile;

constexpr char kName[] = "one";

class BadImages : public ::testing::Test {
 protected:
  // Two closed segments with an index, and an open one.
  BadImages() {
    source_.Ingest(256);
    source_.Build(Pq(2, 4));
    source_.Append(20);
    const auto exported =
        source_.store().ExportSequence(kTenant, source_.id(), images_.place(kName));
    EXPECT_TRUE(exported.ok()) << exported.status();
    before_ = Dump(*target_.store);
  }

  std::string manifest_path() const { return images_.file(kName, kManifestName); }
  std::string image_path(uint32_t number) const { return images_.file(kName, ImageName(number)); }

  // Imports, expects this error, and that nothing else has changed.
  void ExpectRefused(absl::StatusCode code, const std::string& field,
                     const std::string& text = "") {
    ExpectRefusedBy(target_, before_, code, field, text);
  }
  void ExpectRefusedBy(SharingStore& target, const std::string& before, absl::StatusCode code,
                       const std::string& field, const std::string& text = "") {
    const auto imported =
        target.store->ImportSequence(kTenant, target.cache_id, images_.place(kName));
    ASSERT_FALSE(imported.ok()) << field;
    EXPECT_EQ(imported.status().code(), code) << imported.status();
    EXPECT_EQ(FieldOf(imported.status()), field) << imported.status();
    EXPECT_THAT(TextOf(imported.status()), HasSubstr(text));
    EXPECT_EQ(Dump(*target.store), before) << imported.status();
  }
  void ExpectStillGood() {
    const auto imported =
        target_.store->ImportSequence(kTenant, target_.cache_id, images_.place(kName));
    ASSERT_TRUE(imported.ok()) << imported.status();
    ASSERT_TRUE(target_.store->EvictSequence(kTenant, imported->sequence_id).ok());
    EXPECT_EQ(Dump(*target_.store), before_);
  }
  void ForgeHeader(const std::function<void(ImageHeader&)>& change) {
    Forge(images_, kName, 0, [&](ImageHeader& header, std::string&) { change(header); });
  }
  void ForgeManifest(const std::function<void(ManifestHeader&)>& change) {
    std::string manifest = ReadFile(manifest_path());
    ManifestHeader header;
    std::memcpy(&header, manifest.data(), sizeof(header));
    change(header);
    PutManifest(manifest, header);
    WriteFile(manifest_path(), manifest);
  }

  ImageDirectory images_;
  TestSequence source_;
  SharingStore target_;
  std::string before_;
};

TEST_F(BadImages, EveryFlippedByteIsFound) {
  ExpectStillGood();
  for (uint32_t number = 0; number < 3; ++number) {
    const std::string good = ReadFile(image_path(number));
    const ImageHeader header = HeaderOf(good);
    // All of the header's fields, and bytes of every section, its padding and the checksums.
    for (size_t i = 0; i < good.size(); i += i < 768 ? 13 : 509) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ 0x10);
      WriteFile(image_path(number), bad);
      const auto imported =
          target_.store->ImportSequence(kTenant, target_.cache_id, images_.place(kName));
      ASSERT_FALSE(imported.ok()) << "byte " << i << " of " << good.size();
      EXPECT_THAT(FieldOf(imported.status()), HasSubstr("segment-00000")) << imported.status();
      EXPECT_TRUE(i < sizeof(header) || absl::IsDataLoss(imported.status())) << imported.status();
    }
    WriteFile(image_path(number), good);
  }
  const std::string good = ReadFile(manifest_path());
  for (size_t i = 0; i < good.size(); i += 7) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    WriteFile(manifest_path(), bad);
    const auto imported =
        target_.store->ImportSequence(kTenant, target_.cache_id, images_.place(kName));
    ASSERT_FALSE(imported.ok()) << "byte " << i << " of the manifest";
    EXPECT_THAT(FieldOf(imported.status()), HasSubstr("manifest")) << imported.status();
  }
  WriteFile(manifest_path(), good);
  EXPECT_EQ(Dump(*target_.store), before_);
  ExpectStillGood();
}

TEST_F(BadImages, NamesThePartWhoseChecksumDiffers) {
  std::string image = ReadFile(image_path(1));
  image[HeaderOf(image).header_bytes + 100] ^= 1;
  WriteFile(image_path(1), image);
  ExpectRefused(absl::StatusCode::kDataLoss, "segment-000001.checksums[0]", "rows of layer 1");
}

TEST_F(BadImages, EveryTruncatedFileIsFound) {
  const std::string image = ReadFile(image_path(0));
  for (const size_t bytes :
       {size_t{0}, size_t{1}, sizeof(ImageHeader) - 1, sizeof(ImageHeader), size_t{4096},
        image.size() / 2, image.size() - 4096, image.size() - 1}) {
    WriteFile(image_path(0), image.substr(0, bytes));
    const auto code = bytes < sizeof(ImageHeader) && bytes > 0 ? absl::StatusCode::kInvalidArgument
                                                               : absl::StatusCode::kDataLoss;
    ExpectRefused(code, "segment-000000.file_bytes");
  }
  WriteFile(image_path(0), image + "more");
  ExpectRefused(absl::StatusCode::kDataLoss, "segment-000000.file_bytes");
  WriteFile(image_path(0), image);
  const std::string manifest = ReadFile(manifest_path());
  for (const size_t bytes : {size_t{0}, size_t{7}, sizeof(ManifestHeader), manifest.size() - 1}) {
    WriteFile(manifest_path(), manifest.substr(0, bytes));
    const auto code = bytes < sizeof(ManifestHeader) ? absl::StatusCode::kInvalidArgument
                                                     : absl::StatusCode::kDataLoss;
    ExpectRefused(code, "manifest.file_bytes");
  }
  WriteFile(manifest_path(), manifest);
  ExpectStillGood();
  unlink(image_path(2).c_str());
  ExpectRefused(absl::StatusCode::kNotFound, "segment-000002");
  unlink(manifest_path().c_str());
  ExpectRefused(absl::StatusCode::kNotFound, "manifest");
}

TEST_F(BadImages, OtherVersionsAndOtherFilesAreRefused) {
  const std::string image = ReadFile(image_path(0)), manifest = ReadFile(manifest_path());
  WriteFile(image_path(0), std::string(8192, 'x'));
  ExpectRefused(absl::StatusCode::kInvalidArgument, "segment-000000.magic", "no segment image");
  WriteFile(manifest_path(), std::string(8192, 'x'));
  ExpectRefused(absl::StatusCode::kInvalidArgument, "manifest.magic", "no manifest");
  const auto restore = [&] {
    WriteFile(image_path(0), image);
    WriteFile(manifest_path(), manifest);
  };
  restore();
  ForgeHeader([](ImageHeader& header) { header.version = 2; });
  ExpectRefused(absl::StatusCode::kUnimplemented, "segment-000000.version",
                "2, this version reads 1");
  restore();
  ForgeHeader([](ImageHeader& header) { header.version = 0; });
  ExpectRefused(absl::StatusCode::kUnimplemented, "segment-000000.version");
  restore();
  ForgeHeader([](ImageHeader& header) { header.layout_version = kLayoutVersion + 1; });
  ExpectRefused(absl::StatusCode::kUnimplemented, "segment-000000.layout_version");
  restore();
  ForgeHeader([](ImageHeader& header) { header.layout_version = kOldestExtentVersion - 1; });
  ExpectRefused(absl::StatusCode::kUnimplemented, "segment-000000.layout_version");
  restore();
  ForgeManifest([](ManifestHeader& header) { header.version = 2; });
  ExpectRefused(absl::StatusCode::kUnimplemented, "manifest.version");
  restore();
  ExpectStillGood();
}

// The checksums of a forged image are right; its fields are not.
TEST_F(BadImages, ForgedFieldsAreRefused) {
  const std::string image = ReadFile(image_path(0)), manifest = ReadFile(manifest_path());
  struct Field {
    const char* name;
    std::function<void(ImageHeader&)> change;
  };
  const Field fields[] = {
      {"header_bytes", [](ImageHeader& h) { h.header_bytes = 1u << 30; }},
      {"data_bytes", [](ImageHeader& h) { h.data_bytes = ~uint64_t{0}; }},
      {"chunk_bytes", [](ImageHeader& h) { h.chunk_bytes = 0; }},
      {"chunk_count", [](ImageHeader& h) { h.chunk_count = ~0u; }},
      {"slot_count", [](ImageHeader& h) { h.slot_count = ~0u; }},
      {"slot_capacity", [](ImageHeader& h) { h.slot_capacity = 100; }},
      {"token_end", [](ImageHeader& h) { h.token_end = 0; }},
      {"first_position", [](ImageHeader& h) { h.first_position = ~0u; }},
      {"is_open", [](ImageHeader& h) { h.is_open = 1; }},
      {"has_codes", [](ImageHeader& h) { h.has_codes = 2; }},
      {"layer_count", [](ImageHeader& h) { h.layer_count = ~0u; }},
      {"index_count", [](ImageHeader& h) { h.index_count = 5; }},
      {"section_count", [](ImageHeader& h) { h.section_count = ~0u; }},
      {"fingerprint_bytes", [](ImageHeader& h) { h.fingerprint_bytes = 257; }},
      {"prefix_begin", [](ImageHeader& h) { h.prefix_begin[3] ^= 1; }},
      {"prefix_end", [](ImageHeader& h) { h.prefix_end[3] ^= 1; }},
  };
  for (const Field& field : fields) {
    ForgeHeader(field.change);
    ExpectRefused(absl::StatusCode::kInvalidArgument, "segment-000000." + std::string(field.name));
    WriteFile(image_path(0), image);
    WriteFile(manifest_path(), manifest);
  }
  ExpectStillGood();
}

// The headers of codebooks and index data in the sections say where their parts are.
TEST_F(BadImages, ForgedContentIsRefused) {
  const std::string image = ReadFile(image_path(0)), manifest = ReadFile(manifest_path());
  ParsedImage parsed;
  ASSERT_TRUE(ParseImage(kernels::Exec(),
                         std::as_bytes(std::span(image)).first(HeaderOf(image).header_bytes),
                         &parsed)
                  .ok());
  int forged = 0;
  for (uint32_t i = 0; i < parsed.sections.size(); ++i) {
    const ImageSection& section = parsed.sections[i];
    if (section.kind == ImageSectionKind::kRows) continue;
    const size_t header_bytes = section.kind == ImageSectionKind::kCodebook
                                    ? offsetof(CodebookHeader, codebook_generation)
                                    : sizeof(IndexDataHeader);
    for (size_t byte = 0; byte < header_bytes; byte += 4) {
      Forge(images_, kName, 0, [&](ImageHeader& header, std::string& bytes) {
        bytes[section.offset_bytes + byte + 3] ^= 0x40;
        const auto all = std::as_bytes(std::span(bytes));
        const uint32_t crc =
            kernels::Crc32c(kernels::Exec(), all.subspan(header.header_bytes, header.data_bytes));
        ASSERT_EQ(header.chunk_count, 1u);
        std::memcpy(bytes.data() + header.header_bytes + header.data_bytes, &crc, sizeof(crc));
        if (section.kind != ImageSectionKind::kCodebook) return;
        const uint32_t own =
            kernels::Crc32c(kernels::Exec(), all.subspan(section.offset_bytes, section.size_bytes));
        std::memcpy(bytes.data() + sizeof(header) + header.layer_count * sizeof(ImageLayer) +
                        i * sizeof(ImageSection) + offsetof(ImageSection, codebook_crc),
                    &own, sizeof(own));
      });
      const auto imported =
          target_.store->ImportSequence(kTenant, target_.cache_id, images_.place(kName));
      EXPECT_TRUE(absl::IsInvalidArgument(imported.status()))
          << "byte " << byte << " of section " << i << ": " << imported.status();
      EXPECT_EQ(Dump(*target_.store), before_);
      ++forged;
      WriteFile(image_path(0), image);
      WriteFile(manifest_path(), manifest);
    }
  }
  EXPECT_GT(forged, 50);
  ExpectStillGood();
}

// Overwrites the codes, counts and lists of an image's index data, with the checksums that then
// belong to it. Returns how many index data there are.
int ForgeIndexData(const ImageDirectory& images, uint32_t number) {
  int forged = 0;
  Forge(images, kName, number, [&](ImageHeader& header, std::string& bytes) {
    auto all = std::as_writable_bytes(std::span(bytes));
    ParsedImage parsed;
    ASSERT_TRUE(ParseImage(kernels::Exec(), all.first(header.header_bytes), &parsed).ok());
    for (const ImageSection& section : parsed.sections) {
      if (section.kind != ImageSectionKind::kIndexData) continue;
      const auto content = all.subspan(section.offset_bytes, section.size_bytes);
      std::memset(content.data() + sizeof(IndexDataHeader), 0xff,
                  content.size() - sizeof(IndexDataHeader));
      ++forged;
    }
    for (uint32_t chunk = 0; chunk < header.chunk_count; ++chunk) {
      const size_t begin = chunk * kImageChunkBytes;
      const uint32_t crc = kernels::Crc32c(
          kernels::Exec(),
          all.subspan(header.header_bytes + begin,
                      std::min<size_t>(kImageChunkBytes, header.data_bytes - begin)));
      std::memcpy(bytes.data() + header.header_bytes + header.data_bytes + chunk * sizeof(crc),
                  &crc, sizeof(crc));
    }
  });
  return forged;
}

// Codes that name no centroid, counts and lists beyond their ends: the index is made again of rows.
TEST(ForgedIndexData, SelectsAsTheRightOneDoes) {
  for (const uint32_t bits : {4u, 6u}) {
    const ImageDirectory images;
    StoreOptions options = SmallOptions();
    options.segment_tokens = 2048;  // cells are counted and listed
    TestSequence source(SmallSpec(), options);
    source.Ingest(2100);
    source.Build(Pq(2, bits), /*iterations=*/2, /*sink_tokens=*/4);
    const auto exported = source.store().ExportSequence(kTenant, source.id(), images.place(kName));
    ASSERT_TRUE(exported.ok()) << exported.status();
    for (uint32_t number = 0; number < exported->image_count; ++number) {
      EXPECT_EQ(ForgeIndexData(images, number), 2);
    }
    SharingStore target(SmallSpec(), options);
    const auto imported =
        target.store->ImportSequence(kTenant, target.cache_id, images.place(kName));
    ASSERT_TRUE(imported.ok()) << imported.status();
    for (int i = 0; i < 8; ++i) {
      const testing::Floats query = source.RandomQuery(source.layer(3));
      const Query wanted{.layer = 3, .query_position = 2099, .queries = query.view()};
      const Selection selection{
          .index = Pq(2, bits), .budget_kind = BudgetKind::kCount, .budget_count = 40};
      const auto theirs = source.store().TopK(kTenant, source.id(), wanted, selection);
      const auto ours = target.store->TopK(kTenant, imported->sequence_id, wanted, selection);
      ASSERT_TRUE(theirs.ok()) << theirs.status();
      ASSERT_TRUE(ours.ok()) << ours.status();
      EXPECT_EQ(ours->positions, theirs->positions);
    }
  }
}

// Sets the last bytes of a header's padding so that its checksum is `wanted`: CRCs are linear.
void ForceHeaderCrc(std::string& image, uint32_t wanted) {
  const size_t header_bytes = HeaderOf(image).header_bytes;
  const auto bytes = std::as_writable_bytes(std::span(image)).first(header_bytes);
  const auto padding = bytes.last(sizeof(uint32_t));
  const auto crc_with = [&](uint32_t word) {
    std::memcpy(padding.data(), &word, sizeof(word));
    return HeaderCrc(kernels::Exec(), bytes);
  };
  const uint32_t start = crc_with(0);
  uint32_t changes[32], words[32];  // [leading bit of the change]
  std::fill_n(changes, 32, 0u);
  for (uint32_t bit = 0; bit < 32; ++bit) {
    uint32_t word = 1u << bit, change = crc_with(word) ^ start;
    for (int lead = 31; lead >= 0 && change != 0; --lead) {
      if ((change >> lead & 1u) == 0) continue;
      if (changes[lead] == 0) {
        changes[lead] = change;
        words[lead] = word;
        break;
      }
      change ^= changes[lead];
      word ^= words[lead];
    }
  }
  uint32_t word = 0, change = start ^ wanted;
  for (int lead = 31; lead >= 0; --lead) {
    if ((change >> lead & 1u) == 0) continue;
    change ^= changes[lead];
    word ^= words[lead];
  }
  ASSERT_EQ(crc_with(word), wanted);
}

// The sizes of extents are computed before the images are read.
TEST_F(BadImages, ReplacedWhileTheyAreReadAreRefused) {
  source_.NewSequence();
  source_.Ingest(256);
  ASSERT_TRUE(source_.store().ExportSequence(kTenant, source_.id(), images_.place("flat")).ok());
  const std::string path = images_.file("flat", ImageName(1));
  std::string image = ReadFile(path);
  ImageHeader header = HeaderOf(image);
  header.slot_capacity = 64 * kBlockTokens;
  std::memcpy(image.data(), &header, sizeof(header));
  ForceHeaderCrc(image, header.header_crc);
  ImagePlace place = images_.place("flat");
  place.keep_going = [&] {  // called while the first image is read
    WriteFile(path, image);
    return true;
  };
  const auto imported = target_.store->ImportSequence(kTenant, target_.cache_id, place);
  EXPECT_TRUE(absl::IsDataLoss(imported.status())) << imported.status();
  EXPECT_EQ(FieldOf(imported.status()), "segment-000001.file_bytes");
  EXPECT_EQ(Dump(*target_.store), before_);
}

TEST_F(BadImages, ImagesOfAnotherExportAreRefused) {
  ASSERT_TRUE(source_.store().ExportSequence(kTenant, source_.id(), images_.place("same")).ok());
  source_.NewSequence();
  source_.Ingest(128);
  ASSERT_TRUE(source_.store().ExportSequence(kTenant, source_.id(), images_.place("other")).ok());
  const std::string image = ReadFile(image_path(0));
  WriteFile(image_path(0), ReadFile(images_.file("other", ImageName(0))));
  ExpectRefused(absl::StatusCode::kDataLoss, "segment-000000.file_bytes", "another export");
  WriteFile(image_path(0), ReadFile(image_path(1)));  // of the same size
  ExpectRefused(absl::StatusCode::kDataLoss, "segment-000000.image_crc", "another export");
  WriteFile(image_path(0), image);
  ExpectStillGood();
}

TEST_F(BadImages, OtherModelsTenantsAndShapesAreRefused) {
  const auto refused = [&](const std::function<void(CacheSpec&)>& change, const std::string& field,
                           const std::string& text) {
    CacheSpec spec = SmallSpec();
    change(spec);
    SharingStore target(spec);
    ExpectRefusedBy(target, Dump(*target.store), absl::StatusCode::kFailedPrecondition, field,
                    text);
  };
  refused([](CacheSpec& spec) { spec.model_fingerprint = "other"; }, "model_fingerprint",
          "\"other\"");
  refused([](CacheSpec& spec) { spec.groups[0].key_dim = 64; }, "layer_groups",
          "layers[0].key_dim is 32; the cache has 64");
  refused([](CacheSpec& spec) { spec.groups[0].value_dim = 48; }, "layer_groups", "value_dim");
  refused([](CacheSpec& spec) { spec.groups[0].kv_heads = 1; }, "layer_groups", "kv_heads");
  refused([](CacheSpec& spec) { spec.groups[0].query_heads = 2; }, "layer_groups", "query_heads");
  refused([](CacheSpec& spec) { spec.groups[0].dtype = kernels::DType::kF16; }, "layer_groups",
          "dtype");
  refused(
      [](CacheSpec& spec) {
        spec.groups[0].layers = {1, 2};
      },
      "layer_groups", "layers[1].layer is 3; the cache has 2");
  refused([](CacheSpec& spec) { spec.groups[0].layers = {1}; }, "layer_groups", "2 stored layers");
  refused([](CacheSpec& spec) { spec.groups[0].rope.theta = 1e6; }, "layer_groups", "RoPE");
  const auto cache = target_.store->OpenCache("other", SmallSpec());
  ASSERT_TRUE(cache.ok());
  const std::string before = Dump(*target_.store);
  const auto imported =
      target_.store->ImportSequence("other", cache->cache_id, images_.place(kName));
  EXPECT_TRUE(absl::IsFailedPrecondition(imported.status())) << imported.status();
  EXPECT_EQ(FieldOf(imported.status()), "tenant");
  EXPECT_EQ(Dump(*target_.store), before);
  EXPECT_TRUE(absl::IsNotFound(
      target_.store->ImportSequence("other", target_.cache_id, images_.place(kName)).status()));
  EXPECT_TRUE(absl::IsNotFound(
      source_.store().ExportSequence("other", source_.id(), images_.place("two")).status()));
}

TEST_F(BadImages, PoolWithoutRoomStaysAsItIs) {
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{1} << 20;
  SharingStore target(spec);
  ExpectRefusedBy(target, Dump(*target.store), absl::StatusCode::kResourceExhausted, "",
                  "bytes short");
}

TEST_F(BadImages, CancelledImportLeavesNothing) {
  int calls = 0;
  ImagePlace place = images_.place(kName);
  place.keep_going = [&] { return ++calls < 2; };
  EXPECT_TRUE(
      absl::IsCancelled(target_.store->ImportSequence(kTenant, target_.cache_id, place).status()));
  EXPECT_EQ(Dump(*target_.store), before_);
}

TEST_F(BadImages, NamesDoNotLeadOutOfTheDirectory) {
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("../one"),
        std::string("a/b"), std::string("/etc"), std::string(".hidden"), std::string("a\nb"),
        std::string("a\0b", 3), std::string(65, 'x')}) {
    const auto exported =
        source_.store().ExportSequence(kTenant, source_.id(), images_.place(name));
    EXPECT_TRUE(absl::IsInvalidArgument(exported.status())) << exported.status();
    EXPECT_EQ(FieldOf(exported.status()), "name");
    const auto imported =
        target_.store->ImportSequence(kTenant, target_.cache_id, images_.place(name));
    EXPECT_TRUE(absl::IsInvalidArgument(imported.status())) << imported.status();
    EXPECT_EQ(FieldOf(imported.status()), "name");
  }
  // Symbolic links are not followed, neither to folders nor to files.
  ASSERT_EQ(symlink(kName, images_.file("link", "").substr(0, images_.path().size() + 5).c_str()),
            0);
  EXPECT_TRUE(absl::IsNotFound(
      target_.store->ImportSequence(kTenant, target_.cache_id, images_.place("link")).status()));
  ASSERT_EQ(rename(image_path(0).c_str(), images_.file(kName, "moved").c_str()), 0);
  ASSERT_EQ(symlink("moved", image_path(0).c_str()), 0);
  ExpectRefused(absl::StatusCode::kNotFound, "segment-000000");
  ASSERT_EQ(unlink(image_path(0).c_str()), 0);
  ASSERT_EQ(mkfifo(image_path(0).c_str(), 0600), 0);  // opening one must not wait for a writer
  ExpectRefused(absl::StatusCode::kInvalidArgument, "segment-000000", "no regular file");
}

TEST_F(BadImages, ExportsWithoutPlaceOrTokensAreRefused) {
  const auto taken = source_.store().ExportSequence(kTenant, source_.id(), images_.place(kName));
  EXPECT_TRUE(absl::IsAlreadyExists(taken.status())) << taken.status();
  EXPECT_EQ(FieldOf(taken.status()), "name");
  for (const std::string& directory : {std::string(), std::string("/nowhere/at/all")}) {
    const auto exported = source_.store().ExportSequence(kTenant, source_.id(),
                                                         {.directory = directory, .name = "two"});
    EXPECT_TRUE(absl::IsFailedPrecondition(exported.status())) << exported.status();
    EXPECT_EQ(FieldOf(exported.status()), "image_directory");
  }
  ImagePlace place = images_.place("two");
  place.keep_going = [] { return false; };
  EXPECT_TRUE(
      absl::IsCancelled(source_.store().ExportSequence(kTenant, source_.id(), place).status()));
  source_.NewSequence();
  const auto empty = source_.store().ExportSequence(kTenant, source_.id(), images_.place("two"));
  EXPECT_TRUE(absl::IsFailedPrecondition(empty.status())) << empty.status();
  EXPECT_EQ(FieldOf(empty.status()), "token_count");
  EXPECT_EQ(images_.names(), std::vector<std::string>{kName});
}

TEST_F(BadImages, PartsOfAnEarlierProcessAreRemoved) {
  const std::string partial = images_.path() + "/.partial-7-1-two";
  ASSERT_EQ(mkdir(partial.c_str(), 0700), 0);
  WriteFile(partial + "/segment-000000", "begun");
  EXPECT_TRUE(RemovePartialImages(images_.path()).ok());
  EXPECT_EQ(images_.names(), std::vector<std::string>{kName});
  // A running export goes on, whichever sidecar starts with the same directory meanwhile.
  ImagePlace place = images_.place("two");
  place.keep_going = [&] { return RemovePartialImages(images_.path()).ok(); };
  const auto exported = source_.store().ExportSequence(kTenant, source_.id(), place);
  EXPECT_TRUE(exported.ok()) << exported.status();
  EXPECT_TRUE(target_.store->ImportSequence(kTenant, target_.cache_id, images_.place("two")).ok());
  std::filesystem::remove_all(images_.path() + "/two");
  EXPECT_TRUE(absl::IsFailedPrecondition(RemovePartialImages("/nowhere/at/all")));
}

// The volume has room for a part of the images only.
TEST(FullImageDirectory, KeepsNoPartOfAnExport) {
  const SmallVolume volume(size_t{1} << 20);
  if (!volume.valid()) PQC_SKIP("root") << "this process may not mount";
  TestSequence source;
  source.Ingest(4000);
  const std::string before = Dump(source.store());
  const auto exported = source.store().ExportSequence(kTenant, source.id(),
                                                      {.directory = volume.path(), .name = "one"});
  EXPECT_TRUE(absl::IsResourceExhausted(exported.status())) << exported.status();
  EXPECT_EQ(FieldOf(exported.status()), "image_directory");
  EXPECT_THAT(TextOf(exported.status()), HasSubstr("segment-0000"));
  EXPECT_TRUE(std::filesystem::is_empty(volume.path()));
  EXPECT_EQ(Dump(source.store()), before);
  source.Truncate(100);  // one that fits is exported
  EXPECT_TRUE(source.store()
                  .ExportSequence(kTenant, source.id(), {.directory = volume.path(), .name = "one"})
                  .ok());
}

}  // namespace
}  // namespace pqcached::kvstore
