"""Runs the tests of a program of `test/cpp/`, which `tests.h` exports.

As a script, it prints their messages as JSON, in a process that does not import torchext: that would load its library.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys


def run_tests(program: ctypes.CDLL) -> dict[str, str]:
    """Return the message of each test, which is empty if it has passed."""
    for function in (program.test_name, program.run_test):
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_size_t]
    names = itertools.takewhile(bool, map(program.test_name, itertools.count()))
    return {name.decode(): program.run_test(index).decode() for index, name in enumerate(names)}


if __name__ == "__main__":
    import torch  # noqa: F401  # the libraries that the program is linked with

    print(json.dumps(run_tests(ctypes.CDLL(sys.argv[1]))))
