"""`torchext checkpoint`: the files that it writes, its messages, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from common import kept_threads

from torchext import commands
from torchext.checkpoint import contents as folders


def main(arguments: list[str]) -> int:
    """Run `torchext checkpoint` in this process."""
    return commands.main(["checkpoint", *arguments])


MODULE = """\
import torch
from torch import nn

made = nn.Linear(2, 2)
number = 5

def build(layers=2, width=64):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

def made_before():
    return made

def a_number():
    return 5

def failing(name):
    return _fail(name)

def _fail(name):
    raise {"type": TypeError, "key": KeyError, "runtime": RuntimeError, "import": ImportError}[name]("no weights")

def too_large():
    raise MemoryError("no memory")

def orthogonal():
    return nn.ParameterDict({"w": nn.init.orthogonal_(torch.empty(900, 900))})
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"models_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # its folder is compared
    return name


def test_writes_the_checkpoint_of_eager_construction(module: str, tmp_path: Path) -> None:
    arguments = [f"{module}:build", "--args", "3", "width=32", "--seed", "7", "--dtype", "bfloat16", "--quiet"]
    with kept_threads():
        assert main([*arguments, "--out", str(tmp_path / "out"), "--workers", "1", "--max-shard-size", "5KB"]) == 0
    torch.manual_seed(7)
    eager = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)]).bfloat16().state_dict()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        found.update(safetensors.torch.load_file(tmp_path / "out" / file))
    assert found.keys() == eager.keys()
    assert all(torch.equal(found[name], eager[name]) for name in eager)


@pytest.mark.ci
def test_process_shows_a_bar_and_ends(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchext", "checkpoint", f"{module}:build", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "saving: 100%" in done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_model_of_transformers_is_built_from_its_config(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=100
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "config")
    assert main(["--hf", str(tmp_path / "config"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    torch.manual_seed(0)
    eager = transformers.LlamaForCausalLM(config)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), eager.parameters(), strict=True))


def test_plan_reports_all_and_writes_nothing(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{module}:build", "--out", str(tmp_path / "out"), "--plan", "--max-shard-size", "20KB"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("file ")
    assert re.search(r"^model-00001-of-00002.safetensors +2 +16.42 KiB$", told, re.MULTILINE)
    for row in (
        "index      model.safetensors.index.json\n",
        "total ",
        "memory ",
        "computing ",
        "writing ",
        "predicted ",
    ):
        assert row in told
    assert not (tmp_path / "out").exists()


# The arguments, and the message.
MISUSES = {
    "nothing to construct": ([], "give the model to construct: either MODULE:FUNCTION or --hf FOLDER"),
    "both": (["x:y", "--hf", "z"], "give the model to construct: either MODULE:FUNCTION or --hf FOLDER"),
    "no function": (["{module}"], "expected MODULE:FUNCTION, as in"),
    "unknown module": (["no_such_module:build"], "the module 'no_such_module' does not exist"),
    "unknown function": (["{module}:nope"], "has no attribute 'nope'"),
    "not a function": (["{module}:number"], "expected a function or a class, got an object of type int"),
    "nothing deferred": (["{module}:made_before"], "'{module}:made_before' returned no deferred tensor"),
    "no module": (["{module}:a_number"], "expected a module or a state dict as the result, got an object of type int"),
    "unknown dtype": (
        ["{module}:build", "--dtype", "float12"],
        "expected a dtype of PyTorch such as bfloat16, got 'float12'. Did you mean float32",
    ),
    "no size": (["{module}:build", "--max-memory", "much"], "`--max-memory` expects a size such as"),
    "no workers": (["{module}:build", "--workers", "0"], "--workers: expected at least 1, got 0"),
    "an order of arguments": (
        ["{module}:build", "--args", "width=3", "4"],
        "the positional value '4' follows a NAME=VALUE",
    ),
    "a module with a typo": (["mat:build"], "the module 'mat' does not exist. Did you mean math"),
    "a function with a typo": (["{module}:biuld"], "has no attribute 'biuld'. Did you mean build?"),
    "a function after --args": (["--args", "3", "{module}:build"], "give MODULE:FUNCTION before --args"),
    "a file": (["{module}.py:build"], "expected the name of a module, got a file. Did you mean {module}:build?"),
    "an unknown name": (
        ["{module}:build", "--args", "widht=3"],
        "--args: got an unexpected keyword argument 'widht'. Did you mean width?",
    ),
    "too many values": (["{module}:build", "--args", "1", "2", "3"], "--args: too many positional arguments"),
    "no config": (["--hf", "/no/such/folder"], "--hf: '/no/such/folder' has no config.json"),
}


def code_of(arguments: list[str]) -> object:
    """Return the exit code: argparse exits itself if a flag has a wrong value."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_has_clear_errors(name: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = MISUSES[name]
    filled = [argument.replace("{module}", module) for argument in arguments]
    assert code_of([*filled, "--out", str(tmp_path / "out"), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert message.replace("{module}", module) in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_plan_needs_no_folder_and_writes_json(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main([f"{module}:build", "--plan", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["command"]) == (1, "checkpoint")
    assert found["plan"]["files"][0]["name"] == "model.safetensors"
    assert found["plan"]["bytes"] == found["plan"]["files"][0]["bytes"] > 4 * 2 * (64 * 64 + 64)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.ci
def test_output_of_the_program_does_not_mix_with_json(tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(
        "from torch import nn\ndef build():\n    print('hello')\n    return nn.Linear(2, 2)\n"
    )
    code = "import sys; sys.path[0] = '/'; from torchext.commands import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["checkpoint", "printing:build", "--plan", "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["plan"]["files"][0]["name"] == "model.safetensors"
    assert done.stderr == "hello\n"


def test_files_are_listed_as_json(module: str, tmp_path: Path) -> None:
    target = tmp_path / "written.json"
    assert main([f"{module}:build", "--out", str(tmp_path / "out"), "--quiet", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["folder"] == str(tmp_path / "out")
    written = tmp_path / "out" / "model.safetensors"
    assert found["files"] == [{"name": written.name, "bytes": written.stat().st_size}]


def test_program_that_does_not_fit_has_a_separate_exit_code(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--out", str(tmp_path / "out"), "--quiet"]
    assert main([f"{module}:orthogonal", *out, "--max-memory", "4MiB"]) == 3
    assert "Computing `w` of shape (900, 900) takes" in capsys.readouterr().err
    usage = folders.shutil._ntuple_diskusage(10, 10, 10)  # type: ignore[attr-defined]
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage)
    assert main([f"{module}:build", *out]) == 3
    assert f"{tmp_path / 'out'}: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "function", "message"),
    [
        ("10B", "build", "--max-memory: expected at least 4.00 MiB, got 10B"),
        ("4MiB", "orthogonal", "but --max-memory is 4.00 MiB. Increase it"),
        ("1GiB", "too_large", "no memory"),
    ],
)
def test_too_little_memory_has_a_separate_exit_code(
    size: str, function: str, message: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{module}:{function}", "--out", str(tmp_path / "out"), "--max-memory", size, "--quiet"]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["type", "key", "runtime", "import"])
def test_errors_of_the_constructor_have_its_traceback(
    kind: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{module}:failing", "--out", str(tmp_path / "out"), "--args", kind]) == 1
    lines = capsys.readouterr().err.splitlines()
    files = [line for line in lines if line.startswith("  File ")]
    assert [line.rpartition(" ")[2] for line in files] == ["failing", "_fail"]
    assert lines[0] == "Traceback (most recent call last):"
    assert "no weights" in lines[-2]
    assert lines[-1].endswith(": constructing the model failed")


def test_errors_of_the_module_have_its_traceback(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{module}_broken.py").write_text("raise KeyError('no settings')")
    assert main([f"{module}_broken:build", "--out", str(tmp_path / "out")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].endswith(f'{module}_broken.py", line 1, in <module>')
    assert lines[-2:] == ["KeyError: 'no settings'", f"torchext checkpoint: importing {module}_broken failed"]


@pytest.mark.parametrize("name", ["a.pt", "a.bin"])
def test_files_of_other_kinds_are_refused(
    name: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{module}:build", "--out", str(tmp_path / name)]) == 2
    assert "--out must be a folder, or a file that ends in `.safetensors`, got '/" in capsys.readouterr().err


def test_existing_files_are_an_error(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"{module}:build", "--out", str(tmp_path / "model.safetensors"), "--quiet"]
    assert main(arguments) == 0
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        f"torchext checkpoint: {tmp_path}: The files exist already. Remove them, choose another place, or "
        "resume an interrupted call with --resume: model.safetensors\n"
    )
