#pragma once

// Where the time goes that materializing takes.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

// An operator that is run to compute some tensors.
struct TimedOperator {
  std::string name;
  // The first of the tensors that need it.
  std::size_t tensor = 0;
  // What it writes.
  std::int64_t nbytes = 0;
  // In seconds. If it took as long as filling as much memory in its way, or, for what is no random fill, with zeros.
  double predicted = 0;
  std::optional<double> measured;
};

// Returns the operators that materializing `tensors` would run, all of which are deferred and have storages of their
// own, in the order of running them. Nothing becomes real. If `measures` is set, they are run now, each result being
// dropped when nobody needs it any more.
//
// Raises what materializing raises, and a RuntimeError where measuring would draw from a generator that cannot be put
// back.
TORCHEXT_API std::vector<TimedOperator> timeOperators(at::ArrayRef<at::Tensor> tensors, bool measures);

}  // namespace torchext
