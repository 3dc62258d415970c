#include "bindings.h"

#include <map>
#include <string>

#include "../../csrc/extensions/marks/tensor_marks.h"
#include "../../csrc/libraries/support/kernel_settings.h"

namespace torchext::python {

namespace {

// Returns the settings that an operator would be recorded with now: NOTE [Settings that kernels read].
std::map<std::string, int> kernelSettings() {
  const auto settings = KernelSettings::current()->list();
  return {settings.begin(), settings.end()};
}

}  // namespace

}  // namespace torchext::python

PYBIND11_MODULE(bindings, module) {
  torchext::python::bindAllocator(module);
  torchext::python::bindFills(module);
  torchext::python::bindLocks(module);
  torchext::python::bind(module, "kernel_settings", torchext::python::kernelSettings);
  torchext::python::bind(module, "live_marks", torchext::liveMarks);
}
