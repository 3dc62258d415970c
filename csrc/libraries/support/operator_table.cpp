#include "operator_table.h"

#include <atomic>
#include <memory>

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/runtime/operator.h>

namespace torchext {

using c10::OperatorHandle;
using c10::OperatorName;

namespace {

std::vector<OperatorName> overloadsOf(const std::string& name, Overloads overloads) {
  if (overloads == Overloads::kNamed) {
    return {torch::jit::parseName(name)};
  }
  std::vector<OperatorName> names;
  for (const auto& found : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    names.emplace_back(name, found->schema().overload_name());
  }
  return names;
}

}  // namespace

struct OperatorGroups::State {
  struct Row {
    int group;
    OperatorName op;  // differs from the operator's if the handle was reused after this one was unregistered
  };

  struct Index {
    ska::flat_hash_map<OperatorHandle, Row> rows;
    std::vector<Row> missing;  // not in this release, or registered later
  };

  const char* what;
  Overloads overloads;
  std::vector<std::pair<std::string, int>> names;  // and their groups
  int count = 0;
  std::atomic<const Index*> index{nullptr};

  static std::vector<State*>& all() {
    static auto* states = new std::vector<State*>;
    return *states;
  }

  // Two threads may run it at once; the first index is kept.
  const Index* makeIndex() {
    auto made = std::make_unique<Index>();
    for (const auto& [name, group] : names) {
      const std::size_t before = made->rows.size();
      for (const OperatorName& overload : overloadsOf(name, overloads)) {
        if (const auto op = c10::Dispatcher::singleton().findSchema(overload)) {
          made->rows.emplace(*op, Row{group, overload});
        }
      }
      if (made->rows.size() == before) {
        made->missing.push_back({group, torch::jit::parseName(name)});
      }
    }
    const Index* other = nullptr;
    return index.compare_exchange_strong(other, made.get()) ? made.release() : other;
  }
};

OperatorGroups::OperatorGroups(const char* what, Overloads overloads) : state_{new State{what, overloads, {}}} {
  State::all().push_back(state_);
}

void OperatorGroups::add(std::initializer_list<std::string_view> names) {
  add(std::vector<std::string>{names.begin(), names.end()});
}

void OperatorGroups::add(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    state_->names.emplace_back(name, state_->count);
  }
  ++state_->count;
}

int OperatorGroups::find(const OperatorHandle& op) const {
  const State::Index* index = state_->index.load(std::memory_order_acquire);
  if (index == nullptr) {
    index = state_->makeIndex();
  }
  const OperatorName& name = op.operator_name();
  if (const auto found = index->rows.find(op); found != index->rows.end() && found->second.op == name) {
    return found->second.group;
  }
  for (const State::Row& row : index->missing) {
    if (row.op.name == name.name && (state_->overloads == Overloads::kAll || row.op == name)) {
      return row.group;
    }
  }
  return -1;
}

std::vector<std::pair<std::string, std::vector<std::string>>> describeOperatorTables() {
  std::vector<std::pair<std::string, std::vector<std::string>>> tables;
  for (const OperatorGroups::State* state : OperatorGroups::State::all()) {
    std::vector<std::string>& names = tables.emplace_back(state->what, std::vector<std::string>{}).second;
    for (const auto& [name, group] : state->names) {
      names.push_back(name);
    }
  }
  return tables;
}

}  // namespace torchext
