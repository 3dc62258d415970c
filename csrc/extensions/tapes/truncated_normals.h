#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "../../libraries/fills/fill.h"

namespace torchext {

// The arguments of one call of `torchext::trunc_normal_`, which stands for `torch.nn.init.trunc_normal_` where that may
// reject drawn values: torchext/fake/trunc_normal.py.
class TruncatedNormals {
 public:
  // The arguments of `torch.nn.init.trunc_normal_`, except for the tensor.
  struct Parameters {
    c10::ScalarType dtype;
    double mean;
    double std;
    double a;
    double b;

    bool operator==(const Parameters& other) const;
  };

  // Returns null if `op` is another operator. The arguments are on top of `stack`.
  static std::optional<TruncatedNormals> of(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  // The same for a tensor of `dtype`, with all arguments in `arguments`.
  static std::optional<TruncatedNormals> of(const c10::OperatorHandle& op,
                                            c10::ScalarType dtype,
                                            c10::ArrayRef<c10::IValue> arguments);

  // The next three functions do nothing and return false or nothing if the caller must call the operator: PyTorch's
  // function may sample in another way for these bounds or in this release. So a few elements are compared with
  // PyTorch's first.

  // Returns the fill that is equivalent to the call.
  std::optional<TruncatedFill> asFill() const;

  // Computes the operator on `count` elements of memory, and moves `engine` as the operator would.
  bool fill(void* values, std::int64_t count, at::mt19937_data_pod& engine) const;

  // Returns how many 32-bit numbers that takes from `generator`, which is not moved.
  std::optional<std::uint64_t> countDraws(std::int64_t count, const at::Generator& generator) const;

 private:
  TruncatedNormals(const c10::OperatorHandle& op, const Parameters& parameters) : op_{op}, parameters_{parameters} {}

  bool isExact() const;
  bool agrees(const Parameters& parameters) const;
  bool agreesAtBounds() const;

  const c10::OperatorHandle& op_;
  Parameters parameters_;
};

}  // namespace torchext
