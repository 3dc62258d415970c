#include "device_checks.h"

#include <atomic>
#include <fstream>
#include <memory>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace torchext {

namespace {

std::string& pathOfNativeFunctions() {
  static std::string path;
  return path;
}

bool startsWith(const std::string& line, std::string_view prefix) {
  return line.compare(0, prefix.size(), prefix) == 0;
}

// The names of operators.
struct Names {
  std::unordered_set<std::string> comparing;
  std::unordered_set<std::string> shared;
};

// Parses the entries of native_functions.yaml, one line at a time.
class Reader {
 public:
  void read(const std::string& line) {
    constexpr std::string_view kBegin = "- func: ";
    if (startsWith(line, kBegin)) {
      finish();
      name_ = "aten::" + line.substr(kBegin.size(), line.find('(') - kBegin.size());
      has_kernel_ = false;
      checks_ = true;
      is_shared_ = false;
    } else if (startsWith(line, "  device_check: NoCheck")) {
      checks_ = false;
    } else if (startsWith(line, "  structured_delegate:") ||
               (startsWith(line, "    ") && line.substr(0, line.find(':')).find("CUDA") != std::string::npos)) {
      has_kernel_ = true;
      is_shared_ = is_shared_ || startsWith(line, "    CPU, CUDA");
    }
    is_shared_ = is_shared_ || startsWith(line, "  structured_inherits: TensorIteratorBase");
  }

  Names take() {
    finish();
    return std::move(names_);
  }

 private:
  void finish() {
    if (has_kernel_ && checks_) {
      names_.comparing.insert(name_);
    }
    if (is_shared_) {
      names_.shared.insert(name_);
    }
  }

  std::string name_;
  bool has_kernel_ = false;
  bool checks_ = false;
  bool is_shared_ = false;
  Names names_;
};

Names readNames() {
  Reader reader;
  std::ifstream file{pathOfNativeFunctions()};
  for (std::string line; std::getline(file, line);) {
    reader.read(line);
  }
  return reader.take();
}

// Several threads may read the file if they need it at the same time. A lock, or a static variable during its
// initialization, would stay locked in a child process forked in the meantime.
const Names& namesOfOperators() {
  static std::atomic<const Names*> names{nullptr};
  const Names* known = names.load(std::memory_order_acquire);
  if (known == nullptr) {
    auto read = std::make_unique<const Names>(readNames());
    if (names.compare_exchange_strong(known, read.get(), std::memory_order_acq_rel)) {
      return *read.release();
    }
  }
  return *known;
}

}  // namespace

void setNativeFunctions(std::string path) {
  pathOfNativeFunctions() = std::move(path);
}

bool comparesDevices(const c10::OperatorHandle& op) {
  return namesOfOperators().comparing.count(c10::toString(op.operator_name())) != 0;
}

bool sharesKernels(const c10::OperatorHandle& op) {
  return namesOfOperators().shared.count(c10::toString(op.operator_name())) != 0;
}

}  // namespace torchext
