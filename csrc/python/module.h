#pragma once

#include <pybind11/pybind11.h>

namespace torchext::python {

// Each adds the functions of one feature to the module `torchext._C`.
void bindFake(pybind11::module_& module);
void bindDeferredInit(pybind11::module_& module);
void bindRecordings(pybind11::module_& module);
void bindCollectives(pybind11::module_& module);
void bindInference(pybind11::module_& module);
void bindInspect(pybind11::module_& module);
void bindAmp(pybind11::module_& module);
void bindLeases(pybind11::module_& module);
void bindLocks(pybind11::module_& module);
void bindMetaOverrides(pybind11::module_& module);
void bindMemory(pybind11::module_& module);
void bindPatching(pybind11::module_& module);

}  // namespace torchext::python
