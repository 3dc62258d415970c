#include "module.h"

#include <string>

#include <dlfcn.h>

#include <c10/util/Exception.h>
#include <torch/version.h>

#include "../core/registration.h"
#include "../core/torch_internals/self_tests.h"
#include "../core/torch_internals/torch_compat.h"
#include "interpreter.h"

namespace py = pybind11;

namespace {

// Returns the major and minor version: "2.14" for "2.14.0a0+git5c1f".
std::string releaseOf(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

// PyTorch's C++ interface changes with each minor release, and a module compiled against another release may crash
// instead of failing. The self-tests find differences between builds of one release.
void checkTorchVersion() {
  const auto found = py::module_::import("torch").attr("__version__").cast<std::string>();
  if (releaseOf(found) != releaseOf(TORCH_VERSION)) {
    throw py::import_error("torchext was built for torch " TORCH_VERSION ", but torch " + found +
                           " is installed.");  // torchext/installation.py adds instructions
  }
}

// Two environments that use one checkout build into the same folder.
void checkLibrary() {
  const std::string built_for = torchext::builtForTorch();
  if (built_for != TORCH_VERSION) {
    Dl_info library{};
    const bool is_found = dladdr(reinterpret_cast<const void*>(&torchext::builtForTorch), &library) != 0;
    throw py::import_error(
        "torchext found a library of another build: " + std::string(is_found ? library.dli_fname : "libtorchext.so") +
        " was built for torch " + built_for + ", and its bindings for torch " TORCH_VERSION ".");
  }
}

void setUpOrRaiseImportError() {
  try {
    torchext::setUp();
  } catch (const c10::Error& error) {
    throw py::import_error(std::string("torchext cannot be imported: ") + error.what_without_backtrace());
  }
}

void bindReleases(py::module_& module) {
  py::dict differences;
  for (const auto& [name, since, until, what] : torchext::compat::kDifferences) {
    differences[py::str(name.data(), name.size())] = py::make_tuple(since, until, what);
  }
  py::dict pieces;
  for (const torchext::TestedPiece& piece : torchext::piecesOfPyTorch()) {
    pieces[piece.name] = piece.verified;
  }
  module.attr("built_for_torch") = TORCH_VERSION;
  module.attr("differences_between_releases") = differences;
  module.attr("verified_pieces") = pieces;
  module.def("self_test_results", [] {
    py::dict results;
    for (const torchext::TestedPiece& piece : torchext::piecesOfPyTorch()) {
      results[piece.name] = torchext::passesSelfTest(piece);
    }
    return results;
  });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  checkTorchVersion();
  checkLibrary();
  setUpOrRaiseImportError();
  torchext::python::bindInterpreter(module);
  torchext::python::bindLocks(module);
  bindReleases(module);
  torchext::python::bindFake(module);
  torchext::python::bindMetaOverrides(module);
  torchext::python::bindDeferredInit(module);
  torchext::python::bindRecordings(module);
  torchext::python::bindCollectives(module);
  torchext::python::bindInference(module);
  torchext::python::bindInspect(module);
  torchext::python::bindAmp(module);
  torchext::python::bindPatching(module);
  torchext::python::bindLeases(module);
  torchext::python::bindMemory(module);
}
