// The guards of fake mode, deferred initialization, tracing and regions, as C++ programs use them.

#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torchext/torchext.h>

#include "libraries/support/interpreter.h"
#include "libraries/support/open_blocks.h"
#include "tests.h"

using torchext::AutocastRegion;
using torchext::DeferredInitGuard;
using torchext::FakeModeGuard;
using torchext::isDeferred;
using torchext::isFake;
using torchext::TracingGuard;

namespace {

at::Tensor ones() {
  return at::ones({2, 2});
}

void fakesAreMadeWhileTheGuardLives() {
  {
    const FakeModeGuard outer;
    {
      const FakeModeGuard inner;
      EXPECT(isFake(ones()));
    }
    EXPECT(isFake(ones()));
    std::thread{[] { EXPECT(!isFake(ones())); }}.join();
  }
  EXPECT(!isFake(ones()));
}

void guardsEndWhenAnExceptionPasses() {
  try {
    const FakeModeGuard fakes;
    const DeferredInitGuard deferred;
    const AutocastRegion region{{c10::kCPU, at::kBFloat16}};
    throw std::runtime_error("passes");
  } catch (const std::runtime_error&) {
    EXPECT(!isFake(ones()));
  }
  EXPECT(!torchext::isAutocasting(c10::kCPU));
}

void deferredTensorsBecomeReal() {
  at::Tensor tensor;
  {
    const TracingGuard tracing;
    const DeferredInitGuard guard;
    tensor = ones().add_(1);
    EXPECT(isDeferred(tensor));
  }
  torchext::materialize({tensor});
  EXPECT(!isFake(tensor));
  EXPECT(tensor.equal(at::ones({2, 2}).add_(1)));
}

void pairsOfFunctionsActLikeGuards() {
  using FakeBlocks = torchext::OpenGuards<FakeModeGuard>;
  using DeferredBlocks = torchext::OpenGuards<DeferredInitGuard>;
  FakeBlocks::enter(torchext::kAnyOwner);
  DeferredBlocks::enter(torchext::kAnyOwner);
  FakeBlocks::leave(torchext::kAnyOwner, "fake_mode()");
  EXPECT(isDeferred(ones()));
  DeferredBlocks::leave(torchext::kAnyOwner, "deferred_init()");
  EXPECT(!isFake(ones()));
  std::string message;
  try {
    FakeBlocks::leave(torchext::kAnyOwner, "fake_mode()");
  } catch (const std::exception& error) {
    message = error.what();
  }
  EXPECT(message.find("was left on a thread where it is not open") != std::string::npos);
}

void regionsAutocast() {
  {
    const AutocastRegion region{{c10::kCPU, at::kBFloat16}};
    EXPECT(at::mm(ones(), ones()).scalar_type() == at::kBFloat16);
    const AutocastRegion disabled{{c10::kCPU, {}, false}};
    EXPECT(at::mm(ones(), ones()).scalar_type() == at::kFloat);
  }
  EXPECT(at::mm(ones(), ones()).scalar_type() == at::kFloat);
}

constexpr Test kTests[] = {
    {"fakes_are_made_while_the_guard_lives", &fakesAreMadeWhileTheGuardLives},
    {"guards_end_when_an_exception_passes", &guardsEndWhenAnExceptionPasses},
    {"deferred_tensors_become_real", &deferredTensorsBecomeReal},
    {"pairs_of_functions_act_like_guards", &pairsOfFunctionsActLikeGuards},
    {"regions_autocast", &regionsAutocast},
};

}  // namespace

EXPORT_TESTS(kTests)
