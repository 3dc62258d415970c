"""The command `torchext`: its commands, shared flags, errors that name the nearest match, JSON and completion."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchext
from torchext import commands
from torchext.internals import terminal

ROOT = Path(__file__).parents[2]
COMMANDS = ("dry-run", "report", "checkpoint", "check-init", "env", "route", "completion")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        commands.main(arguments)
    return capsys.readouterr().err.splitlines()[-1]


def test_module_and_function_are_the_same_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "torchext", "--version"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert ended.stdout == (
        f"torchext {torchext.__version__} (built for torch {torchext._C.built_for_torch}; torch {torch.__version__}, "
        f"Python {'.'.join(map(str, sys.version_info[:3]))})\n"
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["completion", "bash"], ["dry-run", "--world-sise", "4"]),
        *([name, "--help"] for name in COMMANDS),
    ],
    ids=" ".join,
)
def test_flags_are_read_without_pytorch(arguments: list[str]) -> None:
    code = """
import sys, torchext_command
try:
    torchext_command.main()
finally:
    print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.stdout.endswith("False\n"), ended.stderr


@pytest.mark.parametrize("options", [[], ["-X", "dev", "-W", "ignore"]], ids=["", "with options"])
def test_module_reads_flags_without_pytorch(options: list[str]) -> None:
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, *options, "-m", "torchext", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    # The profile names the modules of a package, but not always the package.
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ended.stderr.splitlines()}
    assert "argparse" in imported
    assert "torch" not in imported


@pytest.mark.ci
def test_command_imports_what_an_expression_of_the_user_needs() -> None:
    command = [sys.executable, "-m", "torchext", "route", "aten::add.Tensor", "torch.ones(2)", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "add" in ended.stdout


def test_parsers_are_those_of_all_commands() -> None:
    parsers = commands.parsers()
    assert list(parsers) == ["torchext", *(f"torchext {name}" for name in COMMANDS)]
    assert all(parser.prog == name for name, parser in parsers.items())
    assert all(parser.description for parser in parsers.values())


@pytest.mark.parametrize("name", COMMANDS[:-1])
def test_commands_share_flags(name: str) -> None:
    assert {"--json", "--quiet", "--verbose", "--version"} <= commands.parsers()[
        f"torchext {name}"
    ]._option_string_actions.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dryrun"], "got 'dryrun'. Did you mean dry-run?"),
        (["--verson"], "the following arguments are required: COMMAND"),
        (["dry-run", "--world-sise", "4", "--", "x.py"], "--world-sise. Did you mean --world-size?"),
        (["checkpoint", "m:f", "--max-memry=1GB"], "--max-memry=1GB. Did you mean --max-memory?"),
        (["checkpoint", "m:f", "cpu"], "torchext checkpoint: error: unrecognized arguments: cpu"),
        (["env", "--json", "no/such/folder/env.json"], "the folder 'no/such/folder' does not exist"),
        (["route", "aten::mm", "--shape", "a"], "argument --shape: expected sizes such as 2,4, got 'a'"),
        (["env", "--json", "."], "expected a file, got the folder '.'"),
        (["completion", "zhs"], "got 'zhs'. Did you mean zsh?"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(arguments, capsys)


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchext.commands.env.describe_environment", interrupt)
    assert commands.main(["env"]) == 130
    assert capsys.readouterr().err == "\ntorchext: interrupted\n"


def test_closed_pipe_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert commands.main(["env"]) == 141


@pytest.mark.ci
@pytest.mark.parametrize(
    "arguments",
    [
        ["dry-run", "--quiet", "--", "-m", "keyword"],
        ["env"],
        ["route", "aten::add.Tensor"],
        ["checkpoint", "torch.nn:Linear", "--args", "2", "2", "--plan"],
    ],
)
def test_closed_pipe_ends_the_command_without_traceback(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "torchext", *arguments]
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_colors_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.colored("fits", "green", Terminal()) == "\x1b[32mfits\x1b[0m"
    assert terminal.colored("fits", "green", io.StringIO()) == "fits"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.colored("fits", "green", Terminal()) == "fits"


class TestEnv:
    def test_report_has_what_a_bug_report_needs(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.main(["env"]) == 0
        out = capsys.readouterr().out
        for line in (
            "versions:",
            f"  torch: {torch.__version__}",
            "dispatch keys:",
            "self tests:",
            "installed patches:",
        ):
            assert f"{line}\n" in out

    def test_json_has_the_same(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHEXT_ACCEPT_UNVERIFIED_TORCH", "1")
        assert commands.main(["env", "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["schema"], found["command"]) == (1, "env")
        assert found["versions"]["torchext"] == torchext.__version__
        assert found["build"]["torch_version"] == torch.__version__
        assert found["variables"]["TORCHEXT_ACCEPT_UNVERIFIED_TORCH"] == "1"
        assert found["dispatch_keys"].keys() == {"Fake", "DeferredInit", "TESTING_ONLY_GenericMode"}

    def test_failed_self_test_is_reported(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHEXT_BREAK_PIECE", "backend_meta")
        assert commands.main(["env", "--json", "-"]) == 0
        tests = json.loads(capsys.readouterr().out)["self_tests"]
        assert [name for name, test in tests.items() if not test["passed"]] == ["backend_meta"]
        assert len(tests) == 9

    @pytest.mark.ci
    def test_keys_of_a_fresh_process_belong_to_torchext(self) -> None:
        ended = subprocess.run(
            [sys.executable, "-m", "torchext", "env", "--json", "-"], capture_output=True, text=True, check=True
        )
        assert set(json.loads(ended.stdout)["dispatch_keys"].values()) == {"torchext"}


class TestRoute:
    def test_is_that_of_the_function(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.main(["route", "aten::add_.Tensor", "torch.ones(2)", "1"]) == 0
        assert capsys.readouterr().out == f"{torchext.inspect.route('aten::add_.Tensor', torch.ones(2), 1)}\n"

    @pytest.mark.parametrize(
        ("arguments", "keys"),
        [
            (["aten::add.Tensor"], ["AutogradCPU", "CPU"]),
            (["aten::mm", "--shape", "3,3", "--requires-grad"], ["AutogradCPU", "CPU"]),
            (["aten::sum.dim_IntList", "torch.ones(2, 3)", "dim=[0]"], ["AutogradCPU", "CPU"]),
            (["aten::add.Tensor", "--inference-mode"], ["CPU"]),
            (["aten::add.Tensor", "--fake", "--device", "cuda"], ["AutogradCUDA", "Fake", "Meta"]),
        ],
        ids=lambda value: " ".join(value),
    )
    def test_example_tensors_are_filled_in(
        self, arguments: list[str], keys: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert commands.main(["route", *arguments, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        # Calls of fakes with lazy bits, in earlier tests, register more kernels there: `prepareForBits()`.
        ignored = "TESTING_ONLY_GenericWrapper"
        assert [step["key"] for step in found["steps"] if step["turn"] != "skipped" and step["key"] != ignored] == keys

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["aten::ad.Tensor"], "no operator `aten::ad.Tensor`"),
            (["aten::ad.Tensor"], "Did you mean aten::add.Tensor"),
            (["add"], "the operator 'add' has no namespace. Did you mean aten::add?\n"),
            (["add.Tensr"], "the operator 'add.Tensr' has no namespace. Did you mean aten::add.Tensor?\n"),
            (["aten::add.Tensor", "torch.one(2)"], "'torch.one(2)' cannot be evaluated: AttributeError"),
            (["aten::view"], "the argument `size` is missing: aten::view(Tensor(a) self, SymInt[] size)"),
        ],
    )
    def test_wrong_arguments_are_one_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert commands.main(["route", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the call works")
    def test_missing_cuda_hints_at_fake_devices(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert commands.main(["route", "aten::mm", "--device", "cuda"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("torchext route: --device cuda: ")
        assert err.endswith(". Add --fake to use fake CUDA devices.\n")


@pytest.mark.parametrize(
    ("words", "completed"),
    [(["dry"], {"dry-run"}), (["dry-run", "--world"], {"--world-size"}), (["dry-run", "--", "--wor"], set())],
    ids=lambda value: " ".join(value),
)
def test_bash_completes_commands_and_flags(words: list[str], completed: set[str], tmp_path: Path) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "torchext", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    line = " ".join(f"'{word}'" for word in ["torchext", *words])
    code = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _torchext; echo "${{COMPREPLY[@]}}"'
    ended = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert set(ended.stdout.split()) == completed
