#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// What the elements of stand-ins are. An error that comes whatever they are does not depend on them.
enum class Fill : std::uint8_t {
  kIdentity,  // floating point: 1 on the diagonal of the last two dimensions, or everywhere when there is but one, else
              // 0; others: 0, which is an index that is in range, and a mask that selects nothing
  kOnes,
  kZeros,
};

// What becomes of dtypes.
enum class Dtypes : std::uint8_t {
  kKept,
  kCommon,  // floating point and complex: float32; integers: int64
  kFloat,   // all: float32
};

// Sizes that are made smaller so that what is equal stays equal, and what is a multiple mostly stays that multiple.
class SizeScale {
 public:
  // Keeps all sizes.
  SizeScale() = default;

  // Divides those that `divisor` divides, and replaces others that are large by small ones.
  explicit SizeScale(int64_t divisor) : divisor_{divisor} {}

  // The size that stands for `size`, the same one each time.
  int64_t of(int64_t size);

  // The same for a number that may be a size, but was not seen as one: kept unless `of()` has been asked for it.
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

// The arguments of a call of `op`, with real tensors on the CPU in the place of tensors, whose dimensions, dtypes,
// strides and shared storages they have as far as `likeness` says, and private generators in the place of generators.
// Numbers in tensor's clothes stay what they are.
torch::jit::Stack standInsOf(const c10::OperatorHandle& op,
                             c10::ArrayRef<c10::IValue> arguments,
                             const Likeness& likeness);

// How many elements the stand-ins of `arguments` have together when the sizes are divided by `divisor`, as far as a
// `double` can tell.
double countElements(c10::ArrayRef<c10::IValue> arguments, int64_t divisor);

}  // namespace torchext
