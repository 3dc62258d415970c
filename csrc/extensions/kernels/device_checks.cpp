#include "device_checks.h"

#include <atomic>
#include <memory>
#include <unordered_set>
#include <utility>

namespace torchext {

namespace {

ReadNativeFunctions& reader() {
  static auto* const read = new ReadNativeFunctions;  // leaked: threads may run operators until the process ends
  return *read;
}

struct Names {
  explicit Names(const NativeFunctions& found)
      : comparing{found.first.begin(), found.first.end()}, shared{found.second.begin(), found.second.end()} {}

  std::unordered_set<std::string> comparing;
  std::unordered_set<std::string> shared;
};

// Several threads may read the names if they need them at the same time. A lock, or a static variable during its
// initialization, would stay locked in a child process forked in the meantime.
const Names& namesOfOperators() {
  static std::atomic<const Names*> names{nullptr};
  const Names* known = names.load(std::memory_order_acquire);
  if (known == nullptr) {
    auto read = std::make_unique<const Names>(reader() ? reader()() : NativeFunctions{});
    if (names.compare_exchange_strong(known, read.get(), std::memory_order_acq_rel)) {
      return *read.release();
    }
  }
  return *known;
}

}  // namespace

void setNativeFunctions(ReadNativeFunctions read) {
  reader() = std::move(read);
}

bool comparesDevices(const c10::OperatorHandle& op) {
  return namesOfOperators().comparing.count(c10::toString(op.operator_name())) != 0;
}

bool sharesKernels(const c10::OperatorHandle& op) {
  return namesOfOperators().shared.count(c10::toString(op.operator_name())) != 0;
}

}  // namespace torchext
