#include "tests/fuzz/messages.h"

#include <bit>
#include <limits>
#include <string>

namespace pqcached::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr size_t kMaxTextBytes = 4096;
constexpr int kMaxRepeats = 1100;  // beyond every limit on counts of messages

double Real(Bytes& bytes) {
  static constexpr double kEdges[] = {0,
                                      -0.0,
                                      1,
                                      -1,
                                      0.5,
                                      1.5,
                                      std::numeric_limits<double>::infinity(),
                                      -std::numeric_limits<double>::infinity(),
                                      std::numeric_limits<double>::quiet_NaN(),
                                      std::numeric_limits<double>::denorm_min(),
                                      1e300,
                                      3e38};
  const uint8_t choice = bytes.Byte();
  if (choice < std::size(kEdges)) return kEdges[choice];
  return std::bit_cast<double>(bytes.Number());
}

std::string Text(Bytes& bytes, const std::string& old) {
  switch (bytes.Below(4)) {
    case 0:
      return bytes.Text(bytes.Byte());
    case 1:
      return std::string(std::min<uint64_t>(bytes.Number(), kMaxTextBytes),
                         static_cast<char>(bytes.Byte()));
    case 2:  // cut or lengthened by little
      return old.substr(0, old.size() - std::min<size_t>(old.size(), bytes.Byte()));
    default:
      return old + bytes.Text(bytes.Byte());
  }
}

// Sets the field, or adds a value to it when it is repeated.
void SetScalar(Message& message, const FieldDescriptor* field, Bytes& bytes) {
  const Reflection& reflection = *message.GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
#define PQCACHED_SET(TYPE, NAME, value)              \
  case FieldDescriptor::CPPTYPE_##TYPE: {            \
    const auto chosen = (value);                     \
    if (repeated) {                                  \
      reflection.Add##NAME(&message, field, chosen); \
    } else {                                         \
      reflection.Set##NAME(&message, field, chosen); \
    }                                                \
    return;                                          \
  }
    PQCACHED_SET(INT32, Int32, static_cast<int32_t>(bytes.Number()))
    PQCACHED_SET(INT64, Int64, static_cast<int64_t>(bytes.Number()))
    PQCACHED_SET(UINT32, UInt32, static_cast<uint32_t>(bytes.Number()))
    PQCACHED_SET(UINT64, UInt64, bytes.Number())
    PQCACHED_SET(FLOAT, Float, static_cast<float>(Real(bytes)))
    PQCACHED_SET(DOUBLE, Double, Real(bytes))
    PQCACHED_SET(BOOL, Bool, bytes.Byte() % 2 == 1)
    PQCACHED_SET(ENUM, EnumValue, static_cast<int>(bytes.Number()))
    PQCACHED_SET(STRING, String, Text(bytes, repeated ? "" : reflection.GetString(message, field)))
#undef PQCACHED_SET
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return;
  }
}

// Adds copies of an element, or clears or shortens the field.
void MutateRepeated(Message& message, const FieldDescriptor* field, Bytes& bytes) {
  const Reflection& reflection = *message.GetReflection();
  const int count = reflection.FieldSize(message, field);
  const uint8_t choice = bytes.Byte();
  if (choice < 32 && count > 0) {
    reflection.RemoveLast(&message, field);
  } else if (choice < 40) {
    reflection.ClearField(&message, field);
  } else if (choice < 48 && count > 1) {
    reflection.SwapElements(&message, field, 0, count - 1);
  } else if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
    const int times = choice > 250 ? kMaxRepeats : 1 + choice % 8;
    for (int i = 0; i < times && !(i > 8 && bytes.empty()); ++i) SetScalar(message, field, bytes);
  } else {
    const int times = choice > 250 ? kMaxRepeats : 1;
    for (int i = 0; i < times; ++i) {
      Message* added = reflection.AddMessage(&message, field);
      if (count > 0) added->CopyFrom(reflection.GetRepeatedMessage(message, field, 0));
    }
  }
}

}  // namespace

void Mutate(Message& message, Bytes& bytes) {
  const google::protobuf::Descriptor& descriptor = *message.GetDescriptor();
  if (descriptor.field_count() == 0) return;
  const Reflection& reflection = *message.GetReflection();
  const FieldDescriptor* field = descriptor.field(
      static_cast<int>(bytes.Below(static_cast<size_t>(descriptor.field_count()))));
  const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
  if (field->is_repeated()) {
    const int count = reflection.FieldSize(message, field);
    if (!is_message || count == 0 || bytes.Byte() < 64) {
      MutateRepeated(message, field, bytes);
    } else {
      const int element = static_cast<int>(bytes.Below(static_cast<size_t>(std::min(count, 256))));
      Mutate(*reflection.MutableRepeatedMessage(&message, field, element), bytes);
    }
  } else if (!is_message) {
    SetScalar(message, field, bytes);
  } else if (bytes.Byte() < 32) {
    reflection.ClearField(&message, field);
  } else {
    Mutate(*reflection.MutableMessage(&message, field), bytes);
  }
}

}  // namespace pqcached::fuzz
