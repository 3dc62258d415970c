#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// The values of stand-ins. An error that is raised for all of them does not depend on values.
enum class Fill : std::uint8_t {
  kIdentity,  // floating point and complex: 1 on the diagonal of the last two dimensions, and 0 elsewhere; 1 everywhere
              // if there is only one; others: 0, which is an index in range, and a mask that selects nothing
  kOnes,
  kZeros,
};

// What to do with dtypes.
enum class Dtypes : std::uint8_t {
  kKept,
  kCommon,  // floating point and complex: float32; integers: int64; booleans are kept
  kFloat,   // all: float32
};

// Makes sizes smaller, so that equal sizes stay equal, and multiples mostly stay multiples.
class SizeScale {
 public:
  // Keeps all sizes.
  SizeScale() = default;

  // Divides multiples of `divisor`, from twice its value on, and replaces other large sizes by small ones.
  explicit SizeScale(int64_t divisor) : divisor_{divisor} {}

  // Returns the size that stands for `size`, the same one each time.
  int64_t of(int64_t size);

  // The same for an argument that may be a size. Kept if it is small, or if `of()` has not been called with it.
  int64_t ofNumber(int64_t number) const;

  bool keepsAll() const noexcept {
    return divisor_ == 1;
  }

 private:
  int64_t divisor_ = 1;
  std::vector<std::pair<int64_t, int64_t>> replaced_;
};

struct Likeness {
  Fill fill = Fill::kIdentity;
  Dtypes dtypes = Dtypes::kKept;
  int64_t divisor = 1;  // of sizes
};

// Returns the arguments of a call of `op`, with stand-ins in place of tensors: real tensors on the CPU with the same
// dimensions, dtypes, strides and shared storages, as far as `likeness` says. CPU generators, and those that are None,
// are replaced by private ones. Wrapped numbers keep their values.
torch::jit::Stack standInsOf(const c10::OperatorHandle& op,
                             c10::ArrayRef<c10::IValue> arguments,
                             const Likeness& likeness);

// Returns how many elements the memory of the stand-ins of `arguments` has together if sizes are divided by `divisor`,
// as precisely as a `double` can hold it.
double countElements(c10::ArrayRef<c10::IValue> arguments, int64_t divisor);

}  // namespace torchext
