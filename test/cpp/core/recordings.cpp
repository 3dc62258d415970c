// Deferred initialization with the core alone: whole values by PyTorch's own kernels. Bits and the state of the
// generator are compared with those of eager execution.

#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torchext/deferred_init.h>
#include <torchext/fake_tensor.h>

#include "tests.h"

using at::Tensor;
using torchext::DeferredInitGuard;
using torchext::isDeferred;
using torchext::isFake;

namespace {

using Function = std::function<std::vector<Tensor>()>;

Tensor stateOfGenerator() {
  return at::detail::getDefaultCPUGenerator().get_state();
}

std::vector<Tensor> eager(const Function& construct) {
  at::manual_seed(7);
  return construct();
}

std::vector<Tensor> deferred(const Function& construct) {
  at::manual_seed(7);
  const DeferredInitGuard guard;
  return construct();
}

bool haveEqualBits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.reshape({-1}).view(at::kByte).equal(b.reshape({-1}).view(at::kByte));
}

std::vector<Tensor> makeLinear() {
  const Tensor weight = at::empty({64, 48}).uniform_(-0.125, 0.125);
  const Tensor bias = at::empty({64}).uniform_(-0.125, 0.125);
  return {weight, bias};
}

std::vector<Tensor> drawEverything() {
  const Tensor table = at::randn({30, 20});
  table.select(0, 1).zero_();
  const Tensor half = at::normal(0.0, 0.02, {17, 5}).to(at::kBFloat16);
  const Tensor order = at::randperm(19);
  const Tensor mask = at::bernoulli(at::full({40}, 0.3));
  const Tensor small = at::rand({3}, at::kDouble);
  return {table, half, order, mask, small};
}

std::vector<Tensor> shareStorages() {
  const Tensor all = at::zeros({4, 6});
  const Tensor rows = all.slice(0, 1, 3);
  rows.normal_();
  const Tensor columns = all.t();
  columns.mul_(3).add_(all.t(), 0.5);
  return {all, rows, columns, all.detach()};
}

std::vector<Tensor> orthogonalize() {
  const Tensor q = std::get<0>(at::linalg_qr(at::randn({8, 8})));
  return {q.mul(at::arange(8).sign()), at::cumsum(at::rand({10}), 0)};
}

std::vector<Tensor> overwrite() {
  const Tensor weight = at::empty({100}).normal_();
  weight.uniform_(0, 1);
  weight.slice(0, 10, 20).fill_(2);
  return {weight};
}

std::vector<Function> constructors() {
  return {&makeLinear, &drawEverything, &shareStorages, &orthogonalize, &overwrite};
}

void materializedTensorsHaveTheBitsOfEagerOnes() {
  for (const Function& construct : constructors()) {
    const std::vector<Tensor> expected = eager(construct);
    const Tensor state = stateOfGenerator();
    const std::vector<Tensor> made = deferred(construct);
    EXPECT(stateOfGenerator().equal(state));
    for (const Tensor& tensor : made) {
      EXPECT(isDeferred(tensor) && isFake(tensor));
    }
    torchext::materialize(made);
    for (std::size_t i = 0; i < made.size(); ++i) {
      EXPECT(!isFake(made[i]) && haveEqualBits(made[i], expected[i]));
    }
  }
}

void theOrderOfMaterializationDoesNotMatter() {
  for (const Function& construct : constructors()) {
    const std::vector<Tensor> expected = eager(construct);
    const std::vector<Tensor> made = deferred(construct);
    at::randn({5});  // another draw in between
    for (std::size_t i = made.size(); i-- > 0;) {
      torchext::materialize({made[i]});
      EXPECT(haveEqualBits(made[i], expected[i]));
    }
  }
}

void evaluatedTensorsStayDeferred() {
  const std::vector<Tensor> expected = eager(&makeLinear);
  const std::vector<Tensor> made = deferred(&makeLinear);
  EXPECT(haveEqualBits(torchext::evaluate(made[0]), expected[0]));
  EXPECT(isDeferred(made[0]));
}

void viewsStayViews() {
  const std::vector<Tensor> made = deferred(&shareStorages);
  torchext::materialize({made[1]});
  EXPECT(!isFake(made[0]) && made[1].is_alias_of(made[0]) && made[2].is_alias_of(made[0]));
}

void realTensorsCountAsRecorded() {
  const Tensor small = at::ones({4});
  const Tensor large = at::ones({1 << 19});
  const auto construct = [&]() -> std::vector<Tensor> {
    return {small + at::zeros({4}), large + at::zeros({1 << 19})};
  };
  const std::vector<Tensor> made = deferred(construct);
  small.zero_();
  large.zero_();
  EXPECT(torchext::evaluate(made[0]).equal(at::ones({4})));
  EXPECT(torchext::evaluate(made[1]).equal(at::ones({1 << 19})));
}

void operatorsThatReadRunAtOnce() {
  const auto construct = []() -> std::vector<Tensor> {
    const Tensor bounds = at::rand({8});
    const double largest = bounds.max().item<double>();
    return {at::full({2}, largest), at::nonzero(bounds > 0.5)};
  };
  const std::vector<Tensor> expected = eager(construct);
  const std::vector<Tensor> made = deferred(construct);
  torchext::materialize(made);
  EXPECT(haveEqualBits(made[0], expected[0]) && haveEqualBits(made[1], expected[1]));
}

void trainingStepsAreRecorded() {
  const auto construct = []() -> std::vector<Tensor> {
    const Tensor weight = at::randn({3, 3}).requires_grad_();
    const Tensor loss = at::mm(at::ones({2, 3}), weight).tanh().sum();
    loss.backward();
    return {weight.detach(), weight.grad()};
  };
  const std::vector<Tensor> expected = eager(construct);
  const std::vector<Tensor> made = deferred(construct);
  torchext::materialize(made);
  EXPECT(haveEqualBits(made[0], expected[0]) && haveEqualBits(made[1], expected[1]));
}

constexpr Test kTests[] = {
    {"materialized_tensors_have_the_bits_of_eager_ones", &materializedTensorsHaveTheBitsOfEagerOnes},
    {"the_order_of_materialization_does_not_matter", &theOrderOfMaterializationDoesNotMatter},
    {"evaluated_tensors_stay_deferred", &evaluatedTensorsStayDeferred},
    {"views_stay_views", &viewsStayViews},
    {"real_tensors_count_as_recorded", &realTensorsCountAsRecorded},
    {"operators_that_read_run_at_once", &operatorsThatReadRunAtOnce},
    {"training_steps_are_recorded", &trainingStepsAreRecorded},
};

}  // namespace

EXPORT_TESTS(kTests)
