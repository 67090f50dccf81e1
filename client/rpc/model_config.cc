#include "client/rpc/model_config.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pqcached::client {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

// A field that is refused.
struct BadField : std::runtime_error {
  BadField(std::string name, const std::string& text)
      : std::runtime_error(text), field(std::move(name)) {}
  std::string field;
};

// Model types of Transformers whose rotary pairs are neighbours; the others have halves.
constexpr std::array<std::string_view, 14> kInterleavedTypes = {"chatglm",
                                                                "codegen",
                                                                "cohere",
                                                                "cohere2",
                                                                "ernie4_5",
                                                                "ernie4_5_moe",
                                                                "ernie4_5_vl_moe_text",
                                                                "glm",
                                                                "glm4",
                                                                "glm4v_text",
                                                                "gptj",
                                                                "helium",
                                                                "llama4",
                                                                "llama4_text"};

const Value* Find(const Struct& fields, const std::string& name) {
  const auto it = fields.fields().find(name);
  if (it == fields.fields().end() || it->second.kind_case() == Value::kNullValue) return nullptr;
  return &it->second;
}

// Returns the number in a field; 0 where it is missing.
double NumberOf(const Struct& fields, const std::string& name) {
  const Value* value = Find(fields, name);
  if (value == nullptr) return 0;
  if (!value->has_number_value()) throw BadField("config." + name, "must be a number");
  return value->number_value();
}

uint32_t CountOf(const Struct& fields, const std::string& name) {
  const double number = NumberOf(fields, name);
  if (number < 1 || number > kvstore::kMaxSequenceTokens || number != std::floor(number)) {
    throw BadField("config." + name, "must be a positive integer");
  }
  return static_cast<uint32_t>(number);
}

// Returns CountOf, or `missing` where the field is missing or 0.
uint32_t CountOr(const Struct& fields, const std::string& name, uint32_t missing) {
  const Value* value = Find(fields, name);
  const bool is_zero = value != nullptr && value->has_number_value() && value->number_value() == 0;
  return value == nullptr || is_zero ? missing : CountOf(fields, name);
}

// Returns the text in a field; empty where it is missing.
std::string TextOf(const Struct& fields, const std::string& name) {
  const Value* value = Find(fields, name);
  if (value == nullptr) return "";
  if (!value->has_string_value()) throw BadField("config." + name, "must be a text");
  return value->string_value();
}

pqc_dtype DTypeOf(const Struct& fields) {
  std::string name = TextOf(fields, "dtype");
  if (name.empty()) name = TextOf(fields, "torch_dtype");
  constexpr std::string_view kTorch = "torch.";
  if (name.starts_with(kTorch)) name.erase(0, kTorch.size());
  if (name == "bfloat16") return PQC_BF16;
  if (name == "float16" || name == "float32" || name.empty()) return PQC_F16;
  throw BadField("config.dtype", "\"" + name + "\", must be bfloat16, float16 or float32");
}

float ScaleOf(const Struct& fields) {
  if (const double scale = NumberOf(fields, "attention_multiplier"); scale > 0) {
    return static_cast<float>(scale);
  }
  const double scalar = NumberOf(fields, "query_pre_attn_scalar");
  return scalar > 0 ? static_cast<float>(1 / std::sqrt(scalar)) : 0.0f;
}

// Returns the parameters of the rotation in the layers of one kind: from rope_parameters, which may
// have some for each kind, or from the fields of earlier versions.
const Struct& RopeOf(const Struct& fields, pqc_layer_kind kind) {
  const Value* nested = Find(fields, "rope_parameters");
  if (nested == nullptr || !nested->has_struct_value()) return fields;
  const char* const name = kind == PQC_LAYERS_WINDOW ? "sliding_attention" : "full_attention";
  const Value* of_kind = Find(nested->struct_value(), name);
  return of_kind != nullptr && of_kind->has_struct_value() ? of_kind->struct_value()
                                                           : nested->struct_value();
}

void ReadRope(const Struct& fields, pqc_layer_group* group) {
  const Struct& rope = RopeOf(fields, group->kind);
  group->rope_theta = NumberOf(rope, "rope_theta");
  if (group->rope_theta <= 0) return;
  const double factor = NumberOf(rope, "partial_rotary_factor");
  if (factor < 0 || factor > 1) {
    throw BadField("config.partial_rotary_factor", "must lie in [0, 1]");
  }
  group->rotary_dim = static_cast<uint32_t>(group->key_dim * (factor > 0 ? factor : 1.0));
  const std::string type = TextOf(fields, "model_type");
  const bool is_interleaved = std::find(kInterleavedTypes.begin(), kInterleavedTypes.end(), type) !=
                              kInterleavedTypes.end();
  group->rope_layout = is_interleaved ? PQC_ROPE_INTERLEAVED : PQC_ROPE_HALF;
  // Its layers with full attention have no rotation.
  if (type == "cohere2" && group->kind == PQC_LAYERS_SELECTED) group->rope_layout = PQC_ROPE_NONE;
}

pqc_layer_kind KindOf(const std::string& name, int layer) {
  static const std::map<std::string_view, pqc_layer_kind> kKinds = {
      {"full_attention", PQC_LAYERS_SELECTED},
      {"sliding_attention", PQC_LAYERS_WINDOW},
      {"linear_attention", PQC_LAYERS_NONE},
      {"mamba", PQC_LAYERS_NONE},
      {"conv", PQC_LAYERS_NONE}};
  if (const auto it = kKinds.find(name); it != kKinds.end()) return it->second;
  throw BadField("config.layer_types[" + std::to_string(layer) + "]",
                 "\"" + name +
                     "\", must be full_attention, sliding_attention, linear_attention, mamba or "
                     "conv");
}

// Returns the kind of each layer.
std::vector<pqc_layer_kind> KindsOf(const Struct& fields) {
  const uint32_t layer_count = CountOf(fields, "num_hidden_layers");
  if (layer_count > kvstore::kMaxLayers) {
    throw BadField("config.num_hidden_layers", std::to_string(layer_count) + ", must be at most " +
                                                   std::to_string(kvstore::kMaxLayers));
  }
  const Value* types = Find(fields, "layer_types");
  if (types == nullptr) {
    // Where several kinds alternate, the model's code says which layers have the window.
    const auto use = fields.fields().find("use_sliding_window");
    const bool is_on = use == fields.fields().end() || use->second.bool_value();
    if (NumberOf(fields, "sliding_window") > 0 && is_on) {
      throw BadField("config.layer_types",
                     "missing, and sliding_window is set: list a kind for each layer");
    }
    return std::vector<pqc_layer_kind>(layer_count, PQC_LAYERS_SELECTED);
  }
  const auto& names = types->list_value().values();
  if (names.size() != static_cast<int>(layer_count)) {
    throw BadField("config.layer_types", std::to_string(names.size()) +
                                             " kinds, and num_hidden_layers is " +
                                             std::to_string(layer_count));
  }
  std::vector<pqc_layer_kind> kinds;
  kinds.reserve(layer_count);
  for (int layer = 0; layer < names.size(); ++layer) {
    kinds.push_back(KindOf(names[layer].string_value(), layer));
  }
  return kinds;
}

// Returns what the groups have in common.
pqc_layer_group CommonOf(const Struct& fields) {
  if (NumberOf(fields, "kv_lora_rank") > 0) {
    throw BadField("config.kv_lora_rank", "models with latent attention cannot be served");
  }
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  group.query_heads = CountOf(fields, "num_attention_heads");
  group.kv_heads = CountOr(fields, "num_key_value_heads", group.query_heads);
  const uint32_t head_dim = CountOr(fields, "head_dim", 0);
  group.key_dim = head_dim > 0 ? head_dim : CountOf(fields, "hidden_size") / group.query_heads;
  if (group.key_dim == 0) throw BadField("config.hidden_size", "below num_attention_heads");
  group.value_dim = group.key_dim;
  group.dtype = DTypeOf(fields);
  group.softmax_scale = ScaleOf(fields);
  group.softcap = static_cast<float>(NumberOf(fields, "attn_logit_softcapping"));
  return group;
}

void PassGroups(const Struct& fields, const GroupSink& sink) {
  const pqc_layer_group common = CommonOf(fields);
  const std::vector<pqc_layer_kind> kinds = KindsOf(fields);
  bool is_empty = true;
  for (const pqc_layer_kind kind : {PQC_LAYERS_SELECTED, PQC_LAYERS_WINDOW}) {
    std::vector<uint32_t> layers;
    for (uint32_t layer = 0; layer < kinds.size(); ++layer) {
      if (kinds[layer] == kind) layers.push_back(layer);
    }
    if (layers.empty()) continue;
    is_empty = false;
    pqc_layer_group group = common;
    group.kind = kind;
    group.layers = layers.data();
    group.layer_count = static_cast<uint32_t>(layers.size());
    ReadRope(fields, &group);
    if (kind == PQC_LAYERS_WINDOW) group.window_tokens = CountOf(fields, "sliding_window");
    sink.add(sink.context, group);
  }
  if (is_empty) throw BadField("config.layer_types", "no layer has attention");
}

// Returns the text with null in place of NaN and infinities, which Python writes and JSON lacks.
std::string WithoutNonNumbers(std::string_view json) {
  std::string text;
  bool in_string = false;
  for (size_t i = 0; i < json.size();) {
    if (!in_string) {
      const auto names = {std::string_view("NaN"), std::string_view("-Infinity"),
                          std::string_view("Infinity")};
      const auto found = std::find_if(names.begin(), names.end(), [&](std::string_view name) {
        return json.substr(i).starts_with(name);
      });
      if (found != names.end()) {
        text += "null";
        i += found->size();
        continue;
      }
    }
    if (json[i] == '"') in_string = !in_string;
    if (in_string && json[i] == '\\' && i + 1 < json.size()) text += json[i++];
    text += json[i++];
  }
  return text;
}

}  // namespace

pqc_status ReadModelConfig(const char* config_json, const GroupSink& sink,
                           RefusalBuffer* error) noexcept {
  const auto refuse = [&](const std::string& field, const std::string& text) {
    std::snprintf(error->field, sizeof(error->field), "%s", field.c_str());
    std::snprintf(error->text, sizeof(error->text), "%s", text.c_str());
    return PQC_INVALID_ARGUMENT;
  };
  try {
    Struct config;
    const auto parsed =
        google::protobuf::util::JsonStringToMessage(WithoutNonNumbers(config_json), &config);
    if (!parsed.ok()) return refuse("config", "no JSON object: " + parsed.ToString());
    const Value* text = Find(config, "text_config");  // of a model that also reads images
    PassGroups(text != nullptr && text->has_struct_value() ? text->struct_value() : config, sink);
    return PQC_OK;
  } catch (const BadField& bad) {
    return refuse(bad.field, bad.what());
  } catch (const std::exception& exception) {
    std::snprintf(error->text, sizeof(error->text), "%s", exception.what());
    return PQC_INTERNAL;
  }
}

}  // namespace pqcached::client
