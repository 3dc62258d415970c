#pragma once

// NOTE [Traits of operators]
//
// What has to be known of operators beyond their schemas is in tables of their full names, one for each concern:
//
//     const OperatorSet isFill{"fill their first argument", {"aten::zero_", "aten::fill_"}};
//
// A table finds its operators when it is first asked, `isFill(op)`, and then by their handles, in constant time and
// without a lock. Names are compared for operators that were not registered yet. An operator that is in no table, such
// as a user's of any name, has the default, which has to be safe. docs/reference/operator_traits.md is printed from all
// tables.

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torchext/macros.h>

namespace torchext {

// What a name stands for: all overloads of an operator, or one ("aten::add" is the one without a name).
enum class Overloads { kAll, kNamed };

// The names of a table in groups that have one value. Filled while the library is loaded, and never destroyed.
class OperatorGroups {
 public:
  // `what` is the end of a sentence about the operators.
  TORCHEXT_API OperatorGroups(const char* what, Overloads overloads);

  TORCHEXT_API void add(std::initializer_list<std::string_view> names);

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
    return group < 0 ? Value{} : values_[static_cast<std::size_t>(group)];
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

// Returns what each table says of its operators, and their names.
TORCHEXT_API std::vector<std::pair<std::string, std::vector<std::string>>> describeOperatorTables();

}  // namespace torchext
