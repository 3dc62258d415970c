// Plans a model before any of its memory exists, then materializes and runs one layer: fake tensors, deferred
// initialization, autocast and inference mode in a program without Python.

#include <cstdlib>
#include <iostream>

#include <torch/torch.h>
#include <torchext/torchext.h>

namespace {

constexpr int64_t kWidth = 16384;
constexpr int64_t kLayers = 24;

torch::nn::Sequential makeModel(int64_t width, int64_t layers) {
  torch::nn::Sequential model;
  for (int64_t i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(width, 4 * width));
    model->push_back(torch::nn::GELU());
    model->push_back(torch::nn::Linear(4 * width, width));
  }
  return model;
}

double gibibytes(const torch::nn::Module& module) {
  double bytes = 0;
  for (const torch::Tensor& parameter : module.parameters()) {
    bytes += static_cast<double>(parameter.nbytes());
  }
  return bytes / (1 << 30);
}

// Prints the shape, dtype and device of a result on a fake CUDA device.
void planOnFakeGpu() {
  const torchext::FakeCudaGuard gpus{8};
  const torchext::FakeModeGuard fakes;
  auto model = makeModel(kWidth, kLayers);
  model->to(torch::Device(torch::kCUDA, 7));
  const torchext::AutocastRegion region{{torch::kCUDA, torch::kBFloat16}};
  const torch::Tensor result = model->forward(torch::randn({32, kWidth}, torch::Device(torch::kCUDA, 7)));
  std::cout << "fake: " << gibibytes(*model) << " GiB of parameters, " << result.sizes() << " of "
            << result.scalar_type() << " on " << result.device() << "\n";
}

// Returns true if the values are bitwise equal to those of eager construction.
bool deferAndMaterializeOneLayer() {
  torch::manual_seed(0);
  auto eager = makeModel(64, 2);
  torch::manual_seed(0);
  auto model = [] {
    const torchext::DeferredInitGuard deferred;
    return makeModel(64, 2);
  }();
  const auto wanted = eager[2]->parameters();
  const auto layer = model[2]->parameters();
  torchext::materialize(layer);
  bool is_equal = torchext::isDeferred(model[0]->parameters()[0]);
  for (std::size_t i = 0; i < layer.size(); ++i) {
    is_equal = is_equal && torch::equal(layer[i], wanted[i]);
  }
  std::cout << "deferred: one layer of " << model->size() << " is real, and " << (is_equal ? "equal" : "NOT EQUAL")
            << " to that of eager construction\n";
  return is_equal;
}

// Returns true if tensors that outlive inference mode are normal tensors.
bool inferAndKeep() {
  auto model = makeModel(64, 1);
  torch::Tensor output;
  torch::Tensor cache;
  {
    const torchext::InferenceMode inference;
    const torchext::AutocastRegion region{{torch::kCPU, torch::kBFloat16}};
    output = model->forward(torch::ones({2, 64}));
    const torchext::NormalTensors keep;
    cache = torch::zeros({2, 64});
  }
  torchext::makeNormal(output);
  std::cout << "inference: " << output.scalar_type() << ", " << (output.is_inference() ? "an inference" : "a normal")
            << " tensor; the cache is " << (cache.is_inference() ? "an inference" : "a normal") << " tensor\n";
  return output.scalar_type() == torch::kBFloat16 && !output.is_inference() && !cache.is_inference();
}

}  // namespace

int main() {
  if (!torchext::hasRealCuda()) {
    planOnFakeGpu();
  }
  const bool is_equal = deferAndMaterializeOneLayer();
  const bool is_kept = inferAndKeep();
  return is_equal && is_kept ? EXIT_SUCCESS : EXIT_FAILURE;
}
