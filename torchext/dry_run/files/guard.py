"""Starts a command for which the system refuses all writes outside of some folders: `python guard.py FOLDER COMMAND`.

Landlock, a part of Linux since 5.13, needs no rights. What it has refused to a process, it refuses to all that the
process starts, and there is no way back. Metadata (modes, owners, times) are not refused.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

__all__ = ["can_guard", "refuse_writes_outside"]

# Those of Linux's header of Landlock. The numbers of system calls are those of all architectures.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
# Writing, removing and making files of any kind; then, by the version that knows it: renaming into another folder, and
# truncating.
WRITES = (1 << 1) | sum(1 << bit for bit in range(4, 13))
WRITES_SINCE = {2: 1 << 13, 3: 1 << 14}

# Before version 2 files could not be renamed into another folder at all.
LEAST_VERSION = 2

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38

# Devices, also those of GPUs; shared memory and semaphores; a process's own settings.
ALWAYS_WRITABLE = ("/dev", "/proc")


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _system_call(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _version() -> int:
    """Returns the version of Landlock, or 0 if there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        return _system_call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG))
    except OSError:
        return 0


def can_guard() -> bool:
    """Returns whether the system can refuse writes."""
    return _version() >= LEAST_VERSION


def refuse_writes_outside(folders: Iterable[str]) -> None:
    """Has the system refuse writes of this thread, and of what it starts, outside of `folders`.

    Raises:
        OSError: The system cannot do that, or a folder does not exist.
    """
    version = _version()
    handled = WRITES | sum(access for since, access in WRITES_SINCE.items() if version >= since)
    ruleset = _Ruleset(handled)
    rules = _system_call(
        CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset)), ctypes.c_uint32(0)
    )
    try:
        for folder in folders:
            _allow(rules, folder, handled)
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _system_call(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _allow(rules: int, folder: str, access: int) -> None:
    beneath = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(access, beneath)
        _system_call(
            ADD_RULE, ctypes.c_int(rules), ctypes.c_int(RULE_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0)
        )
    finally:
        os.close(beneath)


if __name__ == "__main__":
    _, folder, *command = sys.argv
    # A process that nothing waits for any more must not go on in a folder that may be removed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    refuse_writes_outside([folder, *ALWAYS_WRITABLE])
    os.execv(command[0], command)
