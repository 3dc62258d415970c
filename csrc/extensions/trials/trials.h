#pragma once

// Trials of calls on stand-ins: NOTE [Errors of real tensors]. Functions may be called from several threads.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>

#include "../../core/fake/calls/recording.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/held_warnings.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "stand_ins.h"

namespace torchext {

// The maximum number of elements that arguments and results of a call that will most likely pass may have in a trial.
constexpr double kCheap = 32768;

// An error raised by a kernel.
struct Refusal {
  std::exception_ptr error;
  std::string message;
};

// The outcome of a trial: a refusal, results, or, if the trial is inconclusive, neither.
struct Outcome {
  std::optional<Refusal> refusal;
  Stack results;
  bool are_new = false;  // see RealResults
};

// The thread state during trials.
class Trial {
 public:
  Trial() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Trial);
  ~Trial() {
    warnings_.consume();
  }

  // Returns the kernels' distinct warnings: a call may be tried out several times.
  std::vector<c10::Warning> takeWarnings() {
    std::vector<c10::Warning> different;
    for (c10::Warning& warning : warnings_.consume()) {
      const bool is_new = std::none_of(different.begin(), different.end(),
                                       [&](const c10::Warning& other) { return other.msg() == warning.msg(); });
      if (is_new) {
        different.push_back(std::move(warning));
      }
    }
    return different;
  }

 private:
  const HiddenCalls keys_;
  HeldWarnings warnings_;
};

// Returns true for the operator that all convolutions call.
inline bool isConvolution(const c10::OperatorHandle& op) {
  return op.schema().name() == "aten::convolution";
}

// Returns true if an argument is on CUDA.
bool isOnCuda(c10::ArrayRef<c10::IValue> arguments);

// The kernels of these operators expect values that no fill provides.
extern const OperatorSet expectsValues;

// Returns true if the call can be tried out. `knows_integers`: the stand-ins have the values of all integers.
bool canBeTriedOut(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, bool knows_integers = false);

// Returns results, or a refusal that does not depend on values that the stand-ins lack. If the errors for different
// fills differ, some of them depend on such values. The first one does not if the call passes with other dtypes.
Outcome outcomeOf(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, Likeness likeness);

// Returns true if the call passes with one of the fills.
bool passes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, Likeness likeness);

// Remembers trials that have passed, by a hash of the call. All threads share it.
bool hasPassed(std::size_t hash);
void rememberPassed(std::size_t hash);

// Returns true if the call passes with common dtypes, or with another dtype of one tensor.
bool passesWithOtherDtypes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const SizeScale& scale);

// ---- Functions that implement `KernelTrials` (core/hooks/hooks.h) ----

void correctByReal(const RealResults& real, const c10::OperatorHandle& op, Stack& stack);
void correctStridesByReal(const RealResults& real, const c10::OperatorHandle& op, Stack& stack);
c10::DimVector stridesLike(const Tensor& real, const Tensor& meta);

// Returns true if no correction is needed for `meta_results`: those of `KernelTrials::tryOut()`.
bool agrees(const RealResults& real, const c10::OperatorHandle& op, Arguments meta_results);

bool mayRunOnZeros(const c10::OperatorHandle& op, const Stack& stack);
std::shared_ptr<ResultRecipe> describeOnZeros(const c10::OperatorHandle& op, const Stack& stack, c10::Device device);

// NOTE [Preconditions of kernels]
//
// A kernel checks the arguments of users, but not always the results of earlier calls: a backward kernel trusts the
// results of its forward kernel, and a library trusts its own buffers. Meta kernels may make such tensors of any size,
// and a trial would access memory beyond them. So a table lists the operators whose kernels trust an argument, and the
// kind of trust. All others are tried out.

enum class Trust : std::uint8_t {
  kNothing,
  kBuffers,     // the sizes or contents of buffers: never tried out
  kSizes,       // sums or products of sizes: tried out only at their own sizes, if these are modest
  kIndices,     // positions: tried out with zeros, which are valid positions
  kStatistics,  // one per channel: tried out on the CPU if the numbers match
  kSegments,    // lengths: unknown ones are tried out unchecked, if there is a row of them for each row of the data
  kForward,     // CPU forward results, which differ on CUDA: tried out only on the CPU
};

// The arguments that the CPU kernel of an operator trusts.
extern const OperatorTable<Trust> trustOf;

}  // namespace torchext
