"""The files of a dry run: written files are kept apart, and existing files never change.

Two layers enforce this. Python functions that take file names are replaced (`functions.py`), so that a program finds
its written files under their names (`tree.py`, `overlay.py`). `guard.py` makes the system reject all other writes, of
code in C and of programs that the program starts.

The processes of a dry run import this package when Python starts, before modules that keep references to functions of
`os`: `startup/sitecustomize.py`. So it imports only the standard library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .functions import Function, Replacements, replace_functions
from .libraries import place_of, redirect_databases, redirect_libraries
from .overlay import PLACEHOLDER, Change, Overlay, activate, active, changes_in, keep_files
from .tree import real, when_imported

__all__ = [
    "FILES",
    "GUARD",
    "PLACEHOLDER",
    "RUN",
    "STARTUP",
    "Change",
    "Overlay",
    "active",
    "changes_in",
    "child_environment",
    "child_functions",
    "install",
    "keep_files",
    "redirect_processes",
    "when_imported",
]


# ---- Make the Python programs that a program starts keep their files in the same overlay


FILES = "TORCHEXT_DRY_RUN_FILES"

# A folder for `PYTHONPATH`. Python runs its `sitecustomize.py` when it starts.
STARTUP = f"{os.path.dirname(os.path.abspath(__file__))}/startup"

# Runs `sitecustomize.py`, and then a script, a module or code.
RUN = f"{STARTUP}/run.py"

LONGEST_SOCKET = 107  # bytes of the path of a socket

# Options that keep Python from running `sitecustomize.py`, or from using the environment.
WITHOUT_STARTUP = frozenset("EIS")
WITH_ARGUMENT = ("-X", "-W", "--check-hash-based-pycs")


def child_environment(overlay: Overlay, environment: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the environment of a child process, with the variables that lead it to the overlay."""
    found = {os.fsdecode(name): value for name, value in environment.items()}
    found[FILES] = overlay.folder
    found["PYTHONPATH"] = _with_startup(os.fsdecode(found.get("PYTHONPATH", "")))
    found.setdefault("TMPDIR", overlay.temporary)
    found["PYTHONDONTWRITEBYTECODE"] = "1"  # reports list files of the program, not caches
    return found


def child_functions(overlay: Overlay, replacements: Replacements) -> dict[str, Function]:
    """Return replacements for functions of `os` that start programs, or set their environment."""

    def execve(path: Any, argv: Sequence[Any], env: Mapping[Any, Any]) -> Any:
        placed = path if isinstance(path, int) else place_of(overlay, path)
        real.execve(placed, _with_run(argv), child_environment(overlay, env))

    def execv(path: Any, argv: Sequence[Any]) -> Any:
        real.execv(place_of(overlay, path), _with_run(argv))

    def spawning(original: Any) -> Function:
        def spawn(path: Any, argv: Sequence[Any], env: Mapping[Any, Any] | None, **kwargs: Any) -> Any:
            kwargs["file_actions"] = [_action_placed(overlay, action) for action in kwargs.get("file_actions") or ()]
            environment = child_environment(overlay, os.environ if env is None else env)
            placed = place_of(overlay, path) if "/" in os.fsdecode(path) else path
            return original(placed, _with_run(argv), environment, **kwargs)

        return spawn

    # `os.environ` calls these. So children find the overlay even if the program clears its environment.
    def putenv(name: Any, value: Any) -> None:
        is_path = os.fsdecode(name) == "PYTHONPATH"
        real.putenv(name, _with_startup(os.fsdecode(value)) if is_path else value)

    def unsetenv(name: Any) -> None:
        kept = child_environment(overlay, {}).get(os.fsdecode(name))
        real.unsetenv(name) if kept is None else real.putenv(name, kept)

    return {
        "execv": execv,
        "execve": execve,
        "posix_spawn": spawning(getattr(real, "posix_spawn", None)),  # some systems do not have it
        "posix_spawnp": spawning(getattr(real, "posix_spawnp", None)),
        "putenv": putenv,
        "unsetenv": unsetenv,
    }


def redirect_processes(overlay: Overlay, replacements: Replacements) -> None:
    """Replace functions of `subprocess` and `socket` when these modules are imported."""
    when_imported("subprocess", lambda module: _redirect_popen(overlay, replacements, module))
    when_imported("socket", lambda module: _redirect_sockets(overlay, module))


def _redirect_popen(overlay: Overlay, replacements: Replacements, module: Any) -> None:
    import inspect

    original = module.Popen.__init__
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        arguments = given.arguments
        if arguments.get("env") is not None:
            arguments["env"] = child_environment(overlay, arguments["env"])
        if not arguments.get("shell"):
            _place_program(overlay, arguments)
        if arguments.get("cwd") is not None:
            arguments["cwd"] = replacements.folder_place(arguments["cwd"])
        original(*given.args, **given.kwargs)

    module.Popen.__init__ = __init__


def _place_program(overlay: Overlay, arguments: dict[str, Any]) -> None:
    args = arguments["args"]
    is_path = isinstance(args, (str, bytes, os.PathLike))
    if not is_path:
        args = arguments["args"] = _with_run(list(args))
    program = arguments.get("executable") or (args if is_path else args[0] if args else None)
    if program is None or "/" not in os.fsdecode(program):
        return
    path = os.path.join(os.fsdecode(arguments.get("cwd") or "."), os.fsdecode(program))
    placed = place_of(overlay, path)
    if placed != path:
        arguments["executable"] = placed


def _with_run(argv: Sequence[Any]) -> list[Any]:
    """Insert `startup/run.py` into a command of Python whose options make it ignore its environment."""
    words = list(argv)
    if not words or not re.fullmatch(r"(.*/)?python[0-9.]*", os.fsdecode(words[0])):
        return words
    ignores = False
    for position, word in enumerate(words[1:], 1):
        option = os.fsdecode(word)
        if words[position - 1] in WITH_ARGUMENT and position > 1:
            continue
        letters = re.fullmatch(r"-([a-zA-Z]*?)([cm]?)", option)
        if letters is None and option.startswith(WITH_ARGUMENT):
            continue
        ignores = ignores or (letters is not None and bool(WITHOUT_STARTUP & set(letters[1])))
        if letters is None or letters[2]:
            before = [f"-{letters[1]}"] if letters and letters[1] else []
            rest = [f"-{letters[2]}"] if letters else [word]
            return [*words[:position], *before, RUN, *rest, *words[position + 1 :]] if ignores else words
    return words


def _with_startup(path: str) -> str:
    folders = [folder for folder in path.split(os.pathsep) if folder != STARTUP] if path else []
    return os.pathsep.join([STARTUP, *folders])


def _action_placed(overlay: Overlay, action: tuple[Any, ...]) -> tuple[Any, ...]:
    if action[0] != os.POSIX_SPAWN_OPEN:
        return action
    kind, descriptor, path, flags, mode = action
    how = "r" if not flags & (os.O_WRONLY | os.O_RDWR) else "w" if flags & os.O_TRUNC else "a"
    return kind, descriptor, place_of(overlay, path, how), flags, mode


def run_again_if_written() -> None:
    """Start Python again with `startup/run.py` if it is about to run a script that the program has written."""
    from .overlay import active

    overlay = active()
    script = sys.argv[0] if sys.argv else ""
    if overlay is None or script in ("", "-c", "-m", "-"):
        return
    if overlay.has_own(overlay.resolve(script)):
        options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
        real.execv(sys.executable, [sys.orig_argv[0], *options, RUN, *sys.argv])


def _redirect_sockets(overlay: Overlay, module: Any) -> None:
    """Bind and connect sockets at their places, through a folder descriptor if the whole path is too long."""
    bind, connect, connect_ex = module.socket.bind, module.socket.connect, module.socket.connect_ex

    def through_folder(original: Function, *, makes: bool) -> Function:
        def call(self: Any, address: Any) -> Any:
            if self.family != getattr(module, "AF_UNIX", None) or not isinstance(address, (str, bytes)):
                return original(self, address)
            path = os.fsdecode(address)
            if not path or path.startswith("\0"):
                return original(self, address)
            found = overlay.resolve(path, follow=not makes)
            place = overlay.to_make(found) if makes and not overlay.exists(found) else overlay.place(found)
            if place == path and len(os.fsencode(path)) <= LONGEST_SOCKET:
                return original(self, address)
            folder = real.open(os.path.dirname(place), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return original(self, f"/proc/self/fd/{folder}/{os.path.basename(place)}")
            finally:
                real.close(folder)

        return call

    module.socket.bind = through_folder(bind, makes=True)
    module.socket.connect = through_folder(connect, makes=False)
    module.socket.connect_ex = through_folder(connect_ex, makes=False)


# ---- The files of a dry run: written files are kept apart, and existing files never change


# The program that starts another one under guard. Uses `os`, because importing `pathlib` here may be too early.
GUARD = f"{os.path.dirname(os.path.abspath(__file__))}/guard.py"


def install(folder: str) -> None:
    """Keep the files of this process in `folder` until it ends."""
    sys.dont_write_bytecode = True  # also with options that make Python ignore its environment
    overlay = Overlay(folder)
    activate(overlay)
    replacements = Replacements(overlay)
    replace_functions(replacements, child_functions(overlay, replacements))
    redirect_libraries(overlay)
    redirect_databases(overlay)
    redirect_processes(overlay, replacements)
    run_again_if_written()
