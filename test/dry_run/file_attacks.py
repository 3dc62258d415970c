"""Programs that try to change existing files: `python file_attacks.py NAME`, with and without a dry run.

Each runs in a folder that `make_files()` has filled. Its assertions also hold in an ordinary run.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import runpy
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import pytest

ATTACKS: dict[str, Callable[[], None]] = {}
WITH_TORCH: dict[str, Callable[[], None]] = {}

PYTHON = sys.executable


def attack(function: Callable[[], None]) -> Callable[[], None]:
    ATTACKS[function.__name__] = function
    return function


def attack_with_torch(function: Callable[[], None]) -> Callable[[], None]:
    WITH_TORCH[function.__name__] = function
    return function


def make_files(folder: Path) -> None:
    """Create the existing files: regular files, hard links, modules, scripts and databases."""
    for path, text in (
        ("checkpoint-1/weights", "weights"),
        ("checkpoint-1/nested/state", "state"),
        ("log", "line\n"),
        ("module_before.py", "VALUE = 1"),
        ("module_removed.py", ""),
        ("tool", "before"),
        ("raw", "raw"),
        ("tokenizer.json", "{}"),
        ("temporary/other", "of another program"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "tool").chmod(0o755)
    (folder / "log").chmod(0o600)
    (folder / "hardlink").hardlink_to(folder / "raw")
    (folder / "link").symlink_to("checkpoint-1")
    (folder / "link_to_file").symlink_to("raw")
    _make_databases(folder)


def _make_databases(folder: Path) -> None:
    for name, mode in (("base.db", "delete"), ("wal.db", "wal")):
        connection = sqlite3.connect(folder / name)
        connection.execute(f"pragma journal_mode={mode}")
        connection.execute("create table t(n)")
        connection.execute("insert into t values (1)")
        connection.commit()
        if mode == "wal":  # like after a killed program
            copies = [shutil.copy(folder / f"wal.db{end}", folder / f"copy{end}") for end in ("", "-wal")]
        connection.close()
    for copy, end in zip(copies, ("", "-wal"), strict=True):
        Path(copy).replace(folder / f"wal.db{end}")


def output(*command: str, **kwargs: object) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
    assert ended.returncode == 0, ended.stderr
    return str(ended.stdout.strip())


# ---- Metadata ----


@attack
def metadata_through_descriptors() -> None:
    descriptor = os.open("log", os.O_RDONLY)
    os.fchmod(descriptor, 0o640)
    os.utime(descriptor, (1, 2))
    os.chown(descriptor, os.geteuid(), os.getegid())
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o640
    assert os.stat("log").st_mtime == 2
    os.chmod(descriptor, 0o600)
    os.fchown(descriptor, os.geteuid(), os.getegid())
    assert os.read(descriptor, 4) == b"line"
    os.close(descriptor)
    folder = os.open("checkpoint-1", os.O_RDONLY)
    os.fchmod(folder, 0o700)
    os.utime(folder, (3, 4))
    assert os.stat("checkpoint-1").st_mtime == 4
    assert sorted(os.listdir(folder)) == ["nested", "weights"]
    with open("raw") as file:
        os.chmod(file.fileno(), 0o600)
        assert file.read() == "raw"


@attack
def extended_attributes() -> None:
    with open("log") as file:
        try:
            os.setxattr(file.fileno(), "user.test", b"1")
        except OSError:  # the file system has none
            return
        assert os.getxattr(file.fileno(), "user.test") == b"1"
        os.removexattr(file.fileno(), "user.test")
        os.setxattr("raw", "user.test", b"2")
        assert os.listxattr("raw") == ["user.test"]


@attack
def descriptors_opened_for_reading_are_not_truncated() -> None:
    descriptor = os.open("log", os.O_RDONLY)
    for truncate in (os.ftruncate, os.truncate):
        with pytest.raises(OSError, match="Invalid argument"):
            truncate(descriptor, 0)
    with open("log") as file, pytest.raises(io.UnsupportedOperation):
        file.truncate(0)
    os.close(os.open("raw", os.O_RDONLY | os.O_TRUNC))
    assert os.path.getsize("raw") == 0


@attack
def modes_stay() -> None:
    os.umask(0o022)
    for name, mode in (("log", 0o600), ("tool", 0o755)):
        with open(name, "w") as file:
            file.write("new")
        assert stat.S_IMODE(os.stat(name).st_mode) == mode
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        os.umask(mask)
        open(f"new{mask}", "w").close()
        assert stat.S_IMODE(os.stat(f"new{mask}").st_mode) == mode


# ---- Names ----


@attack
def atomic_saving() -> None:
    for folder, target in ((None, "log"), (".", "raw"), ("checkpoint-1", "checkpoint-1/weights")):
        descriptor, name = tempfile.mkstemp(dir=folder)
        os.write(descriptor, b"atomic")
        os.close(descriptor)
        os.replace(name, target)
        assert Path(target).read_text() == "atomic"
        assert not os.path.exists(name)


@attack
def moves_across_the_temporary_folder() -> None:
    folder = tempfile.mkdtemp()
    Path(folder, "file").write_text("text")
    os.mkdir(os.path.join(folder, "inner"))
    shutil.move(folder, "moved")
    assert sorted(os.listdir("moved")) == ["file", "inner"]
    away = os.path.join(tempfile.mkdtemp(), "away")
    shutil.move("checkpoint-1", away)
    assert not os.path.exists("checkpoint-1")
    assert Path(away, "nested", "state").read_text() == "state"
    shutil.rmtree(away)
    with pytest.raises(FileNotFoundError):
        os.stat("link/weights")


@attack
def temporary_folder_has_nothing_else() -> None:
    name = tempfile.mkdtemp()
    above = os.path.dirname(name)
    assert "written" not in os.listdir(above)
    assert "gone" not in os.listdir(os.path.dirname(above))
    os.environ["TMPDIR"] = os.path.abspath("temporary")
    tempfile.tempdir = None
    with tempfile.NamedTemporaryFile() as file:
        assert file.name.startswith(os.path.abspath("temporary"))
        assert sorted(os.listdir("temporary")) == sorted([os.path.basename(file.name), "other"])
    shutil.rmtree(tempfile.gettempdir())
    assert not os.path.exists("temporary")


@attack
def hard_links() -> None:
    with open("raw", "a") as file:
        file.write("+")
    assert Path("hardlink").read_text() == "raw+"
    assert os.path.samefile("raw", "hardlink")
    Path("hardlink").write_text("other")
    assert Path("raw").read_text() == "other"
    os.link("checkpoint-1/weights", "second")
    Path("second").write_text("both")
    assert Path("checkpoint-1/weights").read_text() == "both"


@attack
def readers_see_later_writes() -> None:
    with open("log") as reader:
        assert reader.read(1) == "l"
        with open("log", "a") as writer:
            writer.write("x" * 100_000)
        assert reader.read().endswith("x")


@attack
def trailing_slashes() -> None:
    for name in ("log/", "new/"):
        for change in (os.stat, os.unlink, os.listdir, lambda path: os.open(path, os.O_WRONLY | os.O_CREAT)):
            with pytest.raises(OSError, match="Errno"):
                change(name)
    os.mkdir("made/")
    os.rename("made/", "renamed/")
    os.rmdir("renamed/")
    assert sorted(os.listdir("link/")) == ["nested", "weights"]


# ---- Files that are not files ----


@attack
def names_of_descriptors() -> None:
    descriptor = os.open("log", os.O_RDONLY)
    name = f"/proc/self/fd/{descriptor}"
    assert os.readlink(name) == os.path.abspath("log")
    Path(name).write_text("by descriptor")
    assert Path("log").read_text() == "by descriptor"
    with open(f"/dev/fd/{descriptor}", "a") as file:
        file.write("+")
    assert Path("log").read_text() == "by descriptor+"
    os.chmod(name, 0o640)
    reading, writing = os.pipe()
    with open(f"/proc/self/fd/{writing}", "w") as file:
        file.write("x")
    assert os.read(reading, 1) == b"x"


@attack
def devices() -> None:
    with open("/dev/null", "w") as file:
        file.write("x")
    with open("/dev/zero", "rb") as file:
        assert file.read(2) == b"\0\0"
    with open("/dev/stdout", "w") as file:
        file.write("written to /dev/stdout\n")
    subprocess.run([PYTHON, "-c", "pass"], stdout=subprocess.DEVNULL, check=True)


@attack
def fifos_and_sockets() -> None:
    os.mkfifo("fifo")
    writer = threading.Thread(target=lambda: Path("fifo").write_text("through"))
    writer.start()
    assert Path("fifo").read_text() == "through"
    writer.join()
    os.rename("fifo", "renamed")
    assert stat.S_ISFIFO(os.stat("renamed").st_mode)
    listener, client = (socket.socket(socket.AF_UNIX) for _ in range(2))
    with listener, client:
        listener.bind("socket")
        listener.listen()
        client.connect("socket")
        client.send(b"x")
        with listener.accept()[0] as accepted:
            assert accepted.recv(1) == b"x"


@attack
def files_by_their_class() -> None:
    with io.FileIO("new", "w") as file:
        file.write(b"12")
        assert file.name == "new"
        assert isinstance(file, io.FileIO)
    with io.FileIO("log", "r+") as file:
        file.write(b"UP")
    with open("log", "rb", buffering=0) as file:
        assert isinstance(file, io.FileIO)
        assert file.read() == b"UPne\n"


@attack
def unnamed_files_and_links_that_are_not_followed() -> None:
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        with pytest.raises(OSError, match="symbolic links") as caught:
            os.open("link_to_file", flags | os.O_NOFOLLOW)
        assert caught.value.errno == errno.ELOOP
    descriptor = os.open("checkpoint-1", os.O_TMPFILE | os.O_RDWR)
    os.write(descriptor, b"unnamed")
    os.link(f"/proc/self/fd/{descriptor}", "named", src_dir_fd=0, follow_symlinks=True)
    assert Path("named").read_text() == "unnamed"


@attack
def locks() -> None:
    with open("log", "r+") as first, open("log") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(first, fcntl.LOCK_UN)
        fcntl.lockf(first, fcntl.LOCK_EX)


@attack
def shared_memory_of_processes() -> None:
    memory = shared_memory.SharedMemory(create=True, size=100)
    try:
        memory.buf[0] = 7
        other = shared_memory.SharedMemory(name=memory.name)
        assert other.buf[0] == 7
        other.close()
    finally:
        memory.close()
        memory.unlink()


# ---- Processes ----


@attack
def functions_are_sent_to_workers() -> None:
    for function in (
        open,
        io.open,
        io.FileIO,
        os.remove,
        os.unlink,
        os.rename,
        os.replace,
        os.stat,
        os.getcwd,
        os.execv,
    ):
        assert pickle.loads(pickle.dumps(function)) is function
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            names = [f"{method}{number}" for number in range(4)]
            pool.map(os.mkdir, names)
            pool.map(functools.partial(os.chmod, mode=0o700), names)
            assert all(map(os.path.isdir, names))
            pool.map(os.rmdir, names)
            assert not any(map(os.path.exists, names))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.map(os.remove, ["log"])
    assert not os.path.exists("log")


@attack
def parallel_appends_and_folders() -> None:
    code = "for i in range(100): open('log', 'a').write('line\\n')"
    children = [subprocess.Popen([PYTHON, "-c", code]) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    assert Path("log").read_text() == "line\n" * 401

    def make(number: int) -> None:
        folder = Path(f"checkpoint-1/a/b{number % 3}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).write_text("x")

    threads = [threading.Thread(target=make, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(names) for _, _, names in os.walk("checkpoint-1/a")) == 30


@attack
def written_scripts_are_run() -> None:
    os.makedirs("scripts/inner")
    Path("scripts/script.py").write_text("import os, sys; print(sys.argv[1:], __name__, os.path.exists('inner'))")
    assert output(PYTHON, "scripts/script.py", "x") == "['x'] __main__ False"
    assert output(PYTHON, "-u", "script.py", "x", "-c", cwd="scripts") == "['x', '-c'] __main__ True"
    assert output(PYTHON, "-I", "script.py", cwd="scripts") == "[] __main__ True"
    Path("tool").write_text("#!/bin/sh\necho written")
    assert output("./tool") == "written"
    Path("scripts/__main__.py").write_text("print('module')")
    assert output(PYTHON, "-m", "scripts") == "module"
    assert output("cat", "script.py", cwd="scripts").startswith("import os")


@attack
def children_with_environments_of_their_own() -> None:
    Path("log").write_text("written")
    code = "import sys; print(open('log').read(), sys.argv)"
    for options in (["-I"], ["-E"], ["-sE"], ["-S"], ["-X", "dev", "-I"], ["-W", "ignore", "-E"], []):
        assert output(PYTHON, *options, "-c", code, "x") == "written ['-c', 'x']"
    assert output(PYTHON, "-Ic", code) == "written ['-c']"
    for environment in ({}, {"PYTHONPATH": "/nowhere"}, {b"NAME": b"value"}):
        assert output(PYTHON, "-c", code, env=environment) == "written ['-c']"
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = "/nowhere"
    assert output(PYTHON, "-c", code) == "written ['-c']"
    os.environ.clear()
    assert output(PYTHON, "-c", code) == "written ['-c']"
    os.environ.update(before)
    write = "open('{}', 'w').write('x'); import os; os.remove('raw')"
    os.waitpid(os.posix_spawn(PYTHON, [PYTHON, "-c", write.format("spawned")], {}), 0)
    if (child := os.fork()) == 0:
        os.execve(PYTHON, [PYTHON, "-I", "-c", write.format("executed")], {})
    os.waitpid(child, 0)
    assert os.path.exists("spawned")
    assert os.path.exists("executed")
    assert not os.path.exists("raw")


@attack
def modules_are_overwritten_and_removed() -> None:
    sys.path.insert(0, os.getcwd())
    Path("module_before.py").write_text("VALUE = 2  # longer")
    Path("module_new.py").write_text("VALUE = 3")
    os.remove("module_removed.py")
    importlib.invalidate_caches()
    assert importlib.import_module("module_before").VALUE == 2
    assert importlib.import_module("module_new").VALUE == 3
    assert importlib.util.find_spec("module_removed") is None
    assert runpy.run_path("module_new.py")["VALUE"] == 3
    spec = importlib.util.spec_from_file_location("by_path", "module_new.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.VALUE == 3


# ---- Databases ----


def total(connection: sqlite3.Connection, table: str = "t") -> int:
    return int(connection.execute(f"select sum(n) from {table}").fetchone()[0])


@attack
def databases() -> None:
    connections = (sqlite3.connect, sqlite3.dbapi2.connect, sqlite3.Connection)
    for number, connect in enumerate(connections):
        connection = connect("base.db")
        assert type(connection) is sqlite3.Connection
        assert total(connection) == 1 + number
        with connection:
            connection.execute("insert into t values (1)")
        connection.close()
    for uri in ("file:base.db?mode=ro", f"file://{os.path.abspath('base.db')}?cache=private", "file:base.db"):
        assert total(sqlite3.connect(uri, uri=True)) == 4
    with sqlite3.connect("file:base.db?mode=rw", uri=True) as connection:
        connection.execute("delete from t")
    wal = sqlite3.connect("wal.db")
    assert total(wal) == 1
    with wal:
        wal.execute("insert into t values (2)")
    assert total(sqlite3.connect("wal.db")) == 3


@attack
def attached_databases() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("attach database 'base.db' as other")
    with connection:
        connection.execute("insert into other.t values (2)")
    for name, parameters in (("?", ("base.db",)), (":name", {"name": "base.db"})):
        connection = sqlite3.connect("new.db")
        connection.cursor().execute(f"ATTACH {name} AS other", parameters)
        assert total(connection, "other.t") == 3
    connection.executescript("attach 'third.db' as third; create table third.t(n); insert into third.t values (1);")
    assert total(sqlite3.connect("third.db")) == 1
    connection.execute("vacuum into 'copy.db'")
    assert os.path.exists("copy.db")


# ---- Libraries whose code in C, C++ or Rust opens files ----


@attack_with_torch
def files_of_torch() -> None:
    import torch

    module = torch.jit.script(torch.nn.Linear(2, 2))
    for save in (module.save, functools.partial(torch.jit.save, module)):
        save("raw")
        torch.jit.load("raw")
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(exported, "exported.pt2")
    torch.export.load("exported.pt2")
    torch.save(torch.ones(2), "checkpoint-1/weights")
    assert torch.load("checkpoint-1/weights", mmap=True).sum() == 2
    torch.from_file("tokenizer.json", shared=True, size=2, dtype=torch.uint8).fill_(7)
    assert Path("tokenizer.json").read_bytes() == b"\7\7"
    with torch.profiler.profile() as profile:
        torch.ones(2).sum()
    profile.export_chrome_trace("log")
    assert os.path.getsize("log") > 100


@attack_with_torch
def files_in_rust() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tokenizers = pytest.importorskip("tokenizers")
    import torch

    safetensors.save_file({"a": torch.ones(3)}, "checkpoint-1/weights")
    assert safetensors.load_file("checkpoint-1/weights")["a"].sum() == 3
    Path("corpus").write_text("hello hello hello help help")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.train(["corpus"], tokenizers.trainers.BpeTrainer(show_progress=False))
    tokenizer.save("tokenizer.json")
    tokenizers.Tokenizer.from_file("tokenizer.json")
    os.mkdir("vocabulary")
    saved = tokenizer.model.save("vocabulary")
    assert [os.path.relpath(path) for path in saved] == ["vocabulary/vocab.json", "vocabulary/merges.txt"]
    tokenizers.models.BPE.from_file(*saved)


@attack_with_torch
def arrays_and_libraries() -> None:
    import ctypes

    import numpy as np

    np.save("raw", np.ones(3))
    np.ones(3).tofile("log")
    assert np.fromfile("log").sum() == 3
    mapped = np.memmap("checkpoint-1/weights", dtype="u1", mode="r+")
    mapped[:] = 0
    mapped.flush()
    assert not any(Path("checkpoint-1/weights").read_bytes())
    compiler = shutil.which("cc")
    if compiler is not None:
        folder = tempfile.mkdtemp()
        Path(folder, "f.c").write_text("int f(void) { return 7; }")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", "f.so", "f.c"], cwd=folder, check=True)
        shutil.move(os.path.join(folder, "f.so"), "f.so")
        assert ctypes.CDLL("./f.so").f() == 7


if __name__ == "__main__":
    start = Path.cwd()
    for name in sys.argv[1:]:
        os.chdir(start / name)
        (ATTACKS | WITH_TORCH)[name]()
