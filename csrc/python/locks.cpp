#include "../libraries/support/locks.h"

#include <algorithm>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

LockRank rankOf(const std::string& name) {
  const std::vector<LockRank> all = allLocks();
  const auto found = std::find_if(all.begin(), all.end(), [&name](LockRank rank) { return nameOf(rank) == name; });
  TORCH_CHECK_VALUE(found != all.end(), "There is no lock \"", name, "\".");
  return *found;
}

// A lock under which Python code may run.
class Lock {
 public:
  explicit Lock(const std::string& name) : rank_{rankOf(name)} {
    TORCH_CHECK_VALUE(isOutsideOfInterpreter(rank_), "Python code must not run while \"", name, "\" is held.");
  }

  bool acquire(bool blocking) const {
    if (!blocking) {
      return tryToAcquire(rank_);
    }
    torchext::acquire(rank_);
    return true;
  }

  void release() const {
    TORCH_CHECK(isHeld(rank_), "release(): this thread does not hold the lock \"", nameOf(rank_), "\".");
    torchext::release(rank_);
  }

 private:
  LockRank rank_;
};

// Acquires the outer locks before Python takes its import lock for a fork: code that holds an outer lock may wait for
// the import lock.
void surviveForksOfPython() {
  using pybind11::arg;
  pybind11::module_::import("os").attr("register_at_fork")(
      arg("before") = pybind11::cpp_function{&acquireOuterLocks},
      arg("after_in_parent") = pybind11::cpp_function{&releaseOuterLocks},
      arg("after_in_child") = pybind11::cpp_function{&releaseOuterLocks});
}

}  // namespace

void bindLocks(pybind11::module_& module) {
  pybind11::class_<Lock>(module, "Lock")
      .def(pybind11::init(torch::wrap_pybind_function([](const std::string& name) { return Lock{name}; })))
      .def("acquire", &Lock::acquire, pybind11::arg("blocking") = true)
      .def("release", &Lock::release);
  surviveForksOfPython();
}

}  // namespace torchext::python
