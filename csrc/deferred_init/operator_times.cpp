#include "operator_times.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <unordered_map>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include "../fake/calls/op_traits.h"
#include "../support/locks.h"
#include "demands.h"
#include "draws.h"
#include "liveness.h"
#include "op_graph.h"
#include "real_dispatch.h"
#include "replay.h"
#include "replay_fill.h"

namespace torchext {

using at::Tensor;
using torch::jit::Stack;

namespace {

// ---- Predicting ----

// What writing `count` elements takes: so much for each call, and so much for each element.
struct Cost {
  double of_call;
  double of_element;

  double of(std::int64_t count) const {
    return of_call + of_element * static_cast<double>(count);
  }
};

// How long it takes to write new memory on the CPU, found out by doing it.
class Costs {
 public:
  // Of random fills, by the arguments of `node`.
  Cost ofFill(const OpNode& node, c10::ScalarType dtype) {
    return remembered({node.op().schema().name(), dtype},
                      [&](std::int64_t count) { return timeOfFill(node, dtype, count); });
  }

  // For each byte.
  Cost ofZeros() {
    return remembered({"", c10::kByte}, [](std::int64_t count) {
      return secondsOf([count] { at::empty({count}, at::dtype(c10::kByte)).zero_(); });
    });
  }

 private:
  template <typename Run>
  static double secondsOf(const Run& run) {
    std::array<double, 3> seconds{};
    for (double& one : seconds) {
      const auto start = std::chrono::steady_clock::now();
      run();
      one = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }

  static double timeOfFill(const OpNode& node, c10::ScalarType dtype, std::int64_t count) {
    const at::Generator generator = at::detail::createCPUGenerator();
    return secondsOf([&] {
      Stack stack = node.arguments({at::empty({count}, at::dtype(dtype))});
      callWithGenerator(node.op(), stack, generator);
    });
  }

  template <typename Time>
  const Cost& remembered(const std::pair<std::string, c10::ScalarType>& kind, const Time& time) {
    const auto found = costs_.find(kind);
    if (found != costs_.end()) {
      return found->second;
    }
    constexpr std::int64_t kFew = 16;
    constexpr std::int64_t kMany = std::int64_t{1} << 23U;
    const double of_few = time(kFew);
    const double of_many = time(kMany);
    const double of_element = std::max(of_many - of_few, 0.0) / static_cast<double>(kMany - kFew);
    return costs_.emplace(kind, Cost{of_few, of_element}).first->second;
  }

  std::map<std::pair<std::string, c10::ScalarType>, Cost> costs_;
};

// A random fill of the CPU, whose one tensor is what it fills.
bool isFill(const OpNode& node) {
  return node.tape() && node.tensors().size() == 1 && generatorArgument(node.op().schema()) >= 0 &&
         node.written().size() == 1 && node.written().front().is_argument;
}

std::int64_t elementsOf(const Geometry& geometry) {
  return c10::multiply_integers(geometry.sizes);
}

std::int64_t sizeInBytes(const Geometry& geometry) {
  return elementsOf(geometry) * static_cast<std::int64_t>(geometry.dtype.itemsize());
}

std::int64_t bytesWritten(const OpNode& node) {
  std::int64_t sum = 0;
  for (const WrittenStorage& written : node.written()) {
    const bool keeps_size = written.is_argument && !written.was_resized;
    sum += sizeInBytes(keeps_size ? node.tensors()[written.position].geometry : written.geometry);
  }
  return sum;
}

double predictedSeconds(const OpNode& node, Costs& costs) {
  if (onlyAllocates(node.op())) {
    return 0;
  }
  if (isFill(node)) {
    const Geometry& geometry = node.tensors().front().geometry;
    return costs.ofFill(node, c10::typeMetaToScalarType(geometry.dtype)).of(elementsOf(geometry));
  }
  return costs.ofZeros().of(bytesWritten(node));
}

// ---- Attributing ----

// For each operator, the first of the wanted values that need it.
std::unordered_map<const OpNode*, std::size_t> firstUsers(const LiveGraph& graph) {
  std::unordered_map<const OpNode*, std::size_t> first;
  const auto note = [&first](const OpNode* node, std::size_t user) {
    std::size_t& known = first.emplace(node, user).first->second;
    known = std::min(known, user);
  };
  for (std::size_t i = 0; i < graph.wanted.size(); ++i) {
    note(graph.wanted[i]->writer().get(), i);
  }
  for (auto live = graph.operators.rbegin(); live != graph.operators.rend(); ++live) {
    for (const LiveArgument& argument : live->arguments) {
      if (argument.value != nullptr) {
        note(argument.value->writer().get(), first.at(live->node));
      }
    }
  }
  return first;
}

void checkCanBePutBack(const LiveGraph& graph) {
  for (const LiveOperator& live : graph.operators) {
    TORCH_CHECK(
        !live.node->dependsOnOtherGenerators(), "The time of `", live.node->op().operator_name(),
        "` cannot be measured: it draws from a generator that is not the CPU's, and running it would move that. "
        "Ask for the predicted time only.");
  }
}

}  // namespace

std::vector<TimedOperator> timeOperators(at::ArrayRef<Tensor> tensors, bool measures) {
  const Locked lock{LockRank::kReplay};
  std::vector<StorageValuePtr> values;
  values.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    values.push_back(valueOf(tensor));
    TORCH_CHECK_VALUE(values.back() != nullptr, "Only what computes deferred tensors can be timed.");
  }
  Replay replay{values};
  const auto users = firstUsers(replay.graph());
  std::vector<TimedOperator> operators;
  {
    const RealDispatch guard;
    Costs costs;
    const Demands demands = Demands::of(replay.graph());
    for (const LiveOperator& live : replay.graph().operators) {
      const double share = demands.shareOf(*live.node);
      const auto nbytes = static_cast<std::int64_t>(share * static_cast<double>(bytesWritten(*live.node)));
      operators.push_back({c10::toString(live.node->op().operator_name()), users.at(live.node), nbytes,
                           share * predictedSeconds(*live.node, costs), std::nullopt});
    }
  }
  if (measures) {
    checkCanBePutBack(replay.graph());
    auto next = operators.begin();
    replay.runAndDrop([&next](const LiveOperator& /*live*/, double seconds) { (next++)->measured = seconds; });
  }
  return operators;
}

}  // namespace torchext
