#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "../../fills/truncated_fill.h"

namespace torchext {

// The arguments of one call of `torchext::trunc_normal_`, which is `torch.nn.init.trunc_normal_` where that may reject
// what it draws: torchext/fake/trunc_normal.py.
class TruncatedNormals {
 public:
  // What PyTorch's function is asked for, except for the tensor.
  struct Question {
    c10::ScalarType dtype;
    double mean;
    double std;
    double a;
    double b;

    bool operator==(const Question& other) const;
  };

  // Null if `op` is another one. The arguments are on top of `stack`.
  static std::optional<TruncatedNormals> of(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  // The same for a tensor of `dtype`, with all arguments in `arguments`.
  static std::optional<TruncatedNormals> of(const c10::OperatorHandle& op,
                                            c10::ScalarType dtype,
                                            c10::ArrayRef<c10::IValue> arguments);

  // None of these does anything, and they return false and nothing, where the operator is to be called: PyTorch's
  // function may sample in another way, for these bounds or in this release. So it is run on a few elements before, and
  // compared with.

  // What is to be filled with.
  std::optional<TruncatedFill> asFill() const;

  // Does what the operator does with `count` elements of memory, and moves `engine` as it does.
  bool fill(void* values, std::int64_t count, at::mt19937_data_pod& engine) const;

  // Returns how many numbers of 32 bits that draws of `generator`, which stays where it is.
  std::optional<std::uint64_t> countDraws(std::int64_t count, const at::Generator& generator) const;

 private:
  TruncatedNormals(const c10::OperatorHandle& op, const Question& question) : op_{op}, question_{question} {}

  bool isExact() const;
  bool agrees(const Question& question) const;
  bool agreesAtBounds() const;

  const c10::OperatorHandle& op_;
  Question question_;
};

}  // namespace torchext
