#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/substitution.h"

namespace torchext {

// The numbers of a smaller call in place of those of a call: NOTE [Smaller calls].
class SizeScale {
 public:
  // Keeps all numbers.
  SizeScale() = default;
  explicit SizeScale(std::map<int64_t, int64_t> images) : images_{std::move(images)} {}

  // Returns the image of `number`.
  int64_t of(int64_t number) const {
    const auto found = images_.find(number);
    return found == images_.end() ? number : found->second;
  }

  bool keepsAll() const noexcept {
    return images_.empty();
  }

 private:
  std::map<int64_t, int64_t> images_;
};

// The values of stand-ins. An error that occurs with all of them does not depend on values.
enum class Fill : std::uint8_t {
  kIdentity,  // floating point and complex: 1 on the diagonal of the last two dimensions, and 0 elsewhere; 1 everywhere
              // if there is only one; others: 0, which is an index in range, and a mask that selects nothing
  kOnes,
  kZeros,
};

// The treatment of dtypes.
enum class Dtypes : std::uint8_t {
  kKept,
  kCommon,  // floating point and complex: float32; integers: int64; booleans are kept
  kFloat,   // all: float32
  kWide,    // float16 and bfloat16: float32
};

struct Likeness {
  Fill fill = Fill::kIdentity;
  Dtypes dtypes = Dtypes::kKept;
  SizeScale scale;
  std::optional<std::size_t> only = std::nullopt;  // the number of the only tensor whose dtype changes
  // Returns the value that the stand-in of a tensor has, or an undefined tensor. With it, large stand-ins without a
  // value are zero, so that their memory is not touched.
  const TensorMapper* known = nullptr;
  // Whether those that are as large as their tensors also share large storages, and all generators are replaced.
  bool is_whole = false;
};

// Returns the arguments of a call of `op`, with stand-ins in place of tensors: real CPU tensors with the same
// dimensions, dtypes, strides and shared storages, modified by `likeness`. With smaller sizes they share no storage,
// unless they have the same data. CPU generators, including None, are replaced by private ones, and devices by the CPU.
// Wrapped numbers keep their values. Adds the stand-ins, and the storages that they share, to `pairs`.
torch::jit::Stack standInsOf(const c10::OperatorHandle& op,
                             c10::ArrayRef<c10::IValue> arguments,
                             const Likeness& likeness,
                             Substitution& pairs);

// Returns the total number of elements in the memory of the stand-ins of `values`, as precisely as a `double` allows.
double countElements(c10::ArrayRef<c10::IValue> values, const SizeScale& scale);

// Returns a scale with which arguments and results have at most `max_elements` elements, or as few as possible.
SizeScale scaleFor(const c10::OperatorHandle& op,
                   c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results,
                   double max_elements);

}  // namespace torchext
