// The plug-in's entry for ggml: a device that computes long attention nodes, and leaves all other
// nodes to llama.cpp's CPU backend. Modelled on ggml's BLAS backend: a device of the type ACCEL
// whose memory is the CPU's.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "client/engines/llama/attention.h"
#include "client/engines/llama/engine_threads.h"
#include "client/engines/llama/ggml_api.h"
#include "client/engines/llama/log.h"
#include "client/engines/llama/own_rows.h"
#include "client/engines/llama/selection.h"
#include "client/engines/llama/settings.h"
#include "client/engines/llama/sidecar.h"

namespace pqcached::llama {
namespace {

constexpr const char* kName = "PQCACHED";
constexpr const char* kDescription = "pqcached: attention to long contexts";

// The choice of the attention nodes that the plug-in takes.
//
// If `-fa auto` is set, llama.cpp first makes a graph to see which device its attention nodes get.
// If it is another device than the layer's, llama.cpp switches flash attention off, and with it the
// plug-in. The probe has one token per sequence, and graphs of other sizes follow before any token
// is computed. So nodes of a layer are taken once two numbers of tokens have been seen for it.
class Claims {
 public:
  // Has nodes of a prefill taken as well: then their tokens are seen before they are decoded.
  void TakePrefill() { takes_prefill_ = true; }

  bool Take(const GgmlTensor& node) {
    Attention attention;
    const char* refusal = Describe(node, &attention);
    const std::lock_guard lock(mutex_);
    if (refusal != nullptr) {
      if (said_.insert(refusal).second) {
        Log(std::string("leaves layers with ") + refusal + " to llama.cpp");
      }
      return false;
    }
    const GgmlTensor* const keys = RootOf(node.src[1]);
    const GgmlTensor* const values = RootOf(node.src[2]);
    const uint64_t tokens = uint64_t{attention.tokens} * attention.streams;
    Layer& layer = layers_.try_emplace(keys, Layer{tokens}).first->second;
    if (layer.first_tokens != tokens) {
      layer.is_taken = true;
      values_.insert(values);
    }
    layer.shape = attention;
    layer.arrays = {keys, values, static_cast<const std::byte*>(keys->data),
                    static_cast<const std::byte*>(values->data)};
    return layer.is_taken && (takes_prefill_ || attention.tokens <= kMostTokens);
  }

  // Returns whether a tensor has the keys or the values of a layer that is taken.
  bool HasRows(const GgmlTensor* root) {
    const std::lock_guard lock(mutex_);
    const auto found = layers_.find(root);
    return (found != layers_.end() && found->second.is_taken) || values_.contains(root);
  }

  // Finds the layer whose keys a tensor has.
  bool Find(const GgmlTensor* keys, LayerArrays* arrays, Attention* shape) {
    const std::lock_guard lock(mutex_);
    const auto found = layers_.find(keys);
    if (found == layers_.end()) return false;
    *arrays = found->second.arrays;
    *shape = found->second.shape;
    return true;
  }

  // Forgets layers of a context that has ended: another one may have its layers at their addresses.
  void Forget(const std::set<const GgmlTensor*>& keys) {
    const std::lock_guard lock(mutex_);
    for (const GgmlTensor* each : keys) {
      const auto found = layers_.find(each);
      if (found == layers_.end()) continue;
      values_.erase(found->second.arrays.values_root);
      layers_.erase(found);
    }
  }

 private:
  struct Layer {
    uint64_t first_tokens;
    bool is_taken = false;
    Attention shape = {};
    LayerArrays arrays = {};
  };

  bool takes_prefill_ = false;
  std::mutex mutex_;
  std::map<const GgmlTensor*, Layer> layers_;  // by the tensor that K is a view of
  std::set<const GgmlTensor*> values_;         // tensors that V is a view of
  std::set<std::string> said_;
};

// The state that a process has once.
struct Plugin {
  GgmlApi api{};
  Settings settings;
  Claims claims;
  GgmlRegistry registry{};
  GgmlDevice device{};
};

// Never destroyed: ggml uses it until the process ends.
Plugin& ThePlugin() {
  static Plugin& plugin = *new Plugin;
  return plugin;
}

class Context;

// The contexts, by number: an application names none, and means the one whose graph its thread has
// computed last.
struct Contexts {
  std::mutex mutex;
  uint64_t last_number = 0;
  std::map<uint64_t, Context*> all;
};
Contexts& TheContexts() {
  static Contexts& contexts = *new Contexts;
  return contexts;
}
thread_local uint64_t number_of_last_context = 0;

// The state of one llama_context.
class Context {
 public:
  Context() : threads_(ThePlugin().api), own_rows_(ThePlugin().settings.exec) {
    const Settings& settings = ThePlugin().settings;
    if (settings.uses_sidecar()) {
      selection_ = std::make_unique<Selection>(settings, &threads_, ThePlugin().api.rope_op);
    }
    const std::lock_guard lock(TheContexts().mutex);
    number_ = ++TheContexts().last_number;
    TheContexts().all[number_] = this;
  }
  ~Context() {
    {
      const std::lock_guard lock(TheContexts().mutex);
      TheContexts().all.erase(number_);
    }
    ThePlugin().claims.Forget(keys_);
    if (own_nodes_ + other_nodes_ == 0) return;
    std::string line = "computed " + std::to_string(own_nodes_) + " attention nodes, and left " +
                       std::to_string(other_nodes_) + " to llama.cpp";
    if (selection_ != nullptr) {
      char text[96];
      std::snprintf(text, sizeof(text), "; selected tokens in %llu; the longest wait was %.3f ms",
                    static_cast<unsigned long long>(selection_->selected_nodes()),
                    selection_->longest_wait_ms());
      line += text;
      if (ThePlugin().settings.estimates_tail()) {
        line += "; estimated the rest in " + std::to_string(selection_->estimated_nodes());
      }
      if (const DroppedRows* const dropped = selection_->dropped(); dropped != nullptr) {
        line += "; gave back " + std::to_string(dropped->given_back_bytes() >> 10) +
                " KiB, and fetched " + std::to_string(dropped->fetched_bytes() >> 10) + " again";
      }
    }
    Log(line);
  }

  bool is_usable() const { return threads_.is_usable(); }
  void SetThreads(int count) { threads_.SetThreads(count); }

  // Offload::Take.
  pqc_status TakeOffload(uint64_t tokens, uint32_t* begin, uint32_t* end,
                         std::string* problem) try {
    if (selection_ != nullptr) return selection_->TakeOffload(tokens, begin, end, problem);
    *problem = "PQCACHED_LLAMA lacks the word offload";
    return PQC_FAILED_PRECONDITION;
  } catch (const std::exception& error) {
    *problem = error.what();
    return PQC_RESOURCE_EXHAUSTED;
  }

  GgmlStatus Compute(GgmlGraph* graph) {
    number_of_last_context = number_;
    const GgmlApi& api = ThePlugin().api;
    const int count = api.graph_n_nodes(graph);
    for (int i = 0; i < count; ++i) {
      GgmlTensor* node = api.graph_node(graph, i);
      if ((node->flags & kGgmlFlagCompute) == 0 || IsView(api, *node)) continue;
      if (node->op == api.flash_attn_op) {
        const Outcome outcome = ComputeAttention(*node);
        if (outcome == Outcome::kFailed) return kGgmlFailed;
        if (outcome == Outcome::kComputed) {
          ++own_nodes_;
          CompleteAttention();
          continue;
        }
        ++other_nodes_;
      } else if (selection_ != nullptr && IsSetRows(api, *node)) {
        try {
          NoteWrite(*node);
        } catch (const std::exception& error) {
          Stop(error);
        }
      }
      if (const GgmlStatus status = threads_.ComputeByGgml(node); status != kGgmlSuccess) {
        return status;
      }
      if (node->op == api.flash_attn_op) CompleteAttention();
    }
    return kGgmlSuccess;
  }

 private:
  enum class Outcome { kComputed, kLeft, kFailed };  // kLeft: to ggml

  Outcome ComputeAttention(const GgmlTensor& node) {
    if (fails_) return Outcome::kFailed;
    try {
      return TryAttention(node);
    } catch (const std::exception& error) {
      Stop(error);
      return fails_ ? Outcome::kFailed : Outcome::kLeft;
    }
  }

  void CompleteAttention() {
    if (selection_ == nullptr) return;
    try {
      selection_->Complete();
    } catch (const std::exception& error) {
      Stop(error);
    }
  }

  // Memory is short: attends exactly from now on. Without the sidecar, offloaded tokens are lost.
  void Stop(const std::exception& error) {
    fails_ = selection_ != nullptr && !selection_->ReturnAll();
    Log(std::string(fails_ ? "llama_decode fails from now on: " : "attends exactly from now on: ") +
        error.what());
    if (!fails_) selection_.reset();  // else what was given back would be zeros
  }

  Outcome TryAttention(const GgmlTensor& node) {
    Attention attention;
    if (Describe(node, &attention) != nullptr) return Outcome::kLeft;
    keys_.insert(RootOf(node.src[1]));
    if (selection_ != nullptr && !selection_->Arrive(attention)) return Outcome::kFailed;
    if (selection_ != nullptr && selection_->graph_has_offloaded()) {
      return ComputeWithOffloaded(attention);
    }
    if (attention.tokens > kMostTokens) {
      if (selection_ != nullptr) selection_->NotePrefill(attention);
      return Leave();
    }
    if (!own_rows_.Prepare(attention)) return Leave();
    if (own_rows_.seen_cells() < ThePlugin().settings.min_tokens) return Leave();
    if (selection_ == nullptr) {
      own_rows_.Compute(threads_.crew());
      return Outcome::kComputed;
    }
    const std::span<const kernels::Partial> others = AttendSelected(attention);
    own_rows_.Compute(threads_.crew(), others);
    selection_->Finish();
    return Outcome::kComputed;
  }

  Outcome Leave() {
    if (selection_ != nullptr) selection_->Leave();
    return Outcome::kLeft;
  }

  // Attends to offloaded tokens by the sidecar, and to the others in llama.cpp's rows, a block of
  // query tokens after the other.
  Outcome ComputeWithOffloaded(const Attention& attention) {
    constexpr uint32_t kBlockTokens = 56;
    if (attention.tokens <= kMostTokens && !selection_->Prepare(attention).empty()) {
      selection_->Attend(attention);
    }
    const std::span<const kernels::Partial> others = selection_->AttendOffloaded(attention);
    if (others.empty()) return Outcome::kFailed;
    const std::span<const uint64_t* const> hidden = selection_->hidden();
    for (uint32_t first = 0; first < attention.tokens; first += kBlockTokens) {
      Attention block = attention;
      block.first_token = first;
      block.tokens = std::min(kBlockTokens, attention.tokens - first);
      block_partials_.clear();
      block_hidden_.clear();
      for (uint32_t stream = 0; stream < attention.streams; ++stream) {
        const size_t row = size_t{stream} * attention.tokens + first;
        const auto part = others.subspan(row, block.tokens);
        block_partials_.insert(block_partials_.end(), part.begin(), part.end());
        if (hidden.empty()) continue;
        const auto part_hidden = hidden.subspan(row, block.tokens);
        block_hidden_.insert(block_hidden_.end(), part_hidden.begin(), part_hidden.end());
      }
      if (!own_rows_.Prepare(block, block_hidden_)) return Outcome::kFailed;
      own_rows_.Compute(threads_.crew(), block_partials_);
    }
    selection_->Finish();
    return Outcome::kComputed;
  }

  // Attends to the cells that the sidecar has, if it can, and leaves the others to own_rows_.
  std::span<const kernels::Partial> AttendSelected(const Attention& attention) {
    const std::span<const uint64_t* const> hidden = selection_->Prepare(attention);
    if (hidden.empty()) return {};
    const std::span<const kernels::Partial> others = selection_->Attend(attention);
    if (!others.empty()) own_rows_.Prepare(attention, hidden);
    return others;
  }

  // Reports the cells that a node writes, when it writes keys.
  void NoteWrite(const GgmlTensor& node) {
    LayerArrays arrays;
    Attention shape;
    if (!ThePlugin().claims.Find(RootOf(&node), &arrays, &shape)) return;  // values
    const GgmlTensor& places = *node.src[1];
    written_.clear();
    if (places.type == kGgmlI64 && places.nb[0] == sizeof(int64_t)) {
      const auto* const cells = static_cast<const int64_t*>(places.data);
      for (int64_t i = 0; i < places.ne[0]; ++i)
        written_.push_back(static_cast<uint32_t>(cells[i]));
    }
    selection_->Write(arrays, shape, written_);
  }

  uint64_t number_ = 0;
  EngineThreads threads_;
  OwnRows own_rows_;
  std::unique_ptr<Selection> selection_;          // null: exact
  bool fails_ = false;                            // offloaded tokens cannot be read any more
  std::vector<kernels::Partial> block_partials_;  // of ComputeWithOffloaded
  std::vector<const uint64_t*> block_hidden_;
  std::vector<uint32_t> written_;
  std::set<const GgmlTensor*> keys_;  // arrays of keys of the context's layers
  uint64_t own_nodes_ = 0;
  uint64_t other_nodes_ = 0;  // of those that Claims has taken
};

Context* ContextOf(GgmlBackend* backend) { return static_cast<Context*>(backend->context); }

const uint8_t kGuid[16] = {0x70, 0x71, 0x63, 0x61, 0x63, 0x68, 0x65, 0x64,
                           0x9b, 0x1f, 0x4e, 0x02, 0xa7, 0x55, 0xd3, 0x18};

GgmlBackend* InitBackend(GgmlDevice* device, const char*) try {
  auto context = std::make_unique<Context>();
  if (!context->is_usable()) return nullptr;
  auto* const backend = new GgmlBackend{};
  backend->guid = &kGuid;
  backend->table.get_name = [](GgmlBackend*) { return kName; };
  backend->table.free = [](GgmlBackend* freed) {
    delete ContextOf(freed);
    delete freed;
  };
  backend->table.graph_compute = [](GgmlBackend* computing, GgmlGraph* graph) {
    return ContextOf(computing)->Compute(graph);
  };
  backend->device = device;
  backend->context = context.release();
  return backend;
} catch (const std::exception&) {
  return nullptr;
}

void FillProps(GgmlDevice*, GgmlDeviceProps* props) {
  props->name = kName;
  props->description = kDescription;
  props->memory_free = props->memory_total = 0;
  props->type = kGgmlAccelDevice;
  props->device_id = nullptr;
  props->caps = {};
}

GgmlDevice MakeDevice(GgmlRegistry* registry) {
  GgmlDevice device{};
  device.table.get_name = [](GgmlDevice*) { return kName; };
  device.table.get_description = [](GgmlDevice*) { return kDescription; };
  device.table.get_memory = [](GgmlDevice*, size_t* free, size_t* total) { *free = *total = 0; };
  device.table.get_type = [](GgmlDevice*) { return kGgmlAccelDevice; };
  device.table.get_props = &FillProps;
  device.table.init_backend = &InitBackend;
  device.table.get_buffer_type = [](GgmlDevice*) {
    return ThePlugin().api.backend_cpu_buffer_type();
  };
  device.table.supports_op = [](GgmlDevice*, const GgmlTensor* node) {
    Plugin& plugin = ThePlugin();
    return IsView(plugin.api, *node) ||
           (node->op == plugin.api.flash_attn_op && plugin.claims.Take(*node)) ||
           (plugin.settings.uses_sidecar() && IsSetRows(plugin.api, *node) &&
            plugin.claims.HasRows(RootOf(node)));
  };
  device.table.supports_buft = [](GgmlDevice*, GgmlBufferType* type) {
    return ThePlugin().api.backend_buft_is_host(type);
  };
  device.registry = registry;
  return device;
}

void SetThreads(GgmlBackend* backend, int count) { ContextOf(backend)->SetThreads(count); }

// Offloads tokens of a sequence of the context that this thread has used last, which has `tokens`
// tokens (application/offload.cc). *problem: a text of the thread.
pqc_status OffloadTokens(uint64_t tokens, uint32_t* begin, uint32_t* end, const char** problem) {
  thread_local std::string text;
  const std::lock_guard lock(TheContexts().mutex);
  const auto found = TheContexts().all.find(number_of_last_context);
  pqc_status status = PQC_FAILED_PRECONDITION;
  if (found == TheContexts().all.end()) {
    text = "this thread has computed no batch with the plug-in";
  } else {
    status = found->second->TakeOffload(tokens, begin, end, &text);
  }
  *problem = text.c_str();
  return status;
}

GgmlRegistry MakeRegistry() {
  GgmlRegistry registry{};
  registry.api_version = kBackendApiVersion;
  registry.table.get_name = [](GgmlRegistry*) { return kName; };
  registry.table.get_device_count = [](GgmlRegistry*) { return size_t{1}; };
  registry.table.get_device = [](GgmlRegistry*, size_t) { return &ThePlugin().device; };
  registry.table.get_proc_address = [](GgmlRegistry*, const char* name) -> void* {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
      return reinterpret_cast<void*>(&SetThreads);
    }
    return std::strcmp(name, "pqcached_offload") == 0 ? reinterpret_cast<void*>(&OffloadTokens)
                                                      : nullptr;
  };
  return registry;
}

GgmlRegistry* Load() {
  Plugin& plugin = ThePlugin();
  std::string problem = LoadGgmlApi(&plugin.api);
  if (problem.empty()) problem = ReadSettings(&plugin.settings);
  if (!problem.empty()) {
    Log("not used, and llama.cpp runs without it: " + problem);
    return nullptr;
  }
  if (plugin.settings.uses_sidecar()) plugin.claims.TakePrefill();
  plugin.registry = MakeRegistry();
  plugin.device = MakeDevice(&plugin.registry);
  Log(std::string("loaded into ggml ") + plugin.api.version() + "; " +
      (plugin.settings.selects() ? "selects tokens" : "exact") + ", for contexts of " +
      std::to_string(plugin.settings.min_tokens) + " tokens and more");
  return &plugin.registry;
}

}  // namespace
}  // namespace pqcached::llama

extern "C" {

// Called by ggml when it loads the library (GGML_BACKEND_PATH).
[[gnu::visibility("default")]] pqcached::llama::GgmlRegistry* ggml_backend_init() {
  static pqcached::llama::GgmlRegistry* const registry = pqcached::llama::Load();
  return registry;
}

// Called by ggml to choose between libraries: 0 is unusable.
[[gnu::visibility("default")]] int ggml_backend_score() { return 1; }
}
