#pragma once

// NOTE [Assumed values]
//
// A program reads some values of its tensors that hardly affect its cost: the loss that it prints, whether a gradient
// is infinite, the token that it has generated. Such values may be assumed, so that a dry run need not stop there.
// Known values are never assumed: NOTE [Known values].
//
// A value is assumed when it is computed, not when it is read, so that values are consistent: if an index is 0, the
// index plus 8 is 8. A floating-point number is kAssumedNumber, an integer 0, and a truth value false. Comparisons find
// equality where shapes allow. A tensor of several truth values is a mask: NOTE [Assumed masks]. Further rules:
//
//   * An operator on small tensors that returns integers, truth values or one number is run with assumed values in
//     place of unknown ones, and its results have assumed values.
//   * An elementwise operator on large tensors that returns truth values is run for one element, or a few that repeat.
//     So `(x != x).any()` is false and `(x == x).all()` is true.
//   * Indices from sorting, selecting and sampling are those of NOTE [Assumed indices].
//   * Small random integers are drawn from our own generator.
//
// Each assumed value that the program reads, and each shape that depends on one, is reported with the policies that it
// depends on (ValueKind).

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <torchext/macros.h>

#include "known_bytes.h"

namespace torchext {

// The default for unknown numbers: a positive number that all floating-point dtypes can represent and whose logarithm
// exists.
constexpr double kAssumedNumber = 0.125;

// The policy of the line that the program executes.
struct LinePolicy {
  at::Tensor masks;  // which elements of a mask count, a vector of truth values on the CPU
  ValueKind kind;    // of masks that follow the policy
  double number;     // unknown floating-point numbers
};

// Determines the results of reading unknown values, on all threads.
class TORCHEXT_API Assumptions {
 public:
  Assumptions() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Assumptions);
  virtual ~Assumptions() = default;

  // Returns the number to use for a value of `dtype` that `op` reads. `computed` is the value that follows from earlier
  // assumptions, if any. `kind` holds the policies that it depends on.
  virtual double answer(const c10::OperatorHandle& op,
                        c10::ScalarType dtype,
                        std::optional<double> computed,
                        ValueKind kind) = 0;

  // Called for each shape that depends on assumed values.
  virtual void note(const c10::OperatorHandle& op, const std::string& shape, ValueKind kind) = 0;

  virtual LinePolicy policyHere() const = 0;

  // Returns `rows` rows of `length` positions each, which are less than `count`, one after the other, and the kind of
  // these values: NOTE [Assumed indices].
  virtual std::pair<at::Tensor, ValueKind> positions(std::int64_t count,
                                                     std::int64_t length,
                                                     std::int64_t rows) const = 0;
};

// Sets the assumptions, which must never be destroyed. With null, values are not assumed.
TORCHEXT_API void setAssumptions(Assumptions* assumptions) noexcept;

// Returns the assumptions, or null.
Assumptions* assumptionsInUse() noexcept;

// Returns true if values are assumed now.
bool assumesValues() noexcept;

// Returns the policy of the line that the program executes, or the default one.
LinePolicy policyHere();

// Returns true for a tensor of several truth values: NOTE [Assumed masks].
bool isMask(const at::Tensor& tensor);

// Returns true for a tensor of integers or truth values.
bool isDiscrete(const at::Tensor& tensor);

// Returns `value` as a number of the kind of `dtype`, like `_local_scalar_dense`.
c10::Scalar numberOf(c10::ScalarType dtype, double value);

// Returns a real CPU tensor.
at::Tensor filled(c10::IntArrayRef sizes, c10::ScalarType dtype, double number);

// Returns a real CPU tensor with values for `fake`: its own values, known or assumed, where they exist, and default
// values elsewhere. It shares the memory of the values of `fake` if all elements have values, and is new otherwise.
TORCHEXT_API at::Tensor assumedValueOf(const at::Tensor& fake);

// Sets `value` as the assumed value of `fake`, which may be a part of its storage: the rest does not change. Does
// nothing if the storage is large.
TORCHEXT_API void assumeValue(const at::Tensor& fake, const at::Tensor& value, ValueKind kind);

// Returns true if all elements of `fake` have values, known or assumed.
bool hasAllValues(const at::Tensor& fake);

// Returns the kind of a result that is computed from `values`, if some values are unknown.
TORCHEXT_API ValueKind standingOn(c10::ArrayRef<c10::IValue> values);

// Returns true if values may be assumed for the results or written arguments of a call: they are integers, truth values
// or single numbers. Cheap.
bool mayBeAssumed(c10::ArrayRef<c10::IValue> results);

// Call after a fake call of `op` has made `results` and written to `written`, if not all values of the arguments are
// known. Assumes values for both and returns true, if possible.
bool assumeResults(const c10::OperatorHandle& op,
                   c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results,
                   c10::ArrayRef<c10::IValue> written);

// Returns how often `op` counts numbers in the large `counted`, whose elements repeat, or an undefined tensor.
at::Tensor countsOf(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const at::Tensor& counted);

}  // namespace torchext
