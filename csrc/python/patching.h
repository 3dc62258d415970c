#pragma once

// Replacing functions of PyTorch, many at once: it is done whenever the first tensor of ours is made, and undone when
// the last is gone. torchext/tools/patching.py decides what is replaced. With the interpreter's lock; an error leaves
// the rest as it is.

#include <pybind11/pybind11.h>

namespace torchext::python {

// For each (function of C, replacement or None, concerns): NOTE [Replaced C functions]. `None` puts the original back.
void replaceFunctions(const pybind11::list& steps);

// For each (function of Python, expected code, code): gives it the code, unless somebody else has given it another.
void exchangeCodes(const pybind11::list& steps);

}  // namespace torchext::python
