// pqc_gpu_merge_tensors gives what pqc_merge_tensors gives on the host, for all dtypes, strides and
// bases, and in steps and graphs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gpu/graph.h"
#include "kernels/base/dtype.h"
#include "pqcached/gpu.hpp"
#include "tests/gpu/client_step_fixture.h"

namespace pqcached::testing {
namespace {

using kernels::DType;

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr pqc_dtype kDTypes[] = {PQC_F16, PQC_BF16, PQC_F32};

// The outermost dimension; kBackwards: tokens, of which the last is first in memory.
enum class Order { kTokens, kHeads, kDims, kBackwards };
constexpr Order kOrders[] = {Order::kTokens, Order::kHeads, Order::kDims, Order::kBackwards};

struct Layout {
  pqc_dtype output = PQC_F32;
  pqc_dtype lse = PQC_F32;
  pqc_log_base base = PQC_LOG_NATURAL;
  Order order = Order::kTokens;
  uint64_t padding = 0;  // elements behind each run of the innermost dimension
  uint64_t offset = 0;   // elements before the tensor
};

struct Case {
  uint64_t tokens = 2, heads = 3, dim = 32;
  Layout a = {}, b = {};
  bool has_sinks = false;
  pqc_dtype sinks = PQC_F32;

  std::string Text() const {
    std::string text =
        std::to_string(tokens) + " x " + std::to_string(heads) + " x " + std::to_string(dim);
    for (const Layout& layout : {a, b}) {
      text += ", " + std::to_string(layout.output) + " lse " + std::to_string(layout.lse) +
              " base " + std::to_string(layout.base) + " order " +
              std::to_string(static_cast<int>(layout.order)) + " padding " +
              std::to_string(layout.padding) + " offset " + std::to_string(layout.offset);
    }
    return text + (has_sinks ? ", sinks " + std::to_string(sinks) : "");
  }
};

DType TypeOf(pqc_dtype dtype) { return static_cast<DType>(dtype); }

// A tensor in host memory and, where there is a device, the same bytes there.
class Twin {
 public:
  Twin(pqc_dtype dtype, std::vector<uint64_t> shape, Order order, uint64_t padding, uint64_t offset)
      : dtype_(TypeOf(dtype)), shape_(std::move(shape)), strides_(shape_.size()) {
    std::vector<size_t> inner_first;
    for (size_t i = shape_.size(); i-- > 0;) inner_first.push_back(i);
    if (order == Order::kHeads && shape_.size() > 1)
      std::swap(inner_first.back(), inner_first[inner_first.size() - 2]);
    if (order == Order::kDims) std::reverse(inner_first.begin(), inner_first.end());
    uint64_t run = 1;
    for (const size_t dim : inner_first) {
      strides_[dim] = static_cast<int64_t>(run);
      run *= std::max<uint64_t>(shape_[dim], 1);
      if (dim == inner_first.front()) run += padding;
    }
    first_ = offset;
    if (order == Order::kBackwards && shape_[0] > 0) {
      first_ += (shape_[0] - 1) * static_cast<uint64_t>(strides_[0]);
      strides_[0] = -strides_[0];
    }
    values_.assign(run + offset, 77.0f);  // between the elements too
    bytes_.resize(values_.size() * kernels::DTypeBytes(dtype_));
    c_.dtype = dtype;
    c_.ndim = static_cast<uint32_t>(shape_.size());
  }

  size_t At(const std::vector<uint64_t>& index) const {
    auto at = static_cast<int64_t>(first_);
    for (size_t i = 0; i < index.size(); ++i) at += static_cast<int64_t>(index[i]) * strides_[i];
    return static_cast<size_t>(at);
  }
  void Set(const std::vector<uint64_t>& index, float value) { values_[At(index)] = value; }
  void Write() {
    for (size_t i = 0; i < values_.size(); ++i)
      kernels::StoreElement(dtype_, bytes_.data(), i, values_[i]);
    device_ = std::make_unique<DeviceArray<std::byte>>(bytes_);
  }
  // The tensors hold addresses in this object.
  pqc_tensor Host() { return Tensor(bytes_.data(), PQC_CPU); }
  pqc_tensor Device() { return Tensor(device_->data(), PQC_CUDA); }

  // Compares the two memories: elements to the resolution of their type; the memory between them,
  // to which nothing may be written, and empty elements exactly.
  void ExpectEqual(const std::string& text) const {
    const std::vector<std::byte> device = device_->Get();
    std::vector<bool> is_element(values_.size());
    MarkElements(&is_element);
    const float resolution = dtype_ == DType::kBf16  ? 1.0f / 128
                             : dtype_ == DType::kF16 ? 1.0f / 1024
                                                     : 2e-6f;
    const float least = dtype_ == DType::kF16 ? 6e-8f : 2e-6f;
    for (size_t i = 0; i < values_.size(); ++i) {
      const float expected = kernels::LoadElement(dtype_, bytes_.data(), i);
      const float found = kernels::LoadElement(dtype_, device.data(), i);
      const float limit = is_element[i] ? least + resolution * std::abs(expected) : 0.0f;
      const bool are_same = expected == found || (std::isnan(expected) && std::isnan(found));
      ASSERT_TRUE(are_same || std::abs(expected - found) <= limit)
          << text << ": element " << i << " is " << found << ", must be " << expected;
    }
  }

 private:
  void MarkElements(std::vector<bool>* marks) const {
    std::vector<uint64_t> index(shape_.size());
    uint64_t count = 1;
    for (const uint64_t size : shape_) count *= size;
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t rest = i;
      for (size_t dim = shape_.size(); dim-- > 0; rest /= shape_[dim])
        index[dim] = rest % shape_[dim];
      (*marks)[At(index)] = true;
    }
  }
  pqc_tensor Tensor(std::byte* memory, pqc_device device) {
    pqc_tensor tensor = c_;
    tensor.ptr = memory ? memory + first_ * kernels::DTypeBytes(dtype_) : nullptr;
    tensor.device = device;
    tensor.shape = shape_.data();
    tensor.strides = strides_.data();
    return tensor;
  }

  DType dtype_;
  std::vector<uint64_t> shape_;
  std::vector<int64_t> strides_;
  uint64_t first_ = 0;
  std::vector<float> values_;
  std::vector<std::byte> bytes_;
  std::unique_ptr<DeviceArray<std::byte>> device_;
  pqc_tensor c_ = PQC_INIT(pqc_tensor);
};

struct TwinPartial {
  TwinPartial(const Case& c, const Layout& layout)
      : output(layout.output, {c.tokens, c.heads, c.dim}, layout.order, layout.padding,
               layout.offset),
        lse(layout.lse, {c.tokens, c.heads}, layout.order, 0, layout.offset),
        base(layout.base) {}

  pqc_partial Host() { return Partial(output.Host(), lse.Host()); }
  pqc_partial Device() { return Partial(output.Device(), lse.Device()); }
  pqc_partial Partial(const pqc_tensor& output_tensor, const pqc_tensor& lse_tensor) const {
    pqc_partial partial = PQC_INIT(pqc_partial);
    partial.output = output_tensor;
    partial.lse = lse_tensor;
    partial.lse_base = base;
    return partial;
  }

  Twin output, lse;
  pqc_log_base base;
};

// The two partials of a case. Of every five rows one has nothing in a, one nothing in b, one
// nothing in both, and one large log-sum-exps; an output that does not count is NaN.
class Pair {
 public:
  explicit Pair(const Case& c, uint32_t seed = 1)
      : a(c, c.a),
        b(c, c.b),
        sinks(c.sinks, {c.heads}, Order::kTokens, 0, 0),
        has_sinks_(c.has_sinks) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 2);
    for (uint64_t token = 0; token < c.tokens; ++token) {
      for (uint64_t head = 0; head < c.heads; ++head) {
        const uint64_t kind = (token * c.heads + head + seed) % 5;
        const bool has_a = kind != 1 && kind != 3, has_b = kind != 2 && kind != 3;
        const float large = kind == 4 ? 500.0f : 0.0f;
        a.lse.Set({token, head}, has_a ? large + normal(random) : kNothing);
        b.lse.Set({token, head}, has_b ? large + normal(random) : kNothing);
        for (uint64_t i = 0; i < c.dim; ++i) {
          a.output.Set({token, head, i}, has_a ? normal(random) : kNaN);
          b.output.Set({token, head, i}, has_b ? normal(random) : kNaN);
        }
      }
    }
    for (uint64_t head = 0; head < c.heads; ++head)
      sinks.Set({head}, head % 3 == 1 ? kNothing : normal(random));
    for (Twin* twin : {&a.output, &a.lse, &b.output, &b.lse, &sinks}) twin->Write();
  }

  pqc_status MergeOnHost() {
    const pqc_tensor logits = sinks.Host();
    pqc_partial into = a.Host();
    const pqc_partial from = b.Host();
    if (has_sinks_) into.sink_logits = &logits;
    return pqc_merge_tensors(&into, &from);
  }
  pqc_status MergeOnDevice(pqc_gpu* gpu, void* stream) {
    const pqc_tensor logits = sinks.Device();
    pqc_partial into = a.Device();
    const pqc_partial from = b.Device();
    if (has_sinks_) into.sink_logits = &logits;
    return pqc_gpu_merge_tensors(gpu, &into, &from, stream);
  }
  void ExpectEqual(const std::string& text) const {
    for (const Twin* twin : {&a.output, &a.lse, &b.output, &b.lse, &sinks}) twin->ExpectEqual(text);
  }

  TwinPartial a, b;
  Twin sinks;

 private:
  bool has_sinks_;
};

class ClientMergeTest : public ClientStepTest {
 protected:
  void SetUp() override {
    ClientStepTest::SetUp();
    if (WhyNoDevice().empty()) ExpectOk(OpenGpu(0));
  }
  void Check(const Case& c, uint32_t seed = 1) {
    Pair pair(c, seed);
    ExpectOk(pair.MergeOnHost());
    ExpectOk(pair.MergeOnDevice(gpu_, stream_));
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    pair.ExpectEqual(c.Text());
  }
  void ExpectRefused(const pqc_partial& a, const pqc_partial& b, const std::string& field) {
    EXPECT_EQ(pqc_gpu_merge_tensors(gpu_, &a, &b, stream_), PQC_INVALID_ARGUMENT) << field;
    EXPECT_EQ(std::string(pqc_last_error_field()), field) << pqc_last_error();
  }
};

TEST_F(ClientMergeTest, RowsOfAllLengthsAreAsOnTheHost) {
  for (const uint64_t dim :
       {0u, 1u, 2u, 3u, 4u, 5u, 31u, 33u, 63u, 127u, 128u, 129u, 131u, 132u, 256u, 517u}) {
    for (const uint64_t tokens : {0u, 1u, 3u}) {
      for (const uint64_t heads : {0u, 1u, 5u}) {
        for (const pqc_dtype dtype : kDTypes) {
          for (const bool has_sinks : {false, true}) {
            Check({.tokens = tokens,
                   .heads = heads,
                   .dim = dim,
                   .a = {.output = dtype},
                   .b = {.output = dtype},
                   .has_sinks = has_sinks});
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(ClientMergeTest, AllDTypesAndBasesAreAsOnTheHost) {
  uint32_t seed = 0;
  for (const pqc_dtype output_a : kDTypes) {
    for (const pqc_dtype output_b : kDTypes) {
      for (const pqc_dtype lse : kDTypes) {
        for (const pqc_log_base base_a : {PQC_LOG_NATURAL, PQC_LOG_BASE2}) {
          for (const pqc_log_base base_b : {PQC_LOG_NATURAL, PQC_LOG_BASE2}) {
            Check({.tokens = 3,
                   .heads = 5,
                   .dim = 68,
                   .a = {.output = output_a, .lse = lse, .base = base_a},
                   .b = {.output = output_b, .lse = kDTypes[seed % 3], .base = base_b},
                   .has_sinks = seed % 2 == 0,
                   .sinks = kDTypes[seed / 3 % 3]},
                  seed);
            ++seed;
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(ClientMergeTest, AllStridesAreAsOnTheHostAndNothingElseIsWritten) {
  for (const Order order_a : kOrders) {
    for (const Order order_b : kOrders) {
      for (const uint64_t padding : {0u, 1u, 4u}) {
        for (const uint64_t offset : {0u, 1u, 8u}) {
          Check({.tokens = 3,
                 .heads = 4,
                 .dim = 36,
                 .a = {.output = PQC_BF16, .order = order_a, .padding = padding, .offset = offset},
                 .b = {.output = PQC_F32,
                       .order = order_b,
                       .padding = 4 - padding,
                       .offset = 8 - offset}});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(ClientMergeTest, MoreRowsThanWarpsAreAllMerged) {
  Check({.tokens = 4096 * 8 / 5 + 3, .heads = 5, .dim = 1});
}

TEST_F(ClientMergeTest, AGraphMergesAgain) {
  Pair pair({.tokens = 2, .heads = 4, .dim = 64, .has_sinks = true});
  gpu::Graph graph;
  ASSERT_TRUE(graph.Begin(stream_).ok());
  ExpectOk(pair.MergeOnDevice(gpu_, stream_));
  ASSERT_TRUE(graph.End().ok());
  EXPECT_EQ(graph.node_count(), 1u);
  pair.ExpectEqual("nothing is done while the stream captures");
  for (int i = 0; i < 3; ++i) {
    ExpectOk(pair.MergeOnHost());
    ASSERT_TRUE(graph.Launch(stream_).ok());
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }
  pair.ExpectEqual("after three merges");
}

TEST_F(ClientMergeTest, TheCxxWrapperPassesEverythingOn) {
  const std::vector<float> output_a = {1, 2, 3, 4}, output_b = {5, 6, 7, 8}, sinks = {0, kNothing};
  const DeviceArray<float> a(output_a), b(output_b), lse_a(std::vector<float>{0, 0});
  const DeviceArray<float> lse_b(std::vector<float>{1, 1}), sink_logits(sinks);
  const auto memory = [](const DeviceArray<float>& output, const DeviceArray<float>& lse) {
    return AttentionMemory{.output = Tensor(output.data(), PQC_F32, {1, 2, 2}).OnGpu(),
                           .lse = Tensor(lse.data(), PQC_F32, {1, 2}).OnGpu(),
                           .lse_base = PQC_LOG_BASE2};
  };
  const Tensor logits = Tensor(sink_logits.data(), PQC_F32, {2}).OnGpu();
  Gpu gpu = Gpu::Adopt(std::exchange(gpu_, nullptr));
  const Status status = gpu.Merge(memory(a, lse_a), memory(b, lse_b), stream_, &logits);
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  // Weights 1, 2 and, for the first head, 1 of the sink.
  const std::vector<float> expected = {11.0f / 4, 14.0f / 4, 17.0f / 3, 20.0f / 3};
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(a.Get()[i], expected[i], 1e-5f);
  ASSERT_NEAR(lse_a.Get()[0], 2.0f, 1e-5f);
  ASSERT_NEAR(lse_a.Get()[1], std::log2(3.0f), 1e-5f);
}

// An engine's own attention over sink and window makes a step's attention complete.
TEST_F(ClientMergeTest, InAStepItCompletesTheAttention) {
  Fill();
  PrepareTensors();
  pqc_step* step = nullptr;
  ExpectOk(Begin(kPrefill, 1.0, &step));
  ASSERT_TRUE(step != nullptr);
  ExpectOk(RunLayer(step, 0));
  std::vector<uint32_t> own(kSink), all(kPrefill + 1);
  std::iota(own.begin(), own.end(), 0u);
  std::iota(all.begin(), all.end(), 0u);
  for (uint32_t token = kPrefill + 1 - kWindow; token <= kPrefill; ++token) own.push_back(token);
  Results part{std::vector<float>(kQueryFloats), std::vector<float>(kQueryHeads), {}, {}};
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    double sum = 0;
    std::vector<double> output(kDim);
    for (const uint32_t token : own) {
      const size_t row = (token * kKvHeads + head / kGroup) * kDim;
      double logit = 0;
      for (uint32_t i = 0; i < kDim; ++i)
        logit += double{queries_[0][head * kDim + i]} * keys_[0][row + i];
      const double weight = std::exp(logit / std::sqrt(double{kDim}));
      for (uint32_t i = 0; i < kDim; ++i) output[i] += weight * values_[0][row + i];
      sum += weight;
    }
    part.lse[head] = static_cast<float>(std::log(sum));
    for (uint32_t i = 0; i < kDim; ++i)
      part.output[head * kDim + i] = static_cast<float>(output[i] / sum);
  }
  const DeviceArray<float> output(part.output), lse(part.lse);
  const auto partial = [](const Shaped& output_of, float* lse_of) {
    pqc_partial c = PQC_INIT(pqc_partial);
    c.output = c.lse = output_of.tensor;
    c.lse.ptr = lse_of;
    c.lse.ndim = 2;
    return c;
  };
  const Shaped own_output(output.data(), PQC_CUDA, 1, kQueryHeads);
  const Shaped selected_output(tensors_[0]->output.data(), PQC_CUDA, 1, kQueryHeads);
  const pqc_partial a = partial(own_output, lse.data());
  const pqc_partial b = partial(selected_output, tensors_[0]->lse.data());
  ExpectOk(pqc_gpu_merge_tensors(gpu_, &a, &b, stream_));
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  ExpectAttention(0, {output.Get(), lse.Get(), {}, {}}, {all, all});
  for (uint32_t layer = 1; layer < kLayers; ++layer) ExpectOk(RunLayer(step, layer));
  ExpectOk(End(step, kPrefill));
}

TEST_F(ClientMergeTest, WrongTensorsAreNamedAndNothingIsWritten) {
  const Case c{.tokens = 2, .heads = 3, .dim = 8, .a = {.output = PQC_F16}};
  Pair pair(c);
  const pqc_partial a = pair.a.Device(), b = pair.b.Device();
  EXPECT_EQ(pqc_gpu_merge_tensors(nullptr, &a, &b, stream_), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(pqc_last_error_field()), "gpu");
  EXPECT_EQ(pqc_gpu_merge_tensors(gpu_, nullptr, &b, stream_), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(pqc_last_error_field()), "a");
  EXPECT_EQ(pqc_gpu_merge_tensors(gpu_, &a, nullptr, stream_), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(pqc_last_error_field()), "b");
  const auto wrong_a = [&](const std::string& field, const auto& change) {
    pqc_partial wrong = a;
    change(wrong);
    ExpectRefused(wrong, b, field);
  };
  const auto wrong_b = [&](const std::string& field, const auto& change) {
    pqc_partial wrong = b;
    change(wrong);
    ExpectRefused(a, wrong, field);
  };
  // Host tensors, and host memory that is said to be the device's.
  const pqc_partial host_a = pair.a.Host(), host_b = pair.b.Host();
  const pqc_tensor host_sinks = pair.sinks.Host();
  pqc_tensor sinks = pair.sinks.Device();
  wrong_a("a.output.device", [&](pqc_partial& wrong) { wrong.output = host_a.output; });
  wrong_a("a.lse.device", [&](pqc_partial& wrong) { wrong.lse = host_a.lse; });
  wrong_b("b.output.device", [&](pqc_partial& wrong) { wrong.output = host_b.output; });
  wrong_b("b.lse.device", [&](pqc_partial& wrong) { wrong.lse = host_b.lse; });
  wrong_a("a.sink_logits.device", [&](pqc_partial& wrong) { wrong.sink_logits = &host_sinks; });
  wrong_a("a.output.ptr", [&](pqc_partial& wrong) { wrong.output.ptr = host_a.output.ptr; });
  wrong_a("a.lse.ptr", [&](pqc_partial& wrong) { wrong.lse.ptr = host_a.lse.ptr; });
  wrong_b("b.output.ptr", [&](pqc_partial& wrong) { wrong.output.ptr = host_b.output.ptr; });
  wrong_b("b.lse.ptr", [&](pqc_partial& wrong) { wrong.lse.ptr = host_b.lse.ptr; });
  sinks.ptr = host_sinks.ptr;
  wrong_a("a.sink_logits.ptr", [&](pqc_partial& wrong) { wrong.sink_logits = &sinks; });
  // Pointers between elements.
  const auto one_byte_on = [](pqc_tensor& tensor) {
    tensor.ptr = static_cast<char*>(tensor.ptr) + 1;
  };
  wrong_a("a.output.ptr", [&](pqc_partial& wrong) { one_byte_on(wrong.output); });
  wrong_a("a.lse.ptr", [&](pqc_partial& wrong) { one_byte_on(wrong.lse); });
  wrong_b("b.output.ptr", [&](pqc_partial& wrong) { one_byte_on(wrong.output); });
  wrong_b("b.lse.ptr", [&](pqc_partial& wrong) { one_byte_on(wrong.lse); });
  sinks = pair.sinks.Device();
  one_byte_on(sinks);
  wrong_a("a.sink_logits.ptr", [&](pqc_partial& wrong) { wrong.sink_logits = &sinks; });
  // Shapes.
  const uint64_t other[] = {2, 3, 9}, other_lse[] = {2, 4}, two[] = {2};
  wrong_b("b.output.shape", [&](pqc_partial& wrong) { wrong.output.shape = other; });
  wrong_a("a.lse.shape[1]", [&](pqc_partial& wrong) { wrong.lse.shape = other_lse; });
  wrong_b("b.lse.ndim", [&](pqc_partial& wrong) { wrong.lse.ndim = 1; });
  sinks = pair.sinks.Device();
  sinks.shape = two;
  wrong_a("a.sink_logits.shape", [&](pqc_partial& wrong) { wrong.sink_logits = &sinks; });
  sinks = pair.sinks.Device();
  wrong_b("b.sink_logits", [&](pqc_partial& wrong) { wrong.sink_logits = &sinks; });
  // Others.
  int not_the_stream = 0;
  wrong_a("a.output.stream", [&](pqc_partial& wrong) { wrong.output.stream = &not_the_stream; });
  const uint32_t unknown = 2;
  wrong_b("b.lse_base",
          [&](pqc_partial& wrong) { std::memcpy(&wrong.lse_base, &unknown, sizeof(unknown)); });
  const pqc_partial host = pair.a.Host();
  EXPECT_EQ(pqc_merge_tensors(&host, &b), PQC_UNIMPLEMENTED);
  EXPECT_EQ(std::string(pqc_last_error_field()), "b.output.device");
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  pair.ExpectEqual("after refusals");
}

}  // namespace
}  // namespace pqcached::testing
