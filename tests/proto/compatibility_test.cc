// The wire contract only ever grows: today's descriptor set is held against the previous one, and
// each kind of break is shown to be found.
#include "tests/proto/compatibility.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace pqcached::tests {
namespace {

using google::protobuf::FieldDescriptorProto;
using google::protobuf::FileDescriptorSet;
using testing::ElementsAre;
using testing::IsEmpty;

FileDescriptorSet Load(const char* path) {
  FileDescriptorSet set;
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  EXPECT_TRUE(set.ParseFromIstream(&file)) << path;
  return set;
}

TEST(ProtoCompatibilityTest, CurrentContractOnlyAddsToThePreviousOne) {
  const FileDescriptorSet previous = Load(PQCACHED_PREVIOUS_DESCRIPTOR_SET);
  const FileDescriptorSet current = Load(PQCACHED_CURRENT_DESCRIPTOR_SET);
  ASSERT_GE(previous.file_size(), 3);
  EXPECT_THAT(FindBreaks(previous, current), IsEmpty())
      << "Programs in the field were built with the previous contract: add instead of changing. "
         "Additions are taken over by\n"
         "  cmake --build build/release --target pqcached_renew_descriptor_set";
}

TEST(ProtoCompatibilityTest, CurrentContractOnlyAddsToThatOf01) {
  EXPECT_THAT(FindBreaks(Load(PQCACHED_DESCRIPTOR_SET_0_1), Load(PQCACHED_CURRENT_DESCRIPTOR_SET)),
              IsEmpty())
      << "Programs of version 0.1 are in the field: add instead of changing.";
}

constexpr char kBase[] = R"pb(
  file {
    name: "a.proto"
    package: "p"
    message_type {
      name: "M"
      field { name: "one" number: 1 label: LABEL_OPTIONAL type: TYPE_UINT64 }
      field { name: "two" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".p.N" }
      field { name: "three" number: 3 label: LABEL_OPTIONAL type: TYPE_STRING oneof_index: 0 }
      oneof_decl { name: "choice" }
      oneof_decl { name: "other" }
      nested_type {
        name: "Inner"
        field { name: "deep" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT }
      }
      enum_type {
        name: "Colour"
        value { name: "RED" number: 0 }
      }
    }
    message_type { name: "N" }
    enum_type {
      name: "E"
      value { name: "ZERO" number: 0 }
      value { name: "ONE" number: 1 }
    }
    service {
      name: "S"
      method { name: "Do" input_type: ".p.M" output_type: ".p.N" }
    }
  }
)pb";

FileDescriptorSet Base() {
  FileDescriptorSet set;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(kBase, &set));
  return set;
}

std::vector<std::string> BreaksAfter(
    const std::function<void(google::protobuf::FileDescriptorProto&)>& change) {
  FileDescriptorSet current = Base();
  change(*current.mutable_file(0));
  return FindBreaks(Base(), current);
}

TEST(ProtoCompatibilityTest, AcceptsAdditions) {
  EXPECT_THAT(BreaksAfter([](auto& file) {
                auto* field = file.mutable_message_type(0)->add_field();
                field->set_name("four");
                field->set_number(4);
                field->set_type(FieldDescriptorProto::TYPE_BOOL);
                file.add_message_type()->set_name("New");
                auto* value = file.mutable_enum_type(0)->add_value();
                value->set_name("TWO");
                value->set_number(2);
                auto* method = file.mutable_service(0)->add_method();
                method->set_name("DoMore");
                file.add_service()->set_name("T");
              }),
              IsEmpty());
}

TEST(ProtoCompatibilityTest, AcceptsAMoveToAnotherFileOfThePackage) {
  FileDescriptorSet current = Base();
  auto* file = current.add_file();
  file->set_package("p");
  file->add_message_type()->Swap(current.mutable_file(0)->mutable_message_type(1));
  current.mutable_file(0)->mutable_message_type()->RemoveLast();
  EXPECT_THAT(FindBreaks(Base(), current), IsEmpty());
}

TEST(ProtoCompatibilityTest, FindsAChangedFieldNumber) {
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_message_type(0)->mutable_field(0)->set_number(9);
              }),
              ElementsAre("p.M.one: field number 1 is gone"));
}

TEST(ProtoCompatibilityTest, FindsARemovedField) {
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_message_type(0)->mutable_nested_type(0)->clear_field();
              }),
              ElementsAre("p.M.Inner.deep: field number 1 is gone"));
}

TEST(ProtoCompatibilityTest, FindsARenamedField) {
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_message_type(0)->mutable_field(0)->set_name("uno");
              }),
              ElementsAre("p.M.one: renamed to uno"));
}

TEST(ProtoCompatibilityTest, FindsAChangedType) {
  EXPECT_THAT(
      BreaksAfter([](auto& file) {
        file.mutable_message_type(0)->mutable_field(0)->set_type(FieldDescriptorProto::TYPE_INT64);
      }),
      ElementsAre("p.M.one: type changed"));
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_message_type(0)->mutable_field(1)->set_type_name(".p.M");
              }),
              ElementsAre("p.M.two: type changed"));
}

TEST(ProtoCompatibilityTest, FindsAChangedLabel) {
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_message_type(0)->mutable_field(0)->set_label(
                    FieldDescriptorProto::LABEL_REPEATED);
              }),
              ElementsAre("p.M.one: label changed"));
}

TEST(ProtoCompatibilityTest, FindsAChangedOneof) {
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_message_type(0)->mutable_field(2)->set_oneof_index(1);
              }),
              ElementsAre("p.M.three: oneof changed from 'choice' to 'other'"));
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_message_type(0)->mutable_field(0)->set_oneof_index(0);
              }),
              ElementsAre("p.M.one: oneof changed from '' to 'choice'"));
}

TEST(ProtoCompatibilityTest, FindsChangedPacking) {
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_message_type(0)
                    ->mutable_nested_type(0)
                    ->mutable_field(0)
                    ->mutable_options()
                    ->set_packed(false);
              }),
              ElementsAre("p.M.Inner.deep: packing changed"));
}

TEST(ProtoCompatibilityTest, FindsARemovedMessage) {
  EXPECT_THAT(BreaksAfter([](auto& file) { file.mutable_message_type()->RemoveLast(); }),
              ElementsAre("p.N: message is gone"));
}

TEST(ProtoCompatibilityTest, FindsARemovedOrRenamedEnumValue) {
  EXPECT_THAT(
      BreaksAfter([](auto& file) { file.mutable_enum_type(0)->mutable_value()->RemoveLast(); }),
      ElementsAre("p.E.ONE: enum value is gone"));
  EXPECT_THAT(
      BreaksAfter([](auto& file) {
        file.mutable_message_type(0)->mutable_enum_type(0)->mutable_value(0)->set_name("RUST");
      }),
      ElementsAre("p.M.Colour.RED: renamed to RUST"));
  EXPECT_THAT(BreaksAfter([](auto& file) { file.clear_enum_type(); }),
              ElementsAre("p.E: enum is gone"));
}

TEST(ProtoCompatibilityTest, FindsARemovedOrChangedRpc) {
  EXPECT_THAT(BreaksAfter([](auto& file) { file.mutable_service(0)->clear_method(); }),
              ElementsAre("p.S.Do: rpc is gone"));
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_service(0)->mutable_method(0)->set_input_type(".p.N");
              }),
              ElementsAre("p.S.Do: request type changed"));
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_service(0)->mutable_method(0)->set_output_type(".p.M");
              }),
              ElementsAre("p.S.Do: response type changed"));
  EXPECT_THAT(BreaksAfter([](auto& file) {
                file.mutable_service(0)->mutable_method(0)->set_server_streaming(true);
              }),
              ElementsAre("p.S.Do: streaming changed"));
  EXPECT_THAT(BreaksAfter([](auto& file) { file.clear_service(); }),
              ElementsAre("p.S: service is gone"));
}

}  // namespace
}  // namespace pqcached::tests
