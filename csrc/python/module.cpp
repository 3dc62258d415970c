#include "module.h"

#include <string>

#include <c10/util/Exception.h>
#include <torch/version.h>

#include "../registration.h"
#include "interpreter.h"

namespace py = pybind11;

namespace {

// The C++ interface of PyTorch changes with each minor release, and between builds of one; a module that was compiled
// against another one may crash instead of failing.
void checkTorchVersion() {
  const auto found = py::module_::import("torch").attr("__version__").cast<std::string>();
  const std::string built_for = TORCH_VERSION;
  const auto release = [](const std::string& version) { return version.substr(0, version.find('+')); };
  if (release(found) != release(built_for)) {
    throw py::import_error("torchext was built for torch " + built_for + ", but torch " + found +
                           " is installed.");  // torchext/__init__.py adds what to do
  }
}

void setUpOrRaiseImportError() {
  try {
    torchext::setUp();
  } catch (const c10::Error& error) {
    throw py::import_error(std::string("torchext cannot be imported: ") + error.what_without_backtrace());
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  checkTorchVersion();
  setUpOrRaiseImportError();
  torchext::python::bindInterpreter(module);
  module.attr("built_for_torch") = TORCH_VERSION;
  torchext::python::bindFake(module);
  torchext::python::bindDeferredInit(module);
  torchext::python::bindFills(module);
  torchext::python::bindInference(module);
  torchext::python::bindInspect(module);
  torchext::python::bindMarks(module);
  torchext::python::bindAmp(module);
  torchext::python::bindPatching(module);
  torchext::python::bindLeases(module);
}
