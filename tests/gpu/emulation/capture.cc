// Captures and graphs: what a capturing stream is given is kept instead of run, with the order that streams and events
// state; a graph runs it in any order that this allows. Calls that CUDA forbids during a capture end it, and say so.
//
// Stricter than CUDA, where CUDA would take what no step should do: work on the default stream, and copies to or from
// pageable memory.
#include <algorithm>
#include <cstdio>

#include "tests/gpu/emulation/state.h"

struct CUgraph_st {
  std::vector<pqcached::emulation::CaptureNode> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const std::vector<pqcached::emulation::CaptureNode>> nodes;
};

namespace pqcached::emulation {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// Nodes before which every path ends: whether all work of the capture comes before the end of its origin.
bool IsJoined(const Capture& capture) {
  std::vector<bool> reached(capture.nodes.size(), false);
  std::vector<size_t> open = capture.frontiers.at(capture.origin);
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    if (reached[node]) continue;
    reached[node] = true;
    open.insert(open.end(), capture.nodes[node].after.begin(), capture.nodes[node].after.end());
  }
  return std::ranges::all_of(reached, [](bool node) { return node; });
}

void RunGraph(const std::vector<CaptureNode>& nodes) {
  std::vector<bool> done(nodes.size(), false);
  for (size_t count = 0; count < nodes.size(); ++count) {
    std::vector<size_t> runnable;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (done[i]) continue;
      if (std::ranges::all_of(nodes[i].after, [&](size_t other) { return done[other]; })) {
        runnable.push_back(i);
      }
    }
    const size_t node = runnable[State().random() % runnable.size()];
    done[node] = true;
    nodes[node].run();
  }
}

void EndParticipation(Capture& capture) {
  capture.active = false;
  for (CUstream_st* stream : State().streams) {
    if (stream->capture.get() == &capture) stream->capture.reset();
  }
  std::erase_if(State().captures, [&](const auto& other) { return other.get() == &capture; });
}

}  // namespace

cudaError_t Invalidate(Capture& capture, cudaError_t error, const char* why) {
  std::fprintf(stderr, "emulated capture: %s\n", why);
  if (capture.error == cudaSuccess) capture.error = error;
  return Remember(error);
}

cudaError_t RefuseWhileCapturing(const char* name) {
  if (State().captures.empty() || thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  const std::string why = std::string(name) + " while a stream captures";
  for (const auto& capture : State().captures) {
    (void)Invalidate(*capture, cudaErrorStreamCaptureUnsupported, why.c_str());
  }
  return cudaErrorStreamCaptureUnsupported;
}

void AddToCapture(CUstream_st* stream, std::function<void()> run) {
  Capture& capture = *stream->capture;
  std::vector<size_t>& frontier = capture.frontiers[stream];
  capture.nodes.push_back({std::move(run), frontier});
  frontier = {capture.nodes.size() - 1};
}

}  // namespace pqcached::emulation

using namespace pqcached::emulation;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  PQC_MAY_FAIL("cudaStreamBeginCapture");
  if (stream == nullptr) return Remember(cudaErrorStreamCaptureUnsupported);
  if (stream->capture != nullptr) return Remember(cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++State().capture_count;
  stream->capture->origin = stream;
  stream->capture->frontiers[stream] = {};
  State().captures.push_back(stream->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  PQC_MAY_FAIL("cudaStreamIsCapturing");
  *status = cudaStreamCaptureStatusNone;
  if (stream == nullptr || stream->capture == nullptr) return cudaSuccess;
  *status = stream->capture->error == cudaSuccess ? cudaStreamCaptureStatusActive
                                                  : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  if (const cudaError_t error = cudaStreamIsCapturing(stream, status); error != cudaSuccess) {
    return error;
  }
  if (*status != cudaStreamCaptureStatusNone) *id = stream->capture->id;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  PQC_MAY_FAIL("cudaThreadExchangeStreamCaptureMode");
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  PQC_MAY_FAIL("cudaStreamEndCapture");
  *graph = nullptr;
  if (stream == nullptr || stream->capture == nullptr) return Remember(cudaErrorIllegalState);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin != stream) {
    return Invalidate(*capture, cudaErrorStreamCaptureUnmatched, "ended by another stream");
  }
  EndParticipation(*capture);
  if (capture->error != cudaSuccess) return Remember(cudaErrorStreamCaptureInvalidated);
  if (!IsJoined(*capture)) {
    return Invalidate(*capture, cudaErrorStreamCaptureUnjoined, "a stream was forked, not joined");
  }
  *graph = new CUgraph_st{std::move(capture->nodes)};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  PQC_NOT_IN_CAPTURE("cudaGraphInstantiate");
  *exec = new CUgraphExec_st{std::make_shared<const std::vector<CaptureNode>>(graph->nodes)};
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  PQC_MAY_FAIL("cudaGraphLaunch");
  Enqueue(stream, [nodes = exec->nodes] { RunGraph(*nodes); });
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  PQC_MAY_FAIL("cudaStreamWaitEvent");
  if (event->capture == nullptr) {
    if (stream != nullptr && stream->capture != nullptr) {
      return Invalidate(*stream->capture, cudaErrorStreamCaptureIsolation,
                        "waits for an event from outside the capture");
    }
    if (stream == nullptr) return cudaEventSynchronize(event);
    stream->queue.push_back({.run = {}, .event = event, .ticket = event->recorded});
    return cudaSuccess;
  }
  if (!event->capture->active || stream == nullptr) return Remember(cudaErrorCapturedEvent);
  if (stream->capture == nullptr) {
    stream->capture = event->capture;
    event->capture->frontiers[stream] = {};
  }
  if (stream->capture != event->capture) {
    return Invalidate(*stream->capture, cudaErrorStreamCaptureMerge, "two captures meet");
  }
  std::vector<size_t>& frontier = stream->capture->frontiers[stream];
  frontier.insert(frontier.end(), event->frontier.begin(), event->frontier.end());
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  PQC_MAY_FAIL("cudaEventRecord");
  if (stream != nullptr && stream->capture != nullptr) {
    event->capture = stream->capture;
    event->frontier = stream->capture->frontiers[stream];
    return cudaSuccess;
  }
  event->capture.reset();
  Enqueue(stream, [event, ticket = ++event->recorded] { event->done = ticket; });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  PQC_MAY_FAIL("cudaLaunchHostFunc");
  Enqueue(stream, [function, data] {
    State().in_host_function = true;  // which may not call the runtime
    function(data);
    State().in_host_function = false;
  });
  return cudaSuccess;
}
