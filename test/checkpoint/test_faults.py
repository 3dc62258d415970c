"""Files after writing was killed, interrupted, out of space, or blocked by other files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_programs import four_files, save_until_killed
from torch import nn

from torchext import CheckpointError
from torchext.checkpoint import contents as folders
from torchext.checkpoint import save_safetensors
from torchext.deferred_init import deferred_init

SIZES: dict[str, Any] = {"max_shard_size": "1MB", "max_memory": "4MiB"}


@pytest.fixture
def eager(tmp_path: Path) -> dict[str, bytes]:
    save_safetensors(four_files(), tmp_path / "eager", **SIZES)
    return files(tmp_path / "eager")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def test_names_of_complete_files_only_are_visible_after_sigkill(
    eager: dict[str, bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Run 100 times with --long."""
    folder = tmp_path / "out"
    for attempt in range(100 if request.config.getoption("--long") else 4):
        kill_while_saving(folder, tmp_path / f"ready{attempt}", 0.003 * attempt)
        found = {name: content for name, content in files(folder).items() if not name.startswith(".")}
        assert found.items() <= eager.items()
        if "model.safetensors.index.json" in found:  # killed after completion
            assert found == eager
            shutil.rmtree(folder)
        elif len(found) >= 3 or attempt % 10 == 9:
            save_safetensors(deferred_init(four_files), folder, resume=bool(found), **SIZES)
            assert files(folder) == eager
            shutil.rmtree(folder)
    shutil.rmtree(folder, ignore_errors=True)


def kill_while_saving(folder: Path, is_ready: Path, seconds: float) -> None:
    process = get_context("fork").Process(target=save_until_killed, args=(folder, is_ready))
    process.start()
    while not is_ready.exists():
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


class Stopped(BaseException):
    pass


def stop_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Make the `count`th file raise before it is completed."""
    left = [count]
    complete = folders.IncompleteFile.complete

    def failing(self: Any) -> None:
        if not self.path.name.startswith("."):
            left[0] -= 1
            if left[0] == 0:
                raise error
        complete(self)

    monkeypatch.setattr(folders.IncompleteFile, "complete", failing)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


# Made in the test: an error holds the frames that it has passed, with the fakes in them.
@pytest.mark.parametrize("make_error", [KeyboardInterrupt, no_space])
def test_interrupted_call_continues(
    make_error: Callable[[], BaseException], eager: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    error = make_error()
    with monkeypatch.context() as patch:
        stop_at(patch, 3, error)
        with pytest.raises(type(error)):
            save_safetensors(deferred_init(four_files), folder, **SIZES)
    left = files(folder)
    assert {name for name in left if not name.startswith(".")} == set(sorted(eager)[:2])
    assert not [name for name in left if name.endswith((".incomplete", ".lock"))]
    times = {name: (folder / name).stat().st_mtime_ns for name in sorted(eager)[:2]}
    with pytest.raises(FileExistsError, match=r"interrupted call with `resume=True`: model-00001"):
        save_safetensors(deferred_init(four_files), folder, **SIZES)
    save_safetensors(deferred_init(four_files), folder, resume=True, **SIZES)
    assert files(folder) == eager
    assert {name: (folder / name).stat().st_mtime_ns for name in times} == times


def other_values() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(450, 500) for _ in range(4)])


def other_row() -> nn.Module:
    model = four_files()
    with torch.no_grad():
        model[3].weight[7] = 0
    return model


@pytest.mark.parametrize("construct", [other_values, other_row])
def test_resuming_with_other_values_is_refused(
    construct: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            save_safetensors(deferred_init(four_files), folder, **SIZES)
    before = files(folder)
    with pytest.raises(FileExistsError, match="had other tensors, values or options"):
        save_safetensors(deferred_init(construct), folder, resume=True, **SIZES)
    assert files(folder) == before


def test_complete_checkpoint_is_not_written_again(eager: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="Remove them, choose another place, or resume"):
        save_safetensors(deferred_init(four_files), tmp_path / "eager", **SIZES)
    with pytest.raises(FileExistsError, match="because the call that wrote these files was not interrupted"):
        save_safetensors(deferred_init(four_files), tmp_path / "eager", resume=True, **SIZES)
    assert files(tmp_path / "eager") == eager


def test_full_disk_is_detected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10**6, 10**6, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"No space left on device: 3.44 MiB needed, 1000 B free") as caught:
        save_safetensors(deferred_init(four_files), tmp_path / "out", **SIZES)
    assert caught.value.errno == errno.ENOSPC
    assert files(tmp_path / "out") == {}


@pytest.mark.parametrize("path", ["/proc/torchext/out", "/proc/torchext/model.safetensors"])
def test_folder_that_cannot_be_made_is_an_error(path: str) -> None:
    with pytest.raises(OSError, match="/proc/torchext"):
        save_safetensors(deferred_init(nn.Linear, 2, 2), path)


def test_file_in_the_place_of_a_folder_and_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(NotADirectoryError, match="`path` is a folder, unless .*, but .* is a file"):
        save_safetensors(deferred_init(nn.Linear, 2, 2), tmp_path / "file")
    with pytest.raises(IsADirectoryError, match="`path` is a file, because .*, but .* is a folder"):
        save_safetensors(deferred_init(nn.Linear, 2, 2), tmp_path / "folder.safetensors")


def test_two_calls_into_one_folder_are_refused(eager: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    locked = folders.Folder(folder, "model")
    with (
        locked.locked(),
        pytest.raises(CheckpointError, match=rf"out is being written into by process {os.getpid()} on"),
    ):
        save_safetensors(deferred_init(four_files), folder, **SIZES)
    save_safetensors(deferred_init(four_files), folder, **SIZES)
    assert files(folder) == eager


def test_lock_of_a_killed_process_is_ignored(eager: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".model.lock").write_text("process 1 on nowhere")
    save_safetensors(deferred_init(four_files), folder, **SIZES)
    assert files(folder) == eager


def test_no_thread_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, content: memoryview, at: int) -> None:
        if at > 10_000:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folders.IncompleteFile, "write", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save_safetensors(deferred_init(four_files), tmp_path / "out.safetensors", max_memory="4MiB")
    assert [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name] == []
    assert files(tmp_path) == {}


def test_checkpoint_of_another_number_of_files_is_in_the_way(eager: dict[str, bytes], tmp_path: Path) -> None:
    for options in {}, {"max_shard_size": "2MB"}:
        with pytest.raises(FileExistsError, match="Files of another checkpoint exist. Remove them, .*model-00001-of"):
            save_safetensors(deferred_init(four_files), tmp_path / "eager", **options)
    with pytest.raises(FileExistsError, match="Files of another checkpoint exist"):
        save_safetensors(deferred_init(four_files), tmp_path / "eager" / "model.safetensors")
    assert files(tmp_path / "eager") == eager


def test_resuming_with_other_strides_or_damaged_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    square = torch.arange(90_000.0).view(300, 300)
    with monkeypatch.context() as patch:
        stop_at(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            save_safetensors({"a": square, "b": torch.ones(300, 300)}, tmp_path / "out", max_shard_size=400_000)
    with pytest.raises(FileExistsError, match="had other tensors, values or options"):
        save_safetensors(
            {"a": square.t(), "b": torch.ones(300, 300)}, tmp_path / "out", max_shard_size=400_000, resume=True
        )
    (tmp_path / "out" / "model-00001-of-00002.safetensors").write_bytes(b"cut")
    with pytest.raises(FileExistsError, match="these files have changed since. Remove them: model-00001-of-00002"):
        save_safetensors(
            {"a": square, "b": torch.ones(300, 300)}, tmp_path / "out", max_shard_size=400_000, resume=True
        )


def test_writer_has_ended_when_an_interrupted_call_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts both the flush of a file and the wait for it."""
    flushes = threading.Event()
    fsync = os.fsync

    def slowly(descriptor: int) -> None:
        flushes.set()
        time.sleep(0.5)
        fsync(descriptor)

    def interrupt() -> None:
        flushes.wait()
        for _ in range(2):
            time.sleep(0.05)
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "fsync", slowly)
        patch.setattr(folders.Folder, "_write_record", lambda self, record: None)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with interruptible(), pytest.raises(KeyboardInterrupt):
            save_and_wait(tmp_path / "out.safetensors", thread)
    assert [one.name for one in threading.enumerate() if "checkpoint" in one.name] == []
    assert not [name for name in files(tmp_path) if name.endswith((".incomplete", ".lock"))]


@contextmanager
def interruptible() -> Iterator[None]:
    """Restore SIGINT: shells let background programs ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def save_and_wait(path: Path, thread: threading.Thread) -> None:
    """Wait until all interrupts have arrived, so that none hits a later test."""
    try:
        save_safetensors(deferred_init(four_files), path, max_memory="4MiB")
    finally:
        while thread.is_alive():
            with suppress(KeyboardInterrupt):
                thread.join()


def test_removed_hidden_file_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(self: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "hidden")

    monkeypatch.setattr(folders.IncompleteFile, "complete", removed)
    with pytest.raises(FileNotFoundError, match="hidden"):
        save_safetensors(deferred_init(four_files), tmp_path / "out.safetensors", max_memory="4MiB")
    assert files(tmp_path) == {}


def test_single_file_is_written_next_to_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    save_safetensors(deferred_init(four_files), tmp_path / "a.safetensors")
    save_safetensors(deferred_init(four_files), tmp_path / "b.safetensors")
    assert sorted(files(tmp_path)) == ["a.safetensors", "b.safetensors", "notes.txt"]
    assert torch.equal(
        safetensors.torch.load_file(tmp_path / "a.safetensors")["3.bias"], four_files().state_dict()["3.bias"]
    )
