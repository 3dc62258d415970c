"""Functions of the library that only tests and benchmarks call. The first import compiles them."""

import sys

from cpp_library import extension

sys.modules[__name__] = extension("bindings")
