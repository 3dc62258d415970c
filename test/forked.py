"""Runs Python command lines in forks of a process that has imported torch, which takes longer than most programs.

A program finds the state of a new interpreter: arguments, environment, working directory, path, an empty `__main__`,
streams, exit code. At its end threads are joined and `atexit` runs. Programs that test a difference use `subprocess`
instead:

- Modules of PyTorch have been imported, and an import of torchext comes after them.
- Options of Python other than -B and -W raise.
- Settings that an interpreter or a library reads at its start are those of the tests' process: variables such as
  `OMP_NUM_THREADS` and `PYTHONHASHSEED`, and `/proc/self/environ`.
- Modules and static variables are not destroyed at the end.

No program is forked if that affects all of them: sanitizers have their own threads, and coverage counts are written at
the end.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

__all__ = [
    "CAN_FORK",
    "DRY_RUN",
    "TORCH",
    "ForkedProcess",
    "cpu_seconds",
    "end_servers",
    "run",
]

# Imports of the forked process, one set for each kind of program.
TORCH = ("torch",)
# The imports of a rank's process when its program has made an optimizer, except modules of torchext that look for the
# files of the dry run at import, and those of PyTorch that a world changes at import.
DRY_RUN = (*TORCH, "torch._dynamo")

CAN_FORK = sys.platform == "linux" and not {"LD_PRELOAD", "COVERAGE_PROCESS_START"} & {*os.environ}

FIRST_FREE, PAST_LAST = 300, 1 << 16  # descriptors from the first on are unused
LONGEST_ANSWER = 1024  # bytes
TIMEOUT = 60  # seconds


# ---- The tests' process.


class ForkedProcess:
    """A running program, with the part of `subprocess.Popen` that tests use.

    Args:
        command: The path of this Python, its arguments, and those of the program.
        imports: The modules that the forked process has imported.
        env: The environment. The defaults are those of this process, also for the other arguments.
        cwd: The working directory.
        stdin: An open file, or `subprocess.DEVNULL`.
        stdout: An open file.
        stderr: An open file.
        pass_fds: Further descriptors, which keep their numbers.
        start_new_session: Whether to start a session.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        imports: tuple[str, ...] = TORCH,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> None:
        words = [os.fspath(word) for word in command]
        if words[0] != sys.executable:
            raise ValueError(f"expected a command of {sys.executable}, got {words[0]}")
        self.returncode: int | None = None
        order = {
            "command": words,
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or Path.cwd()),
            "descriptors": [0, 1, 2, *pass_fds],
            "session": start_new_session,
        }
        self._imports = imports
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as file, Path(os.devnull).open("rb") as nothing:
            file.write(json.dumps(order).encode())
            file.flush()
            streams: list[Any] = [nothing if one == subprocess.DEVNULL else one for one in (stdin, stdout, stderr)]
            numbers = [number if one is None else one.fileno() for number, one in enumerate(streams)]
            server = _server(imports)
            socket.send_fds(server, [b"x"], [theirs.fileno(), file.fileno(), *numbers, *pass_fds])
        self.pid = int(self._connection.recv(LONGEST_ANSWER))

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._read_end(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        code = self._read_end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Request its end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _read_end(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            self.returncode, _spent[self._imports] = json.loads(self._connection.recv(LONGEST_ANSWER))
            self._connection.close()
        return self.returncode


_spent: dict[tuple[str, ...], float] = {}


def cpu_seconds() -> float:
    """Return the CPU seconds of ended programs, which this process's own times do not include."""
    return sum(_spent.values())


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    imports: tuple[str, ...] = TORCH,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    pass_fds: Sequence[int] = (),
    check: bool = False,
    timeout: float | None = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, like `subprocess.run(capture_output=True, text=True)`.

    Raises:
        subprocess.CalledProcessError: Its exit code is not 0, with `check`.
        subprocess.TimeoutExpired: It has not ended in time.
    """
    if not CAN_FORK:
        return subprocess.run(
            command, env=env, cwd=cwd, pass_fds=pass_fds, check=check, timeout=timeout, capture_output=True, text=True
        )
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = ForkedProcess(command, imports=imports, env=env, cwd=cwd, stdout=out, stderr=err, pass_fds=pass_fds)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        done = subprocess.CompletedProcess(list(command), process.wait(), *texts)
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
    return done


_servers: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


@functools.cache
def _server(imports: tuple[str, ...]) -> socket.socket:
    """Start the process to fork, for the first program that needs it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *imports],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # NumPy's library starts its threads at import
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    _servers.append((ours, process))
    return ours


def end_servers() -> None:
    """End the forking processes. The tests' process must call this at its end."""
    for connection, process in _servers:
        connection.close()
        process.wait(TIMEOUT)
    _servers.clear()
    _server.cache_clear()


# ---- The forking process.


def _serve(server: socket.socket) -> None:
    """Fork a process for each program until the tests' process ends."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                _answer_end(*running.pop(descriptor))
                os.close(descriptor)
                continue
            _, received, _, _ = socket.recv_fds(server, 1, 256)
            if not received:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            connection, file, *descriptors = received
            order = json.loads(os.pread(file, os.fstat(file).st_size, 0))
            pid = os.fork()
            if pid == 0:
                server.detach()
                if order["session"]:
                    os.setsid()
                _take_descriptors(descriptors, order["descriptors"])
                _run(order["command"], order["environment"], order["folder"])
            for number in (file, *descriptors):
                os.close(number)
            os.write(connection, str(pid).encode())
            watch = os.pidfd_open(pid)
            running[watch] = pid, connection
            poll.register(watch, select.POLLIN)


def _answer_end(pid: int, connection: int) -> None:
    _, status = os.waitpid(pid, 0)
    spent = sum(os.times()[:4])
    with suppress(BrokenPipeError, ConnectionResetError):
        os.write(connection, json.dumps([os.waitstatus_to_exitcode(status), spent]).encode())
    os.close(connection)


def _take_descriptors(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors their numbers, and close all others."""
    kept = [os.dup2(number, FIRST_FREE + place, inheritable=False) for place, number in enumerate(received)]
    for number, wanted in zip(kept, numbers, strict=True):
        os.dup2(number, wanted)
    first = 3
    for wanted in sorted(number for number in numbers if number > 2):
        if first < wanted:
            os.closerange(first, wanted)
        first = wanted + 1
    os.closerange(first, PAST_LAST)


def _run(command: list[str], environment: dict[str, str], folder: str) -> NoReturn:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    while True:
        try:
            _run_command(command)
            code = 0
        except _Replaced as replaced:
            command = replaced.command
            continue
        except SystemExit as error:
            code = _code_of(error)
        except BaseException as error:
            error.__traceback__ = _within_program(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
        break
    _end(code)


def _end(code: int) -> NoReturn:
    """Finish the program like an interpreter, except for freeing all modules, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


class _Replaced(BaseException):
    """Raised to run a command in place of the program: the guard of the files of a dry run starts one."""

    def __init__(self, path: str, command: list[str]) -> None:
        self.command = command


def _run_command(command: list[str]) -> None:
    words = _without_options(command[1:])
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.orig_argv = list(command)
    sys.path[:] = [*_folders_of_environment(), *_path]
    if words[0].endswith("/files/guard.py"):
        execv, os.execv = os.execv, _replace  # type: ignore[assignment]
        try:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        finally:
            os.execv = execv
    option = words[0] if words[0] in ("-c", "-m") else ""
    sys.argv = [option, *words[2:]] if option else words
    _run_sitecustomize()
    if option == "-c":
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif option == "-m":
        sys.path.insert(0, str(Path.cwd()))
        run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        run_module(words[1])
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        main.__file__ = words[0]
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", words[0])
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def _replace(path: str, command: list[str]) -> NoReturn:
    raise _Replaced(path, command)


def _without_options(words: list[str]) -> list[str]:
    while words[0] in ("-B", "-W"):
        if words[0] == "-B":
            sys.dont_write_bytecode = True
            words = words[1:]
        else:
            warnings._processoptions([words[1]])  # type: ignore[attr-defined]
            words = words[2:]
    if words[0].startswith("-") and words[0] not in ("-c", "-m"):
        raise ValueError(f"{words[0]}: Python has options here that only a new interpreter takes")
    return words


def _folders_of_environment() -> list[str]:
    return [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _run_sitecustomize() -> None:
    """Import `sitecustomize` like Python at its start, if a folder of PYTHONPATH has it."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _folders_of_environment())
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _within_program(traceback: types.TracebackType | None) -> types.TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


_path: list[str] = []  # Python's path, without the folders of PYTHONPATH and of the program


def _main() -> None:
    server = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    own = {str(Path(__file__).resolve().parent), *_folders_of_environment()}
    _path.extend(folder for folder in sys.path if folder not in own)
    sys.argv = [""]
    gc.collect()
    threads = len([*Path("/proc/self/task").iterdir()])
    assert threads == 1, f"{threads} threads run, which a fork would not have"
    _serve(server)


if __name__ == "__main__":
    _main()
