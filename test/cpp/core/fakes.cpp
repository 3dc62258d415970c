// Fake tensors with the core alone: no values, no trials, no fake devices. Results are compared with those of real
// tensors.

#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torchext/fake.h>

#include "core/hooks/hooks.h"
#include "tests.h"

using at::Tensor;
using torchext::FakeModeGuard;
using torchext::isFake;

namespace {

using Function = std::function<Tensor()>;

bool haveEqualMetadata(const Tensor& fake, const Tensor& real) {
  return fake.sizes() == real.sizes() && fake.strides() == real.strides() && fake.dtype() == real.dtype() &&
         fake.device() == real.device() && fake.storage_offset() == real.storage_offset() &&
         fake.storage().nbytes() == real.storage().nbytes() && fake.requires_grad() == real.requires_grad() &&
         fake.is_conj() == real.is_conj() && fake.is_neg() == real.is_neg() && fake._version() == real._version();
}

std::string messageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  throw std::logic_error("expected an error");
}

// Programs of views, arithmetic, reductions, writes and factories.
std::vector<Function> programs() {
  return {
      [] { return at::ones({2, 3}) + 1; },
      [] { return at::rand({4, 6}).t().select(0, 2); },
      [] { return at::arange(24).view({2, 3, 4}).permute({2, 0, 1}).contiguous(); },
      [] { return at::zeros({3}, at::kInt) + at::ones({2, 1}, at::kHalf); },
      [] { return at::mm(at::randn({5, 7}), at::randn({7, 2})).relu_().sum(1, /*keepdim=*/true); },
      [] { return at::cat({at::ones({2, 3}), at::ones({4, 3}).mul_(2)}).slice(0, 1, 5, 2); },
      [] { return at::softmax(at::randn({2, 5}, at::kDouble), 1).to(at::kBFloat16); },
      [] { return at::conv2d(at::randn({1, 3, 8, 8}), at::randn({4, 3, 3, 3}), {}, {2, 2}); },
      [] { return at::layer_norm(at::randn({2, 3, 4}), {4}); },
      [] { return at::randn({3, 3}, at::kComplexFloat).conj().t(); },
      [] { return at::empty({0}).resize_({4, 2}).fill_(1); },
      [] { return at::index_select(at::randn({5, 2}), 0, at::zeros({3}, at::kLong)); },
      [] { return at::var(at::randn({4, 4}), 0).sqrt_().unsqueeze_(0); },
      [] { return std::get<0>(at::topk(at::randn({4, 9}), 3)); },
  };
}

void programsHaveTheMetadataOfRealTensors() {
  for (const Function& program : programs()) {
    const Tensor real = program();
    for (int pass = 0; pass < 2; ++pass) {  // the second one is answered from the cache
      const FakeModeGuard guard;
      const Tensor fake = program();
      EXPECT(isFake(fake));
      EXPECT(haveEqualMetadata(fake, real));
    }
  }
}

void fakesOutliveTheirBlock() {
  Tensor fake;
  {
    const FakeModeGuard guard;
    fake = at::ones({2, 2});
  }
  const Tensor sum = fake + at::ones({2, 2});
  EXPECT(isFake(sum));
  EXPECT(!isFake(at::ones({2, 2})));
}

void viewsShareTheirStorage() {
  const FakeModeGuard guard;
  const Tensor base = at::zeros({4, 4});
  const Tensor row = base[1];
  row.add_(1);
  EXPECT(row.storage().is_alias_of(base.storage()) ||
         row.storage().unsafeGetStorageImpl() == base.storage().unsafeGetStorageImpl());
  EXPECT(base._version() == 1 && row._version() == 1);
}

void backwardPassesReachLeaves() {
  const auto gradient = [] {
    const Tensor weight = at::ones({3, 3}).requires_grad_();
    const Tensor loss = at::mm(at::ones({2, 3}), weight).tanh().sum();
    torch::autograd::backward({loss}, {});
    return weight.grad();
  };
  const Tensor real = gradient();
  const FakeModeGuard guard;
  const Tensor fake = gradient();
  EXPECT(isFake(fake));
  EXPECT(fake.sizes() == real.sizes() && fake.strides() == real.strides() && fake.dtype() == real.dtype());
}

void valuesAreRefused() {
  const FakeModeGuard guard;
  const Tensor fake = at::ones({1});
  EXPECT(messageOf([&] { fake.item(); }).find("needs the values of its arguments") != std::string::npos);
  EXPECT(messageOf([&] { at::nonzero(fake); }).find("needs the values") != std::string::npos);
  EXPECT(messageOf([&] { fake.const_data_ptr(); }).find("This tensor is fake") != std::string::npos);
}

void realTensorsAreNotWritten() {
  const Tensor real = at::zeros({2});
  const FakeModeGuard guard;
  EXPECT(messageOf([&] { real.copy_(at::ones({2})); }).find("into the real tensor") != std::string::npos);
}

void shapesThatDoNotFitAreRefusedLikeReal() {
  const auto multiply = [] { at::mm(at::ones({2, 3}), at::ones({2, 3})); };
  const std::string real = messageOf(multiply);
  const FakeModeGuard guard;
  EXPECT(messageOf(multiply) == real);
}

void threadsHaveNoBlock() {
  const FakeModeGuard guard;
  std::thread{[] { EXPECT(!isFake(at::ones({1}))); }}.join();
}

// Otherwise, these would be tests of the extensions.
void noExtensionIsConnected() {
  const torchext::Hooks& hooks = torchext::hooks();
  EXPECT(hooks.handlers.begin() == hooks.handlers.end() && hooks.followers.begin() == hooks.followers.end());
  EXPECT(!hooks.layouts.isSparse && !hooks.layouts.refuse && hooks.on_fake_key.begin() == hooks.on_fake_key.end());
  EXPECT(!hooks.guards.traceOrigins && !hooks.guards.beginCleaning);
  EXPECT(hooks.decompositions.begin() == hooks.decompositions.end());
  EXPECT(hooks.memory == nullptr && !hooks.parts.ruleOf && !hooks.replay_fill);
}

constexpr Test kTests[] = {
    {"programs_have_the_metadata_of_real_tensors", &programsHaveTheMetadataOfRealTensors},
    {"fakes_outlive_their_block", &fakesOutliveTheirBlock},
    {"views_share_their_storage", &viewsShareTheirStorage},
    {"backward_passes_reach_leaves", &backwardPassesReachLeaves},
    {"values_are_refused", &valuesAreRefused},
    {"real_tensors_are_not_written", &realTensorsAreNotWritten},
    {"shapes_that_do_not_fit_are_refused_like_real", &shapesThatDoNotFitAreRefusedLikeReal},
    {"threads_have_no_block", &threadsHaveNoBlock},
    {"no_extension_is_connected", &noExtensionIsConnected},
};

}  // namespace

EXPORT_TESTS(kTests)
