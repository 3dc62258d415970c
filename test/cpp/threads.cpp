// Concurrent uses that are allowed. `make sanitize` runs this file under the thread sanitizer.

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <torchext/torchext.h>

#include "core/deferred_init/graph/op_graph.h"
#include "extensions/digests/digest.h"
#include "extensions/memory/device_memory.h"
#include "extensions/memory/memory_counter.h"
#include "extensions/memory/timeline.h"
#include "extensions/placement/placed.h"
#include "libraries/support/locks.h"
#include "tests.h"

using at::Tensor;
using torchext::AutocastRegion;
using torchext::DeferredInitGuard;
using torchext::FakeModeGuard;
using torchext::InferenceMode;
using torchext::isDeferred;
using torchext::isFake;

namespace {

constexpr int kRounds = 50;

// Runs all functions at once, each on its own thread, and rethrows one of their errors.
void runAtOnce(const std::vector<std::function<void()>>& functions) {
  std::atomic<std::size_t> waiting{functions.size()};
  std::mutex mutex;
  std::exception_ptr error;
  std::vector<std::thread> threads;
  threads.reserve(functions.size());
  for (const auto& function : functions) {
    threads.emplace_back([&] {
      --waiting;
      while (waiting > 0) {
        std::this_thread::yield();
      }
      try {
        function();
      } catch (...) {
        const std::lock_guard<std::mutex> lock{mutex};
        error = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

Tensor deferredFull(double number) {
  const DeferredInitGuard guard;
  return at::full({4, 4}, number);
}

bool isFullOf(const Tensor& tensor, double number) {
  return !isFake(tensor) && tensor.equal(at::full({4, 4}, number));
}

// The first test of the file: run alone, it is the first use of torchext in the process.
void threadsBeginAtOnce() {
  const auto begin = [] {
    const FakeModeGuard fakes;
    EXPECT(isFake(at::ones({2, 2})));
  };
  const auto defer = [] {
    Tensor tensor = deferredFull(3);
    torchext::materialize({tensor});
    EXPECT(isFullOf(tensor, 3));
  };
  const auto infer = [] {
    const InferenceMode mode;
    EXPECT(at::ones({2, 2}).is_inference());
  };
  runAtOnce({begin, begin, defer, defer, infer});
}

// A thread uses cache entries of another thread.
void threadsMakeFakesAndShareTheCache() {
  const auto multiply = [] {
    for (int round = 1; round <= kRounds; ++round) {
      const FakeModeGuard fakes;
      const Tensor product = at::mm(at::empty({2, round}), at::empty({round, 3}));
      EXPECT(isFake(product) && product.size(1) == 3);
      EXPECT(product.t().sum(0).size(0) == 2);
    }
  };
  runAtOnce({multiply, multiply, multiply});
}

void threadsHaveSeparateBlocks() {
  const auto infer = [] {
    for (int round = 0; round < kRounds; ++round) {
      const InferenceMode mode;
      EXPECT(at::ones({2, 2}).is_inference());
    }
  };
  const auto autocast = [] {
    for (int round = 0; round < kRounds; ++round) {
      const AutocastRegion region{{c10::kCPU, at::kBFloat16}};
      EXPECT(at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type() == at::kBFloat16);
    }
  };
  const auto neither = [] {
    for (int round = 0; round < kRounds; ++round) {
      const Tensor result = at::mm(at::ones({2, 2}), at::ones({2, 2}));
      EXPECT(!result.is_inference() && result.scalar_type() == at::kFloat && !isFake(result));
    }
  };
  runAtOnce({infer, autocast, autocast, neither});
}

void threadsMaterializeTheSameTensors() {
  for (int round = 0; round < kRounds; ++round) {
    const Tensor tensor = deferredFull(round);
    const Tensor view = tensor.view({16});
    const auto materialize = [&] { torchext::materialize({tensor}); };
    runAtOnce({materialize, materialize, [&] { torchext::materialize({view}); }});
    EXPECT(isFullOf(tensor, round) && !isFake(view));
  }
}

// As the explanations in Python do.
bool hasOperators(const Tensor& tensor) {
  const torchext::Locked lock{torchext::LockRank::kReplay};
  return !torchext::operatorsBehind({torchext::recordingOf(tensor).value}).empty();
}

// The threads share the common part of the recording, but not the storages.
void oneThreadMaterializesWhileOthersUseDependents() {
  for (int round = 0; round < kRounds; ++round) {
    const Tensor tensor = deferredFull(round);
    const Tensor next = tensor.add(1);
    const auto read = [&next, round] {
      EXPECT(isDeferred(next) && next.size(0) == 4);
      EXPECT(next.view({16}).detach().size(0) == 16);
      const Tensor last = next.add(1).mul_(2);
      EXPECT(torchext::evaluate(last).equal(at::full({4, 4}, 2.0 * (round + 2))));
      EXPECT(hasOperators(last));
    };
    runAtOnce({[&] { torchext::materialize({tensor}); }, read, read});
    EXPECT(isFullOf(tensor, round));
    torchext::materialize({next});
    EXPECT(isFullOf(next, round + 1));
  }
}

// Sizes and strides stay unchanged, and a thread may release its tensors.
void othersReadSizesAndFreeViewsDuringMaterialization() {
  for (int round = 0; round < kRounds; ++round) {
    const Tensor tensor = deferredFull(round);
    std::vector<Tensor> views;
    for (int i = 0; i < 16; ++i) {
      views.push_back(tensor.view({16}));
    }
    const auto ask = [&tensor] { EXPECT(tensor.size(0) == 4 && tensor.stride(0) == 4 && tensor.dim() == 2); };
    runAtOnce({[&] { torchext::materialize({tensor}); }, [&] { views.clear(); }, ask});
    EXPECT(isFullOf(tensor, round));
  }
}

// Reading a single element of a deferred tensor shortens its recording to a constant.
void othersExplainAndEvaluateDuringReads() {
  for (int round = 0; round < kRounds; ++round) {
    const Tensor tensor = deferredFull(round).add(1).add(1);
    const auto explain = [&] { EXPECT(hasOperators(tensor)); };
    const auto read = [&] { EXPECT(tensor.sum().item<double>() == 16.0 * (round + 2)); };
    const auto look = [&] { EXPECT(torchext::evaluate(tensor).equal(at::full({4, 4}, round + 2.0))); };
    runAtOnce({explain, read, read, look});
  }
}

// The recorded call is complete when the first of its values can be read.
void othersReadTheFirstTensorOfAListThatIsWritten() {
  for (int round = 0; round < kRounds; ++round) {
    std::vector<Tensor> tensors;
    for (int i = 0; i < 64; ++i) {
      tensors.push_back(deferredFull(round));
    }
    const auto write = [&tensors] {
      for (int i = 0; i < 4; ++i) {
        at::_foreach_add_(tensors, 1);
      }
    };
    const auto read = [&tensors, round] {
      const double sum = torchext::evaluate(tensors.front()).sum().item<double>();
      EXPECT(sum >= 16.0 * round && sum <= 16.0 * (round + 4));
    };
    runAtOnce({write, read, read});
    EXPECT(torchext::evaluate(tensors.back()).equal(at::full({4, 4}, round + 4.0)));
  }
}

// The reader gets the value before the other thread's write, or after it.
void oneThreadReadsWhileAnotherWrites() {
  for (int round = 0; round < kRounds; ++round) {
    const Tensor tensor = deferredFull(round).add_(1);
    const auto write = [&] { tensor.add_(1); };
    const auto read = [&] {
      const double seen = tensor.select(0, 0).select(0, 0).item<double>();
      EXPECT(seen == round + 1.0 || seen == round + 2.0);
    };
    runAtOnce({write, read});
    EXPECT(torchext::evaluate(tensor).equal(at::full({4, 4}, round + 2.0)));
  }
}

// Reading an element replaces a value by a constant, while other threads record operators with the value and use its
// operator.
void othersRecordDuringReads() {
  for (int round = 0; round < kRounds; ++round) {
    const Tensor tensor = deferredFull(round).add(1);
    const auto read = [&] { EXPECT(tensor.select(0, 0).select(0, 0).item<double>() == round + 1.0); };
    const auto record = [&] {
      const Tensor next = tensor.add(1).mul(2);
      tensor.view({16}).mul(3);
      EXPECT(torchext::evaluate(next).equal(at::full({4, 4}, 2.0 * (round + 2))));
    };
    runAtOnce({read, record, record});
  }
}

// The allocation of a storage belongs to its record, which is destroyed when the storage becomes real.
void othersCountDuringMaterialization() {
  const auto timeline = torchext::openTimeline();
  for (int round = 0; round < kRounds; ++round) {
    const Tensor tensor = deferredFull(round);
    const c10::Storage storage = tensor.storage();
    const auto count = [&storage] {
      torchext::countExistingStorage(storage);
      torchext::labelStorage(storage, 1);
      torchext::visitCountedAllocation(storage, [](torchext::Allocation& allocation) { EXPECT(allocation.bytes > 0); });
    };
    runAtOnce({[&] { torchext::materialize({tensor}); }, count, count});
    EXPECT(isFullOf(tensor, round));
  }
  torchext::closeTimeline();
  EXPECT(timeline->liveBytes(-1) == torchext::BytesByCategory{});
}

constexpr Test kTests[] = {
    {"threads_begin_at_once", &threadsBeginAtOnce},
    {"threads_make_fakes_and_share_the_cache", &threadsMakeFakesAndShareTheCache},
    {"threads_have_separate_blocks", &threadsHaveSeparateBlocks},
    {"threads_materialize_the_same_tensors", &threadsMaterializeTheSameTensors},
    {"one_thread_materializes_while_others_use_dependents", &oneThreadMaterializesWhileOthersUseDependents},
    {"others_read_sizes_and_free_views_during_materialization", &othersReadSizesAndFreeViewsDuringMaterialization},
    {"others_explain_and_evaluate_during_reads", &othersExplainAndEvaluateDuringReads},
    {"others_read_the_first_tensor_of_a_list_that_is_written", &othersReadTheFirstTensorOfAListThatIsWritten},
    {"one_thread_reads_while_another_writes", &oneThreadReadsWhileAnotherWrites},
    {"others_record_during_reads", &othersRecordDuringReads},
    {"others_count_during_materialization", &othersCountDuringMaterialization},
};

}  // namespace

EXPORT_TESTS(kTests)
