#pragma once

// NOTE [Assumed values]
//
// A program reads values of its tensors that change little of what it would cost: the loss that it prints, whether a
// gradient is infinite, the token that it has generated. So that a dry run need not end there, such values may be
// assumed. What is known is never assumed: NOTE [Constants keep their values].
//
// A value is assumed where it comes about, not where it is read, so that answers fit together: if the program finds
// that an index is 0, the index plus 8 is 8. What is read of floating-point numbers is kAssumedNumber, of integers 0,
// and of a truth value false; what is compared is equal where shapes allow. A tensor of several truth values is taken
// for a mask: NOTE [Assumed masks]. Then
//
//   * an operator on small tensors, some of which are not known, is run with these in their places where it makes
//     integers, truth values or one number, and what it makes has assumed values;
//   * an elementwise operator that makes truth values is run for one element, or a few that repeat, where tensors are
//     large, so that `(x != x).any()` is false and `(x == x).all()` is true;
//   * indices that sorting, selecting and sampling make are those of NOTE [Assumed indices];
//   * small integers that are drawn are drawn, by a generator of ours.
//
// Each such value that the program reads is noted, and so is each shape that depends on one, with the policies that it
// stands on (ValueKind).
//
// NOTE [Assumed masks]
//
// The policy for masks is a vector of truth values, repeated over the elements of a mask: those that count, and those
// that do not. One that counts is ordinary: it differs from the number that it is compared with (`ids != padding`,
// `labels == -100`), an integer is kOrdinaryInteger, and a floating-point number is above or below any threshold,
// whichever is asked for. So with all elements counting, a program selects the most that it can. For one that does not
// count the truth is the opposite. Where the answer is the same for numbers of all sizes (`isnan()`, `x == x`), or
// follows from values, there is nothing to decide.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <torchext/macros.h>

#include "known_bytes.h"

namespace torchext {

// A positive number that all floating-point dtypes have, and of which there is a logarithm.
constexpr double kAssumedNumber = 0.125;

// Decides what is read of values that are not known, on all threads.
class TORCHEXT_API Assumptions {
 public:
  // Which elements of a mask count, a vector of truth values on the CPU; and by how many rows each row of positions is
  // ahead of the row before: NOTE [Assumed indices].
  Assumptions(at::Tensor masks, std::int64_t advance) : masks_{std::move(masks)}, advance_{advance} {}
  C10_DISABLE_COPY_AND_ASSIGN(Assumptions);
  virtual ~Assumptions() = default;

  // Returns the number that is to be taken for a value of `dtype` that `op` reads. `computed` is what follows from what
  // has been assumed before, if something does. `kind` says by which policies.
  virtual double answer(const c10::OperatorHandle& op,
                        c10::ScalarType dtype,
                        std::optional<double> computed,
                        ValueKind kind) = 0;

  // Called for each shape that depends on assumed values.
  virtual void note(const c10::OperatorHandle& op, const std::string& shape, ValueKind kind) = 0;

  const at::Tensor& masks() const noexcept {
    return masks_;
  }

  std::int64_t advance() const noexcept {
    return advance_;
  }

 private:
  at::Tensor masks_;
  std::int64_t advance_;
};

// Installs `assumptions`, which are never destroyed. With null, values are not assumed.
TORCHEXT_API void setAssumptions(Assumptions* assumptions) noexcept;

// Returns true if values are assumed now.
bool assumesValues() noexcept;

// Returns a real tensor on the CPU with values for `fake`. Where it has values, known or assumed, they are its own, and
// elsewhere the default ones. It shares the memory of the values of `fake` if all its elements have some, and is new
// otherwise.
TORCHEXT_API at::Tensor assumedValueOf(const at::Tensor& fake);

// Makes `value` the assumed value of `fake`, which may be a part of its storage: the rest does not change. Does nothing
// if the storage is large.
TORCHEXT_API void assumeValue(const at::Tensor& fake, const at::Tensor& value, ValueKind kind);

// Returns the kind of a result that is computed from `values`, if some values are unknown.
TORCHEXT_API ValueKind standingOn(c10::ArrayRef<c10::IValue> values);

// Returns the lengths of sequences that `op` takes for the fake `lengths`: their values, and for those that have none
// the share of `most` that counts in masks.
at::Tensor assumedLengths(const c10::OperatorHandle& op, const at::Tensor& lengths, std::int64_t most);

// The same for sequences of `total` elements together, whose lengths are alike. The last one has what is left.
at::Tensor assumedShares(const c10::OperatorHandle& op, const at::Tensor& lengths, std::int64_t total);

// Returns the results of a call of `op` that reads values, by assumed ones. Returns nothing if it reads none, or if
// values are not assumed.
std::optional<torch::jit::Stack> assumeValues(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

enum class Noting : std::uint8_t { kNotes, kIsSilent };

// Returns how many elements of the mask `mask` are taken to count, or nothing if values are not assumed.
std::optional<std::int64_t> assumedCount(const c10::OperatorHandle& op, const at::Tensor& mask, Noting noting);

// Returns the answer to whether what a call compares is equal, or close, or nothing if values are not assumed.
std::optional<bool> assumeEqual(const c10::OperatorHandle& op, const at::Tensor& a, const at::Tensor& b);

// Returns true if values may be assumed for what a call has made or written: it is about integers, truth values or
// single numbers. Cheap.
bool mayBeAssumed(c10::ArrayRef<c10::IValue> results);

// To be called after a fake call of `op` has made `results` and written to `written`, where not all values of the
// arguments are known. Gives what the call has made and written assumed values and returns true, if it can.
bool assumeResults(const c10::OperatorHandle& op,
                   c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results,
                   c10::ArrayRef<c10::IValue> written);

}  // namespace torchext
