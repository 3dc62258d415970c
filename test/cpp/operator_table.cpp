// Traits of operators, including custom operators.

#include <optional>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "libraries/support/operator_table.h"
#include "tests.h"

namespace {

using torchext::OperatorSet;
using torchext::OperatorTable;
using torchext::Overloads;

TORCH_LIBRARY(mock, library) {
  library.def("one(Tensor x) -> Tensor");
  library.def("one.other(Tensor x, int y) -> Tensor");
  library.def("two(Tensor x) -> Tensor");
  library.def("zero_(Tensor(a!) x) -> Tensor(a!)");
}

// Adding a trait takes these lines only.
const OperatorTable<int> mockTraitOf{"have a number in a test", {{1, {"mock::one"}}, {2, {"mock::two", "aten::mul"}}}};
const OperatorSet isNamed{"are named in a test", {"mock::one", "aten::add.Tensor"}, Overloads::kNamed};
const OperatorSet isLate{"are registered late in a test", {"mock_late::one"}};
const OperatorSet isZero{"make zeros in a test", {"aten::zero_"}};

c10::OperatorHandle find(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

void nameStandsForAllOverloads() {
  EXPECT(mockTraitOf(find("mock::one")) == 1 && mockTraitOf(find("mock::one", "other")) == 1);
  EXPECT(mockTraitOf(find("aten::mul", "Tensor")) == 2 && mockTraitOf(find("aten::mul", "out")) == 2);
}

void nameStandsForOneOverloadInATableOfOverloads() {
  EXPECT(isNamed(find("mock::one")) && !isNamed(find("mock::one", "other")));
  EXPECT(isNamed(find("aten::add", "Tensor")) && !isNamed(find("aten::add", "Scalar")));
}

void operatorsInNoTableHaveTheDefault() {
  EXPECT(mockTraitOf(find("aten::add", "Tensor")) == 0);
  EXPECT(isZero(find("aten::zero_")) && !isZero(find("mock::zero_")));
}

void operatorsRegisteredAfterTheFirstLookupAreFound() {
  EXPECT(!isLate(find("mock::one")));
  torch::Library library(torch::Library::DEF, "mock_late", std::nullopt, __FILE__, __LINE__);
  library.def("one(Tensor x) -> Tensor");
  library.def("two(Tensor x) -> Tensor");
  EXPECT(isLate(find("mock_late::one")) && !isLate(find("mock_late::two")));
}

void firstLookupsMayBeConcurrent() {
  const OperatorSet isFirst{"are looked up by threads in a test", {"aten::add", "mock::two"}};
  std::vector<int> found(8);
  std::vector<std::thread> threads;
  for (int& number : found) {
    threads.emplace_back([&] { number = isFirst(find("aten::add", "out")) && !isFirst(find("mock::one")) ? 1 : 0; });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT(found == std::vector<int>(8, 1));
}

constexpr Test kTests[] = {
    {"name stands for all overloads", nameStandsForAllOverloads},
    {"name stands for one overload in a table of overloads", nameStandsForOneOverloadInATableOfOverloads},
    {"operators in no table have the default", operatorsInNoTableHaveTheDefault},
    {"operators registered after the first lookup are found", operatorsRegisteredAfterTheFirstLookupAreFound},
    {"first lookups may be concurrent", firstLookupsMayBeConcurrent},
};

}  // namespace

EXPORT_TESTS(kTests)
