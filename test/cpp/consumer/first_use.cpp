// Several threads of a program without Python use torchext for the first time at once. The self-tests must run once,
// and the keys must be taken once.

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torchext/torchext.h>

namespace {

bool makesFakes() {
  const torchext::FakeModeGuard fakes;
  return torchext::isFake(at::ones({2, 2}));
}

bool defers() {
  at::Tensor tensor;
  {
    const torchext::DeferredInitGuard deferred;
    tensor = at::full({4}, 3);
  }
  const bool was_deferred = torchext::isDeferred(tensor);
  torchext::materialize({tensor});
  return was_deferred && tensor.equal(at::full({4}, 3));
}

bool infers() {
  const torchext::InferenceMode inference;
  return at::ones({2, 2}).is_inference();
}

bool autocasts() {
  const torchext::AutocastRegion region{{c10::kCPU, at::kBFloat16}};
  return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type() == at::kBFloat16;
}

}  // namespace

int main() {
  const std::vector<std::function<bool()>> uses{makesFakes, makesFakes, defers, defers, infers, autocasts};
  std::atomic<std::size_t> waiting{uses.size()};
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  for (const auto& use : uses) {
    threads.emplace_back([&] {
      --waiting;
      while (waiting > 0) {
        std::this_thread::yield();
      }
      failed += use() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::puts(failed == 0 ? "ok" : "a thread got an unexpected result");
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
