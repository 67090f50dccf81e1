#include "client/engines/llama/engine_threads.h"

#include <algorithm>

namespace pqcached::llama {
namespace {

// Room for two graphs of a few nodes and a tensor.
constexpr size_t kContextBytes = size_t{1} << 20;
constexpr size_t kGraphNodes = 16;

}  // namespace

EngineThreads::EngineThreads(const GgmlApi& api) : api_(api) {
  GgmlDevice* device = api.backend_dev_by_type(kGgmlCpuDevice);
  if (device == nullptr) return;
  context_ = api.init({kContextBytes, nullptr, false});
  if (context_ == nullptr) return;
  node_graph_ = api.new_graph_custom(context_, kGraphNodes, false);
  GgmlGraph* job_graph = api.new_graph_custom(context_, kGraphNodes, false);
  GgmlTensor* job = api.custom_4d(context_, kGgmlF32, 1, 1, 1, 1, nullptr, 0,
                                  &EngineThreads::RunJob, kGgmlAllThreads, this);
  api.build_forward_expand(job_graph, job);
  cpu_ = api.backend_dev_init(device, nullptr);
  job_graph_ = job_graph;
  set_threads_ = reinterpret_cast<void (*)(GgmlBackend*, int)>(
      api.backend_reg_get_proc_address(device->registry, "ggml_backend_set_n_threads"));
}

EngineThreads::~EngineThreads() {
  if (cpu_ != nullptr) api_.backend_free(cpu_);
  if (context_ != nullptr) api_.free(context_);
}

void EngineThreads::SetThreads(int count) {
  threads_ = static_cast<uint32_t>(std::clamp(count, 1, 512));
  if (set_threads_ != nullptr && cpu_ != nullptr) set_threads_(cpu_, count);
}

GgmlStatus EngineThreads::ComputeByGgml(GgmlTensor* node) {
  api_.graph_clear(node_graph_);
  api_.graph_add_node(node_graph_, node);
  return api_.backend_graph_compute(cpu_, node_graph_);
}

Crew EngineThreads::crew() {
  return {.threads = threads_,
          .run = [](void* self, void (*work)(void* context, uint32_t thread),
                    void* context) { static_cast<EngineThreads*>(self)->Run(work, context); },
          .crew = this};
}

void EngineThreads::Run(void (*work)(void* context, uint32_t thread), void* context) {
  work_ = work;
  work_context_ = context;
  // A failure would come before the first thread begins.
  if (api_.backend_graph_compute(cpu_, job_graph_) != kGgmlSuccess) RunJob(nullptr, 0, 1, this);
}

void EngineThreads::RunJob(GgmlTensor*, int ith, int nth, void* self) {
  auto* const threads = static_cast<EngineThreads*>(self);
  const auto step = static_cast<uint32_t>(nth);
  for (auto i = static_cast<uint32_t>(ith); i < threads->threads_; i += step) {
    threads->work_(threads->work_context_, i);
  }
}

}  // namespace pqcached::llama
