#include "hit_checks.h"

#include <atomic>
#include <cstdlib>
#include <exception>
#include <random>
#include <sstream>
#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include "../../core/fake/cache/result_recipe.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/interpreter.h"

namespace torchext {

using c10::OperatorHandle;

// Describes the results of a recipe and its temporary buffers. Recipes with equal descriptions are equal.
class RecipeText {
 public:
  static std::string of(const ResultRecipe& recipe) {
    std::ostringstream text;
    const auto describe_tensor = [&text](const ResultRecipe::TensorRecipe& tensor) {
      switch (tensor.source) {
        case ResultRecipe::TensorRecipe::Source::kUndefined:
          text << "undefined; ";
          return;
        case ResultRecipe::TensorRecipe::Source::kArgument:
          text << "argument " << tensor.number << "; ";
          return;
        case ResultRecipe::TensorRecipe::Source::kViewOfArgument:
          text << "view of argument " << tensor.number;
          break;
        case ResultRecipe::TensorRecipe::Source::kOnArgument:
          text << "on argument " << tensor.number;
          break;
        case ResultRecipe::TensorRecipe::Source::kNewStorage:
          text << "on new storage " << tensor.number;
          break;
      }
      const c10::TensorImpl& form = *tensor.form;
      text << ": " << form.dtype() << ", sizes " << form.sizes() << ", strides " << form.strides() << ", offset "
           << form.storage_offset() << ", lazy bits " << (form.key_set() & kLazyBits) << "; ";
    };
    for (const ResultRecipe::ValueRecipe& value : recipe.values_) {
      text << (value.is_list ? "list: " : "");
      std::for_each(value.tensors.begin(), value.tensors.end(), describe_tensor);
      if (!value.is_list && value.tensors.empty()) {
        text << value.other << "; ";
      }
    }
    for (const ResultRecipe::ListedStorage& storage : recipe.storages_) {
      text << "storage of " << storage.nbytes << " bytes on " << storage.device
           << (storage.is_pinned ? ", pinned; " : "; ");
    }
    text << (recipe.makes_values_ ? "may have values; " : "");
    if (recipe.scratch_ != nullptr) {
      text << "scratch: " << recipe.scratch_->describe();
    }
    return text.str();
  }
};

namespace {

std::atomic<double>& checkedFraction() {
  static std::atomic<double> fraction{[] {
    const char* value = std::getenv("TORCHEXT_CHECK_CACHE");
    return value == nullptr ? 0 : std::strtod(value, nullptr);
  }()};
  return fraction;
}

std::atomic<std::uint64_t> wrong_hits{0};

thread_local bool is_checking = false;

thread_local bool is_next_checked = false;

}  // namespace

double checkHits(double fraction) {
  return checkedFraction().exchange(fraction);
}

std::uint64_t takeWrongHits() noexcept {
  return wrong_hits.exchange(0);
}

void checkNextHit() noexcept {
  is_next_checked = true;
}

namespace {

bool areDue() {
  const double fraction = checkedFraction().load(std::memory_order_relaxed);
  if (fraction <= 0 || is_checking) {
    return false;
  }
  if (std::exchange(is_next_checked, false)) {
    return true;
  }
  thread_local std::minstd_rand numbers;  // equal seeds on all threads make failures reproducible
  return std::uniform_real_distribution<double>{}(numbers) < fraction;
}

// An error that `recompute()` raises counts as a difference, except for an interrupt, which is passed on.
void check(const OperatorHandle& op, const ResultRecipe& recipe, RecomputeRecipe recompute) {
  // Disables checks within `recompute()`, which may call other operators.
  const auto end = c10::make_scope_exit([previous = std::exchange(is_checking, true)] { is_checking = previous; });
  const std::string remembered = RecipeText::of(recipe);
  std::string recomputed = "no results that can be remembered";
  try {
    if (const auto fresh = recompute()) {
      recomputed = RecipeText::of(*fresh);
    }
  } catch (const std::exception& error) {
    if (interpreter().isInterrupt(error)) {
      throw;
    }
    recomputed = c10::str("an error: ", error.what());
  }
  if (recomputed != remembered) {
    ++wrong_hits;
    TORCH_CHECK(false, "The metadata cache of fake tensors returned wrong results for `", op.operator_name(),
                "`: remembered ", remembered, ", recomputed ", recomputed,
                ". This is a bug of torchext: NOTE [Inputs of the metadata of results] is incomplete.");
  }
}

}  // namespace

void registerHitChecks() {
  hooks().hit_checks.areDue = &areDue;
  hooks().hit_checks.check = &check;
}

}  // namespace torchext
