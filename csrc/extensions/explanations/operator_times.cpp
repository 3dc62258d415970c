#include "operator_times.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/deferred_init/plan/replay_plan.h"
#include "../../core/deferred_init/replay/replay.h"
#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/support/locks.h"
#include "../../core/support/sizes.h"
#include "../tapes/replay_fill.h"
#include "../tapes/twister_tape.h"

namespace torchext {

using at::Tensor;
using torch::jit::Stack;

namespace {

// ---- Predicting ----

// The time to write `count` elements: a constant per call, and a constant per element.
struct Cost {
  double of_call;
  double of_element;

  double of(std::int64_t count) const {
    return of_call + of_element * static_cast<double>(count);
  }
};

// Measures the time to write new memory on the CPU.
class Costs {
 public:
  // The cost of random fills with the arguments of `node`.
  Cost ofFill(const OpNode& node, c10::ScalarType dtype) {
    return cached({node.op().schema().name(), dtype},
                  [&](std::int64_t count) { return timeOfFill(node, dtype, count); });
  }

  // The cost per byte.
  Cost ofZeros() {
    return cached({"", c10::kByte}, [](std::int64_t count) {
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
  const Cost& cached(const std::pair<std::string, c10::ScalarType>& kind, const Time& time) {
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

// Returns true for a random fill on the CPU, whose only tensor is its target.
bool isFill(const OpNode& node) {
  return asTwister(node.tape()) != nullptr && node.tensors().size() == 1 && takesGenerator(node.op()) &&
         node.written().size() == 1 && node.written().front().is_argument;
}

std::int64_t elementsOf(const Geometry& geometry) {
  return c10::multiply_integers(geometry.sizes);
}

std::int64_t bytesWritten(const OpNode& node) {
  std::int64_t sum = 0;
  for (const WrittenStorage& written : node.written()) {
    const bool keeps_size = written.is_argument && !written.was_resized;
    sum += toSigned((keeps_size ? node.tensors()[written.position].geometry() : written.geometry()).nbytes());
  }
  return sum;
}

double predictedSeconds(const OpNode& node, Costs& costs) {
  if (onlyAllocates(node.op())) {
    return 0;
  }
  if (isFill(node)) {
    const Geometry& geometry = node.tensors().front().geometry();
    return costs.ofFill(node, c10::typeMetaToScalarType(geometry.dtype)).of(elementsOf(geometry));
  }
  return costs.ofZeros().of(bytesWritten(node));
}

// ---- Attributing ----

// Returns, for each operator, the index of the first wanted value that needs it.
std::vector<std::size_t> firstUsers(const ReplayPlan& plan) {
  std::vector<std::size_t> first(plan.operators().size(), plan.wanted().size());
  const auto note = [&first](const LiveValue& value, std::size_t user) {
    if (value.hasWriter()) {
      first[value.writer] = std::min(first[value.writer], user);
    }
  };
  for (const auto i : c10::irange(plan.wanted().size())) {
    note(plan.wanted()[i], i);
  }
  for (auto planned = plan.operators().rbegin(); planned != plan.operators().rend(); ++planned) {
    for (const LiveValue& read : planned->reads) {
      note(read, first[planned->place]);
    }
  }
  return first;
}

}  // namespace

std::vector<TimedOperator> timeOperators(at::ArrayRef<Tensor> tensors, bool measures) {
  const Locked lock{LockRank::kReplay};
  std::vector<StorageValuePtr> values;
  values.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    values.push_back(valueOf(tensor));
    TORCH_CHECK_VALUE(values.back() != nullptr, "Cannot time the operators of a tensor that is not deferred.");
  }
  Replay replay{values};
  const std::vector<std::size_t> users = firstUsers(replay.plan());
  std::vector<TimedOperator> operators;
  {
    const RealDispatch guard;
    Costs costs;
    for (const PlannedOperator& planned : replay.plan().operators()) {
      const double share = planned.share();
      const auto nbytes = static_cast<std::int64_t>(share * static_cast<double>(bytesWritten(*planned.node)));
      operators.push_back({c10::toString(planned.node->op().operator_name()), users[planned.place], nbytes,
                           share * predictedSeconds(*planned.node, costs), std::nullopt});
    }
  }
  if (measures) {
    auto next = operators.begin();
    replay.runAndDrop([&next](const PlannedOperator& /*planned*/, double seconds) { (next++)->measured = seconds; });
  }
  return operators;
}

}  // namespace torchext
