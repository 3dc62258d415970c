#pragma once

#include <optional>

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "../../core/fake/storage/fake_keys.h"
#include "../../libraries/support/included_key.h"

namespace torchext {

// While an instance exists, factories on this thread make tensors of the same kind as `arguments`: deferred tensors if
// one of these is deferred, otherwise fakes if one is fake. PyTorch's kernels and gradient formulas allocate with
// factories, and write values computed from their arguments there. Nests.
class FactoriesOfCall {
 public:
  explicit FactoriesOfCall(c10::ArrayRef<c10::IValue> arguments);

 private:
  std::optional<FakeFactoriesGuard> fake_;
  std::optional<IncludedKey> deferred_;
};

}  // namespace torchext
