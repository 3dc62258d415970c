"""The files of a dry run: the program finds its own changes, and no existing file changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dry_run import file_attacks

from torchext.dry_run.files import GUARD, Overlay, changes_in, child_environment
from torchext.dry_run.files.guard import can_guard

PROGRAMS = Path(__file__).with_name("file_programs.py")
ATTACKS = Path(file_attacks.__file__)

pytestmark = pytest.mark.skipif(not can_guard(), reason="the system has no Landlock")


def make_files(folder: Path) -> None:
    """Create the existing files: files, nested folders, links to a folder, to a file above and to nothing."""
    (folder / "d/e").mkdir(parents=True)
    for name in ("a", "b", "d/a", "d/e/a"):
        (folder / name).write_text(f"before in {name}")
    (folder / "link").symlink_to("d")
    (folder / "d/up").symlink_to("../a")
    (folder / "loop").symlink_to("loop")


def digest_of(folder: Path) -> str:
    """Return a digest of all files, links, modes and times."""
    digest = hashlib.sha256()
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        metadata = status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_mtime_ns, status.st_ctime_ns
        digest.update(f"{path.relative_to(folder)} {metadata} {content!r}\n".encode())
    return digest.hexdigest()


def run_apart(scratch: Path, *command: str, cwd: Path, is_guarded: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command whose files are kept in `scratch`, like the command line does."""
    overlay = Overlay(str(scratch))
    environment = child_environment(overlay, {**os.environ, "TMPDIR": overlay.temporary})
    return subprocess.run(
        [*([sys.executable, GUARD, str(scratch)] if is_guarded else []), *command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=cwd,
    )


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    make_files(folder)
    return folder


def python(scratch: Path, work: Path, program: str) -> str:
    """Return the output of a program that runs in `work`, with its files in `scratch`."""
    before = digest_of(work)
    ended = run_apart(scratch, sys.executable, "-c", program, cwd=work)
    assert ended.returncode == 0, ended.stderr
    assert digest_of(work) == before
    return ended.stdout.strip()


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_find_their_files_and_change_none(tmp_path: Path, scratch: Path, seed: int) -> None:
    count = 100
    real, apart = tmp_path / "real", tmp_path / "apart"
    for folder in (real, apart):
        for number in range(count):
            make_files(folder / str(number))
    before = digest_of(apart)
    arguments = [sys.executable, str(PROGRAMS), "PLACE", str(seed), str(count)]
    wanted = subprocess.run(
        [real if part == "PLACE" else part for part in arguments], capture_output=True, text=True, check=True
    )
    found = run_apart(scratch, *(str(apart) if part == "PLACE" else part for part in arguments), cwd=tmp_path)
    assert found.stderr == ""
    programs = zip(found.stdout.split("program "), wanted.stdout.split("program "), strict=True)
    for one, other in programs:
        assert one.replace(str(apart), "") == other.replace(str(real), "")
    assert digest_of(apart) == before


# It starts processes, which begin with the state that the others have left.
ALONE = "functions_are_sent_to_workers"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(" ".join(name for name in file_attacks.ATTACKS if name != ALONE), id="in one process"),
        *[
            pytest.param(name, marks=pytest.mark.ci)
            for name in (*file_attacks.ATTACKS, " ".join(file_attacks.WITH_TORCH))
        ],
    ],
)
def test_attacks_find_their_files_and_change_none(tmp_path: Path, scratch: Path, names: str) -> None:
    real, apart = tmp_path / "real", tmp_path / "apart"
    for name in names.split():
        for folder in (real, apart):
            file_attacks.make_files(folder / name)
    before = digest_of(apart)
    command = [sys.executable, str(ATTACKS), *names.split()]
    wanted = subprocess.run(command, capture_output=True, text=True, check=False, cwd=real)
    assert wanted.returncode == 0, wanted.stderr
    found = run_apart(scratch, *command, cwd=apart)
    assert found.returncode == 0, found.stderr
    assert found.stdout == wanted.stdout
    assert digest_of(apart) == before


UNGUARDED = (
    "metadata_through_descriptors",
    "atomic_saving",
    "moves_across_the_temporary_folder",
    "names_of_descriptors",
    "attached_databases",
    "children_with_environments_of_their_own",
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", UNGUARDED)
def test_attacks_change_nothing_without_guard_either(tmp_path: Path, scratch: Path, name: str) -> None:
    work = tmp_path / "work"
    file_attacks.make_files(work / name)
    before = digest_of(work)
    ended = run_apart(scratch, sys.executable, str(ATTACKS), name, cwd=work, is_guarded=False)
    assert ended.returncode == 0, ended.stderr
    assert digest_of(work) == before


def test_other_programs_cannot_write(scratch: Path, work: Path) -> None:
    program = """
import subprocess
for command in ("rm -rf a d", "echo new > a", "mv a other", "mkdir made", "ln -s a made"):
    print(subprocess.run(command, shell=True, capture_output=True).returncode != 0)
print(subprocess.run("echo new > $TMPDIR/file && cat $TMPDIR/file", shell=True, capture_output=True).stdout)
"""
    assert python(scratch, work, program).split() == ["True"] * 5 + ["b'new\\n'"]


def test_other_processes_of_python_find_the_files(scratch: Path, work: Path) -> None:
    program = """
import multiprocessing, subprocess, sys
open("a", "w").write("written by the first")
print(subprocess.run([sys.executable, "-c", "print(open('a').read())"], capture_output=True, text=True).stdout)
subprocess.run([sys.executable, "-c", "import os; os.remove('b'); open('c', 'w').write('by the second')"], check=True)
import os
print(os.path.exists("b"), open("c").read())
def write(): open("forked", "w").write("by a fork")
process = multiprocessing.get_context("fork").Process(target=write)
process.start(); process.join()
print(open("forked").read())
"""
    assert python(scratch, work, program).splitlines() == [
        "written by the first",
        "",
        "False by the second",
        "by a fork",
    ]


def test_databases_are_written_apart(scratch: Path, work: Path) -> None:
    create = "import sqlite3; c = sqlite3.connect('base.db'); c.execute('create table t (n)'); c.commit()"
    subprocess.run([sys.executable, "-c", create], check=True, cwd=work)
    program = """
import sqlite3
for name in ("base.db", "new.db"):
    with sqlite3.connect(name) as c:
        c.execute("create table if not exists t (n)")
        c.execute("insert into t values (7)")
    print(sqlite3.connect(name).execute("select n from t").fetchall())
"""
    assert python(scratch, work, program).splitlines() == ["[(7,)]", "[(7,)]"]


def test_modules_that_the_program_writes_are_imported(scratch: Path, work: Path) -> None:
    program = """
import os, sys
os.makedirs("package")
open("package/__init__.py", "w").write("from .part import NUMBER")
open("package/part.py", "w").write("NUMBER = 7")
sys.path.insert(0, os.getcwd())
import package
print(package.NUMBER)
"""
    assert python(scratch, work, program) == "7"


def test_temporary_files_are_removed_as_before(scratch: Path, work: Path) -> None:
    program = """
import os, tempfile
for folder in (None, "d"):
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"x")
        print(os.path.exists(file.name))
    print(os.path.exists(file.name))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        open(os.path.join(place, "file"), "w").close()
    print(os.path.exists(place))
"""
    assert python(scratch, work, program).split() == ["True", "False", "False"] * 2


def test_libraries_of_python_that_keep_functions_write_apart(scratch: Path, work: Path) -> None:
    program = """
import bz2, gzip, json, logging, lzma, tarfile, zipfile
for module in (bz2, gzip, lzma):
    with module.open(f"{module.__name__}.out", "wt") as file:
        file.write("packed")
    print(module.open(f"{module.__name__}.out", "rt").read())
with zipfile.ZipFile("out.zip", "w") as file:
    file.write("a")
print(zipfile.ZipFile("out.zip").namelist())
with tarfile.open("out.tar.gz", "w:gz") as file:
    file.add("d")
print(sorted(tarfile.open("out.tar.gz").getnames()))
logging.basicConfig(filename="out.log")
logging.warning("logged")
print(open("out.log").read().strip())
"""
    assert python(scratch, work, program).splitlines() == [
        *["packed"] * 3,
        "['a']",
        "['d', 'd/a', 'd/e', 'd/e/a', 'd/up']",
        "WARNING:root:logged",
    ]


def test_changes_are_reported(scratch: Path, work: Path) -> None:
    program = """
import os, shutil
open("new", "w").write("12345")
open("a", "a").write("6")
os.remove("b")
shutil.rmtree("d/e")
open("gone", "w").close()
os.remove("gone")
"""
    python(scratch, work, program)
    changes = [(os.path.relpath(path, work), what, nbytes) for path, what, nbytes in changes_in(Overlay(str(scratch)))]
    assert changes == [
        ("a", "overwritten", 12),
        ("b", "removed", 0),
        ("d/e", "removed", 0),
        ("d/e/a", "removed", 0),
        ("new", "written", 5),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_forbidden_writes_are_errors(scratch: Path, work: Path) -> None:
    (work / "a").chmod(0o400)
    assert python(scratch, work, "try: open('a', 'w')\nexcept PermissionError as e: print(e.filename)") == "a"
