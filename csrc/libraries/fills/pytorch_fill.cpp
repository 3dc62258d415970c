#include "pytorch_fill.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/normal_ops.h>
#include <ATen/ops/uniform_ops.h>

#include "../support/kernels_only.h"

namespace torchext {

void fillByPyTorch(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine) {
  const KernelsOnly guard;
  at::Tensor tensor = at::from_blob(values, {count}, at::dtype(fill.dtype));
  const at::Generator generator = at::detail::createCPUGenerator();
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  at::mt19937 own_engine;
  own_engine.set_data(engine);
  impl.set_engine(own_engine);
  // Calling an operator notifies the profiler, redispatching does not.
  if (fill.distribution == Distribution::Normal) {
    at::_ops::normal_::redispatch(KernelsOnly::kCpu, tensor, fill.first, fill.second, generator);
  } else {
    at::_ops::uniform_::redispatch(KernelsOnly::kCpu, tensor, fill.first, fill.second, generator);
  }
  engine = impl.engine().data();
}

}  // namespace torchext
