// The registration of index types: names, parameters and their limits, as users of every API see them.
#include "kvstore/read/indexes/index_types.h"

#include <set>
#include <string>

#include "gtest/gtest.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kKeyDim = 256;

TEST(IndexTypes, AreFoundByNameAndKind) {
  std::set<std::string_view> names;
  for (const IndexType* type : IndexTypes()) {
    EXPECT_EQ(FindIndexType(type->info().name), type);
    EXPECT_EQ(FindIndexType(DefaultIndex(*type)), type);
    EXPECT_TRUE(names.insert(type->info().name).second) << type->info().name;
    EXPECT_FALSE(type->info().text.empty());
  }
  EXPECT_EQ(names, (std::set<std::string_view>{"pq", "flat", "graph", "clusters"}));
  EXPECT_EQ(FindIndexType("hnsw"), nullptr);
  EXPECT_EQ(FindIndexType({static_cast<IndexKind>(77)}), nullptr);
}

TEST(IndexTypes, DefaultsFitAndEveryParameterIsStored) {
  for (const IndexType* type : IndexTypes()) {
    const IndexDescriptor standard = DefaultIndex(*type);
    EXPECT_TRUE(CheckIndex(standard, kKeyDim, "index").ok()) << type->info().name;
    const auto parameters = type->info().parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(type->ValueOf(standard, i), parameters[i].default_value) << parameters[i].name;
      EXPECT_FALSE(parameters[i].text.empty());
      for (const uint32_t value : {parameters[i].least, parameters[i].most}) {
        IndexDescriptor changed = standard;
        type->SetValue(&changed, i, value);
        EXPECT_EQ(type->ValueOf(changed, i), value) << parameters[i].name;
        EXPECT_TRUE(CheckIndex(changed, kKeyDim, "index").ok()) << NameOf(changed);
        for (size_t other = 0; other < parameters.size(); ++other) {
          if (other == i) continue;
          EXPECT_EQ(type->ValueOf(changed, other), parameters[other].default_value);
        }
      }
    }
  }
}

TEST(IndexTypes, ValuesOutOfRangeAreRefusedByField) {
  for (const IndexType* type : IndexTypes()) {
    const auto parameters = type->info().parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      IndexDescriptor index = DefaultIndex(*type);
      type->SetValue(&index, i, parameters[i].most + 1);
      const Refusal refusal = CheckIndex(index, kKeyDim, "index");
      EXPECT_EQ(refusal.code, StatusCode::kInvalidArgument);
      EXPECT_EQ(refusal.field,
                JoinFields(JoinFields("index", type->info().name), parameters[i].name));
      EXPECT_NE(refusal.text.find("must " + ValuesOf(parameters[i])), std::string::npos)
          << refusal.text;
    }
  }
}

TEST(IndexTypes, ValuesReadAsPeopleWriteThem) {
  const auto parameters = FindIndexType("pq")->info().parameters;
  EXPECT_EQ(ValuesOf(parameters[0]), "lie in [1, 128]");
  EXPECT_EQ(ValuesOf(parameters[1]), "lie in [1, 8]");
  EXPECT_EQ(ValuesOf(parameters[2]), "be 0 (pairs) or 1 (contiguous) or 2 (weighted)");
}

TEST(IndexTypes, ValuesMayBeListed) {
  IndexParameter powers{.name = "n", .text = "", .least = 1, .most = 8, .power_of_two = true};
  EXPECT_EQ(ValuesOf(powers), "be 1, 2, 4 or 8");
  EXPECT_TRUE(Allows(powers, 4));
  EXPECT_FALSE(Allows(powers, 3));
}

TEST(IndexTypes, PqMustDivideTheKeyDimension) {
  const Refusal refusal = CheckIndex({IndexKind::kPq, 16, 4}, 40, "spec.default_index");
  EXPECT_EQ(refusal.field, "spec.default_index.pq.subspaces");
  EXPECT_EQ(refusal.text, "16, must divide key_dim, 40");
  EXPECT_EQ(CheckIndex({IndexKind::kPq, 40, 4}, 40, "i").text,
            "40, must be at most half of key_dim, 40");
  EXPECT_TRUE(CheckIndex({IndexKind::kPq, 3, 1}, 48, "i").ok());
}

TEST(IndexTypes, FlatHasNoParametersAndNoBuild) {
  EXPECT_FALSE(IsBuilt({}));
  EXPECT_TRUE(IsBuilt({IndexKind::kPq, 2, 6}));
  EXPECT_FALSE(IsBuilt({static_cast<IndexKind>(77)}));
  EXPECT_EQ(CheckIndex({IndexKind::kFlat, 2, 0}, kKeyDim, "index").field, "index");
  EXPECT_EQ(CheckIndex({static_cast<IndexKind>(77)}, kKeyDim, "index").field, "index.kind");
}

}  // namespace
}  // namespace pqcached::kvstore
