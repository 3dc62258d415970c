#pragma once

// NOTE [Traits of operators]
//
// Properties of operators that their schemas do not express are in tables of full operator names, one per property:
//
//     const OperatorSet isFill{"fill their first argument", {"aten::zero_", "aten::fill_"}};
//
// A table looks up its operators at the first call, `isFill(op)`, and after that by handle, in constant time and
// without a lock. Names are compared only for operators that were not registered at that time. An operator that is in
// no table, such as a user's operator of any name, has the default value, which must be safe.
// docs/reference/operator_traits.md is printed from all tables.

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torchext/macros.h>

#include "sizes.h"

namespace torchext {

// A name in a table stands for all overloads of an operator, or for one ("aten::add" is the one with an empty name).
enum class Overloads { kAll, kNamed };

// The names of a table, in groups that share a value. Filled while the library is loaded, and never destroyed.
class OperatorGroups {
 public:
  // `what` completes a sentence about the operators; it is printed in the documentation.
  TORCHEXT_API OperatorGroups(const char* what, Overloads overloads);

  TORCHEXT_API void add(std::initializer_list<std::string_view> names);
  void add(const std::vector<std::string>& names);

  // Returns the number of the group that has the operator, or -1.
  TORCHEXT_API int find(const c10::OperatorHandle& op) const;

 private:
  struct State;
  friend std::vector<std::pair<std::string, std::vector<std::string>>> describeOperatorTables();

  State* state_;
};

template <typename Value>
class OperatorTable {
 public:
  struct Group {
    Value value;
    std::initializer_list<std::string_view> names;
  };

  OperatorTable(const char* what, std::initializer_list<Group> groups, Overloads overloads = Overloads::kAll)
      : groups_{what, overloads} {
    add(groups);
  }

  void add(std::initializer_list<Group> groups) {
    for (const Group& group : groups) {
      groups_.add(group.names);
      values_.push_back(group.value);
    }
  }

  // Returns the value of the operator, or the default of its type.
  Value operator()(const c10::OperatorHandle& op) const {
    const int group = groups_.find(op);
    return group < 0 ? Value{} : values_[toSize(group)];
  }

 private:
  OperatorGroups groups_;
  std::vector<Value>& values_ = *new std::vector<Value>;  // never destroyed
};

class OperatorSet {
 public:
  OperatorSet(const char* what, std::initializer_list<std::string_view> names, Overloads overloads = Overloads::kAll)
      : names_{what, overloads} {
    names_.add(names);
  }

  bool operator()(const c10::OperatorHandle& op) const {
    return names_.find(op) >= 0;
  }

 private:
  OperatorGroups names_;
};

// Returns the description of each table, and the names of its operators.
TORCHEXT_API std::vector<std::pair<std::string, std::vector<std::string>>> describeOperatorTables();

}  // namespace torchext
