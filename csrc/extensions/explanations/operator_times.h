#pragma once

// Attributes the time of materializing to operators.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

// An operator that runs to compute some tensors.
struct TimedOperator {
  std::string name;
  // The index of the first tensor that needs it.
  std::size_t tensor = 0;
  // The bytes that it writes.
  std::int64_t nbytes = 0;
  // In seconds: the time of an equally large fill of the same kind, or of zeros for operators other than random fills.
  double predicted = 0;
  std::optional<double> measured;
};

// Returns the operators that materializing `tensors` would run, in execution order. The tensors must be deferred and
// have separate storages. Nothing becomes real. If `measures` is set, the operators run now, and each result is dropped
// when it is no longer needed.
//
// Raises the errors of materializing, and a RuntimeError if measuring would draw from a generator that cannot be
// restored.
TORCHEXT_API std::vector<TimedOperator> timeOperators(at::ArrayRef<at::Tensor> tensors, bool measures);

}  // namespace torchext
