"""Run a command that cannot write outside of some folders: `python guard.py FOLDER COMMAND`.

Landlock, a part of Linux since 5.13, needs no privileges. Its restrictions also apply to all processes that the command
starts, and cannot be removed. Changes of metadata (modes, owners, times) are not restricted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

__all__ = ["can_guard", "refuse_writes_outside"]

# Constants of Linux's Landlock header. All architectures have these system call numbers.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
# Writing, removing and creating files of any kind; then, with the version that added it: renaming into another folder,
# and truncating.
WRITES = (1 << 1) | sum(1 << bit for bit in range(4, 13))
WRITES_SINCE = {2: 1 << 13, 3: 1 << 14}

# Before version 2, files cannot be renamed into another folder at all.
LEAST_VERSION = 2

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38

# Devices, including GPUs; shared memory and semaphores; settings of the process.
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
    """Return the version of Landlock, or 0 if the system does not have it."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        return _system_call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG))
    except OSError:
        return 0


def can_guard() -> bool:
    """Return true if the system can reject writes."""
    return _version() >= LEAST_VERSION


def refuse_writes_outside(folders: Iterable[str]) -> None:
    """Make the system reject writes outside of `folders` by this thread and by processes that it starts.

    Raises:
        OSError: The system does not support this, or a folder does not exist.
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
    _folder, *_command = sys.argv[1:]
    # End with the parent process, because the folder may be removed then.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    refuse_writes_outside([_folder, *ALWAYS_WRITABLE])
    os.execv(_command[0], _command)
