// Structs of the C ABI grow: what earlier and later versions pass is read by the rule of client.h.
#include <gtest/gtest.h>

#include <cstring>

#include "client/base/arguments.h"
#include "client/base/error.h"

namespace pqcached::client {
namespace {

// A struct as its first release had it, as this release has it, and as a later one will.
struct First {
  size_t struct_size;
  uint64_t a;
};
struct Now {
  size_t struct_size;
  uint64_t a;
  uint64_t b;
};
struct Later {
  size_t struct_size;
  uint64_t a;
  uint64_t b;
  uint64_t c;
};

}  // namespace

template <>
inline constexpr size_t kMinimumBytes<Now> = sizeof(First);

namespace {

template <class Struct>
const Now* AsNow(const Struct& other) {
  return reinterpret_cast<const Now*>(&other);
}

template <class Struct>
Now* AsNow(Struct& other) {
  return reinterpret_cast<Now*>(&other);
}

TEST(StructsTest, FieldsThatAnEarlierVersionLacksAreZero) {
  struct {
    First first = {sizeof(First), 7};
    uint64_t behind = ~uint64_t{0};  // memory of the caller that is no part of the struct
  } caller;
  Now read = {0, 1, 1};
  ASSERT_EQ(ReadStruct(AsNow(caller.first), "it", &read), PQC_OK);
  EXPECT_EQ(read.struct_size, sizeof(Now));
  EXPECT_EQ(read.a, 7u);
  EXPECT_EQ(read.b, 0u);
}

TEST(StructsTest, AnEarlierVersionBelowTheFirstReleaseIsRefused) {
  First caller = {sizeof(First) - 1, 7};
  Now read;
  EXPECT_EQ(ReadStruct(AsNow(caller), "it", &read), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(LastRefusal().field, "it.struct_size");
}

TEST(StructsTest, FieldsOfALaterVersionMustBeZero) {
  Later caller = {sizeof(Later), 7, 8, 0};
  Now read;
  ASSERT_EQ(ReadStruct(AsNow(caller), "it", &read), PQC_OK);
  EXPECT_EQ(read.struct_size, sizeof(Now));
  EXPECT_EQ(read.b, 8u);
  caller.c = 1;
  EXPECT_EQ(ReadStruct(AsNow(caller), "it", &read), PQC_UNIMPLEMENTED);
}

TEST(StructsTest, AnsweredFieldsEndWhereTheCallersStructEnds) {
  struct {
    First first = {sizeof(First), 0};
    uint64_t behind = 99;
  } earlier;
  WriteStruct(Now{sizeof(Now), 7, 8}, AsNow(earlier.first));
  EXPECT_EQ(earlier.first.struct_size, sizeof(First));
  EXPECT_EQ(earlier.first.a, 7u);
  EXPECT_EQ(earlier.behind, 99u);

  Later later = {sizeof(Later), 0, 0, 0};
  WriteStruct(Now{sizeof(Now), 7, 8}, AsNow(later));
  EXPECT_EQ(later.struct_size, sizeof(Later));
  EXPECT_EQ(later.b, 8u);
  EXPECT_EQ(later.c, 0u);
}

TEST(StructsTest, ArraysHaveTheDistanceOfTheCallersVersion) {
  const First earlier[] = {{sizeof(First), 1}, {sizeof(First), 2}, {sizeof(First), 3}};
  const Later later[] = {
      {sizeof(Later), 1, 4, 0}, {sizeof(Later), 2, 5, 0}, {sizeof(Later), 3, 6, 0}};
  for (uint32_t i = 0; i < 3; ++i) {
    Now read;
    ASSERT_EQ(ReadElement(AsNow(earlier[0]), i, "it", &read), PQC_OK);
    EXPECT_EQ(read.a, i + 1);
    EXPECT_EQ(read.b, 0u);
    ASSERT_EQ(ReadElement(AsNow(later[0]), i, "it", &read), PQC_OK);
    EXPECT_EQ(read.a, i + 1);
    EXPECT_EQ(read.b, i + 4);
  }
}

TEST(StructsTest, ElementsOfDifferentSizesAreRefused) {
  const First caller[] = {{sizeof(First), 1}, {sizeof(Later), 2}};
  Now read;
  EXPECT_EQ(ReadElement(AsNow(caller[0]), 1, "it[1]", &read), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(LastRefusal().field, "it[1].struct_size");
}

TEST(StructsTest, NullIsRefused) {
  Now read;
  EXPECT_EQ(ReadStruct<Now>(nullptr, "it", &read), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(ReadElement<Now>(nullptr, 0, "it", &read), PQC_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace pqcached::client
