"""The package itself: importing, building, and its promises about names."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import bindings
import forked
import pytest
import torch
from setuptools import Distribution
from torch._C import _parse_dispatch_key as parse_key
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.utils import cpp_extension

import torchext
from torchext import _C, installation
from torchext.installation import how_to_install_again
from torchext.internals.patching import DIFFERENCES, TORCH_RELEASE
from torchext.version import NEWEST_TORCH

ROOT = Path(__file__).parents[2]

# setup.py's modules, which belong to no installed package.
sys.path.append(str(ROOT))
needs, output, command, facts = (
    importlib.import_module(f"build_tools.{name}") for name in ("needs", "output", "command", "facts")
)


# A release that torchext supports but was not built for.
OTHER_RELEASE = next((2, minor) for minor in (12, 13) if (2, minor) != TORCH_RELEASE)


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return its output."""
    result = forked.run([sys.executable, "-c", code], cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


class TestImport:
    def test_has_no_effect_on_programs_that_do_not_use_it(self) -> None:
        code = """
import json, torch
def state():
    names = ["__repr__", "__deepcopy__", "tolist", "numpy", "__array__"]
    return {
        "methods": [id(getattr(torch.Tensor, n)) for n in names] + [id(torch.nn.init._no_grad_trunc_normal_)],
        "included": str(torch._C._dispatch_tls_local_include_set()),
        "excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "keys": str(torch._C._dispatch_keys(torch.ones(1))),
        "rng": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
    }
before = state()
import torchext
print(json.dumps([before, state()]))
"""
        before, after = json.loads(run_python(code))
        assert after == before

    def test_program_without_fakes_takes_the_same_route(self) -> None:
        code = """
import torch, torchext
x = torch.ones(2, requires_grad=True)
(x * 2).sum().backward()
assert x.grad.tolist() == [2.0, 2.0]
print(torch._C._dispatch_keys(x))
"""
        assert "Fake" not in run_python(code)

    @pytest.mark.cases(2)
    @pytest.mark.parametrize("key", ["Fake", "DeferredInit", "TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper"])
    def test_keys_are_free_after_the_import(self, key: str) -> None:
        code = f"""
import torch, torchext
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: None, "{key}")
"""
        run_python(code)

    def test_key_of_deferred_init_that_is_taken_is_an_error_of_the_first_use(self) -> None:
        code = """
import torch
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: None, "DeferredInit")
from torchext import amp, deferred_init, fake, inference
try:
    deferred_init.deferred_init(torch.ones, 1)
except RuntimeError as error:
    print(error)
assert not torch._C._dispatch_tls_is_dispatch_key_included("DeferredInit")
with fake.fake_mode():
    assert fake.is_fake(torch.ones(1))
with amp.autocast("cpu"), inference.inference_mode():
    torch.ones(2, 2) @ torch.ones(2, 2)
"""
        message = run_python(code)
        assert "Deferred tensors need the dispatch key `DeferredInit`, which already has a fallback" in message
        assert "can have only one" in message

    def test_key_of_fakes_that_cannot_be_shared_is_an_error_of_the_first_use(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHEXT_BREAK_PIECE", "fallbacks")
        calls = ["fake.fake_mode().__enter__()", "fake.fake_like(torch.ones(1))", "deferred_init.deferred_init(int)"]
        code = f"""
import torch
library = torch.library.Library("_", "IMPL")
made = torch.ones(3)
library.fallback(lambda op, *args, **kwargs: made, "Fake")
from torchext import amp, deferred_init, fake, inference
for call in {calls!r}:
    try:
        eval(call)
    except RuntimeError as error:
        print(error)
    assert not torch._C._dispatch_tls_is_dispatch_key_included("Fake")
with amp.autocast("cpu"), inference.inference_mode():
    torch.ones(2, 2) @ torch.ones(2, 2)
with torch._C._IncludeDispatchKeyGuard(torch._C._parse_dispatch_key("Fake")):
    assert torch.ones(1).shape == (3,)
library._destroy()
with fake.fake_mode():
    assert fake.is_fake(torch.ones(1))
"""
        lines = run_python(code).splitlines()
        assert len(lines) == len(calls)
        sentence = "`Fake`, which already has a fallback, and torchext cannot share it"
        assert all(sentence in line and "`fallbacks`" in line for line in lines), lines

    def test_key_of_fakes_is_shared_with_a_fallback_in_python_until_that_is_given_up(self) -> None:
        code = """
import torch
library = torch.library.Library("_", "IMPL")
made = torch.ones(3)
library.fallback(lambda op, *args, **kwargs: made, "Fake")
from torchext.fake import fake_mode, is_fake
theirs = torch._C._parse_dispatch_key("Fake")
with torch._C._IncludeDispatchKeyGuard(theirs):
    print(torch.ones(1).numel())
with fake_mode():
    print(is_fake(torch.ones(1)))
with torch._C._IncludeDispatchKeyGuard(theirs):
    print(torch.ones(1).numel())
library._destroy()
with fake_mode():
    print(is_fake(torch.ones(1)))
"""
        assert run_python(code).split() == ["3", "True", "3", "True"]

    @pytest.mark.ci
    def test_fakes_work_with_another_owner_of_their_key(self) -> None:
        files = ["test/fake/test_foreign_fakes.py", "test/fake/test_known_values.py"]
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--tier", "all", "--foreign-fakes"]
        command = [sys.executable, "-m", "pytest", *options, *files]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert result.returncode == 0, result.stdout
        assert " passed" in result.stdout
        assert "skipped" not in result.stdout

    @pytest.mark.parametrize(
        "piece",
        [
            "open_tensor_impl",
            "virtual_table",
            "kernel_identity",
            "operator_entry",
            "error_texts",
            "keys_of_tests",
            "allocation_limit",
        ],
    )
    def test_component_for_another_pytorch_is_an_import_error(
        self, piece: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHEXT_BREAK_PIECE", piece)
        code = """
try:
    import torchext
except ImportError as error:
    print(error)
"""
        message = run_python(code)
        assert f"torchext cannot be imported: torchext needs `{piece}`, which relies on " in message
        assert f"self-test fails with this PyTorch (built for {_C.built_for_torch}" in message

    @pytest.mark.parametrize("accepts", ["0", "1"])
    def test_torch_newer_than_verified_is_an_import_error_unless_accepted(
        self, accepts: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHEXT_BREAK_PIECE", "release")
        monkeypatch.setenv("TORCHEXT_ACCEPT_UNVERIFIED_TORCH", accepts)
        code = """
try:
    import torchext
except ImportError as error:
    print(error)
"""
        message = run_python(code)
        if accepts == "1":
            assert message == ""
        else:
            assert message.startswith("torchext cannot be imported: torchext needs `open_tensor_impl`, which relies")
            assert "verified up to torch 2.15, and torchext is built for torch " in message
            assert "or set TORCHEXT_ACCEPT_UNVERIFIED_TORCH=1 if crashes and wrong results are acceptable" in message

    def test_newer_torch_that_is_accepted_is_built_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.99.0")
        assert "supports torch 2.11 to 2.15: install one of these" in installation.how_to_install_again()
        monkeypatch.setenv("TORCHEXT_ACCEPT_UNVERIFIED_TORCH", "1")
        assert installation.how_to_install_again().startswith("Build it again: pip install")

    def test_piece_that_only_marks_rely_on_is_an_error_of_their_first_use(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHEXT_BREAK_PIECE", "backend_meta")
        code = """
import torch
from torchext import amp, fake, inference
for call in ["amp.to_amp(torch.ones(1))", "inference.trace_origins()"]:
    try:
        eval(call)
    except RuntimeError as error:
        print(error)
with fake.fake_mode(), amp.autocast("cpu"), inference.inference_mode():
    torch.ones(2, 2) @ torch.ones(2, 2)
"""
        lines = run_python(code).splitlines()
        assert len(lines) == 2
        assert all("Marks of tensors need `backend_meta`" in line for line in lines), lines

    @pytest.mark.parametrize(
        ("key", "usage", "calls"),
        [
            (
                "TESTING_ONLY_GenericMode",
                "AmpTensors, self-cleaning regions and the origins of inference tensors need",
                [
                    "amp.to_amp(torch.ones(1))",
                    "amp.autocast('cpu', self_cleaning=True).__enter__()",
                    "inference.inference_mode(trace=True).__enter__()",
                    "inference.trace_origins()",
                    "amp.policy('aten::mm', 'cpu')",
                ],
            ),
            (
                "TESTING_ONLY_GenericWrapper",
                "Fake and deferred tensors need",
                [
                    "fake.fake_mode().__enter__()",
                    "fake.fake_like(torch.ones(1))",
                    "fake.fake_like(torch.nn.Linear(1, 1))",
                    "deferred_init.deferred_init(torch.ones, 1)",
                ],
            ),
        ],
    )
    def test_key_for_tests_that_is_taken_is_an_error_of_the_first_use(
        self, key: str, usage: str, calls: list[str]
    ) -> None:
        code = f"""
import torch
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: None, "{key}")
import torchext
from torchext import amp, deferred_init, fake, inference
for call in {calls!r}:
    try:
        eval(call)
        print("nothing raised by", call)
    except RuntimeError as error:
        print(error)
    assert str(torch._C._dispatch_tls_local_include_set()).count("TESTING") == 0
with amp.autocast("cpu"), inference.inference_mode():
    torch.ones(2, 2) @ torch.ones(2, 2)
library._destroy()
for call in {calls!r}[-1:]:
    eval(call)
"""
        lines = run_python(code).splitlines()
        assert len(lines) == len(calls)
        assert all(f"{usage} the dispatch key `{key}`, which already has a fallback" in line for line in lines), lines

    @pytest.mark.parametrize("patch", [".9", ".0a0+git5c1f", ".0+cu130"])
    def test_other_builds_of_the_same_release_of_torch_are_for_the_self_tests(self, patch: str) -> None:
        release = ".".join(map(str, TORCH_RELEASE))
        run_python(f"import torch; torch.__version__ = {release + patch!r}; import torchext")

    @pytest.mark.parametrize(
        ("release", "remedy"),
        [
            ((2, 0), "supports torch 2.11 to 2.15: install one of these"),
            (OTHER_RELEASE, "Build it again: pip install "),
        ],
        ids=["unsupported", "supported"],
    )
    def test_other_release_of_torch_is_an_import_error(self, release: tuple[int, int], remedy: str) -> None:
        found = f"{release[0]}.{release[1]}.1+cpu"
        code = f"""
import torch
torch.__version__ = {found!r}
try:
    import torchext
except ImportError as error:
    print(error)
"""
        message = run_python(code)
        assert f"was built for torch {_C.built_for_torch}, but torch {found} is installed. " in message
        assert remedy in message

    def test_library_of_another_build_is_an_import_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHEXT_BREAK_PIECE", "library")
        code = """
try:
    import torchext
except ImportError as error:
    print(error)
"""
        message = run_python(code)
        assert "lib/libtorchext.so was built for torch 2.0.1, and its bindings for torch " in message
        assert "Build it again: pip install " in message

    def test_library_that_cannot_be_loaded_is_named_with_its_torch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / f"_C{EXTENSION_SUFFIXES[0]}").touch()
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "torchextBuild.cmake").write_text('set(torchext_TORCH_VERSION "2.0.1+cpu")\n')
        monkeypatch.setattr(installation, "_ROOT", tmp_path)
        message = installation.why_it_cannot_be_loaded(ImportError("undefined symbol: _ZN3c10"))
        found = f"{tmp_path}/lib was built for torch 2.0.1+cpu, but torch {torch.__version__} is installed"
        assert f"{found} (undefined symbol: _ZN3c10)." in message

    def test_source_tree_without_a_build_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "setup.py").touch()
        monkeypatch.setattr(installation, "_ROOT", tmp_path / "torchext")
        message = installation.why_it_cannot_be_loaded(ImportError("cannot import name '_C'"))
        assert message.startswith(f"{tmp_path} is a source tree without a build for Python 3.")
        assert message.endswith(f"or build in place: cd {tmp_path} && python setup.py build_ext --inplace")


class BrokenTorch(importlib.abc.MetaPathFinder):
    """Finds torch, but its import fails."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "torch":
            raise self.error


def rows_of_readme(heading: str) -> list[list[str]]:
    """Return the cells of the table in csrc/FILES.md that begins with `heading`, without backticks."""
    text = (ROOT / "csrc" / "FILES.md").read_text()
    table = text[text.index(f"| {heading} |") :].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


class TestReleases:
    def test_differences_between_releases_are_in_the_readme(self) -> None:
        written = [[f"`{name}`", entry.releases, entry.what] for name, entry in DIFFERENCES.items()]
        assert rows_of_readme("name | releases") == written

    def test_pieces_are_in_the_readme_with_the_newest_release_that_is_supported(self) -> None:
        newest = 100 * NEWEST_TORCH[0] + NEWEST_TORCH[1]
        assert set(_C.verified_pieces.values()) == {newest}
        written = {re.findall(r"`(\w+)`", row[0])[-1]: row[-1] for row in rows_of_readme("piece")}
        assert written == {name: f"{release // 100}.{release % 100}" for name, release in _C.verified_pieces.items()}

    @pytest.mark.parametrize(
        ("name", "is_so"),
        [
            ("fake_above_python", lambda: int(parse_key("Fake")) > int(parse_key("Python"))),
            ("masks_of_truncated_normals", lambda: "mask.any()" in inspect.getsource(torch.nn.init)),
            ("pipelines_vote", lambda: hasattr(_PipelineSchedule, "_warmup_p2p")),
            ("pipelines_meet", lambda: hasattr(_PipelineSchedule, "_initialize_pipeline_distributed_state")),
        ],
    )
    def test_difference_applies_where_pytorch_shows_it(self, name: str, is_so: Callable[[], bool]) -> None:
        assert DIFFERENCES[name].applies == is_so()


class TestSetup:
    def run_setup(self, monkeypatch: pytest.MonkeyPatch, *commands: str) -> str:
        monkeypatch.setattr(sys, "argv", ["setup.py", *(commands or ["build_ext"])])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
        return str(ended.value)

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ("sdist", False),
            ("egg_info sdist --formats gztar --dist-dir /tmp/build", False),
            ("--quiet sdist -d build", False),
            ("--version", False),
            ("sdist bdist_wheel", True),
            ("--quiet build_ext --inplace", True),
            ("dist_info", True),
        ],
    )
    def test_only_commands_that_compile_nothing_do_without_torch(self, arguments: str, expected: bool) -> None:
        assert needs.need_torch(arguments.split()) == expected

    @pytest.mark.parametrize(
        "error",
        [ImportError("libcudart.so.13: cannot open"), ModuleNotFoundError("No module named 'sympy'", name="sympy")],
        ids=["library", "module"],
    )
    def test_error_of_a_torch_that_is_broken_is_quoted(
        self, error: ImportError, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.setattr(sys, "meta_path", [BrokenTorch(error), *sys.meta_path])
        message = self.run_setup(monkeypatch)
        assert f"importing it fails: {type(error).__name__}: {error}. Repair it" in message

    def test_setuptools_without_license_expressions_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(needs, "version", lambda name: "65.5.0")
        message = self.run_setup(monkeypatch, "dist_info")
        assert "setuptools 65.5.0 is installed" in message
        assert "pip install 'setuptools>=77,<82' ninja" in message

    def test_empty_name_of_a_compiler_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", " ")
        needs.check_compiler()
        assert "CXX" not in os.environ

    def test_error_without_torch_names_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        message = self.run_setup(monkeypatch)
        assert "pip install torch" in message
        assert "--no-build-isolation" in message
        assert "\n" not in message

    def test_error_without_a_compiler_names_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        monkeypatch.delenv("CXX", raising=False)
        message = self.run_setup(monkeypatch)
        assert "apt-get install g++" in message
        assert "\n" not in message

    def test_unsupported_torch_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.3.0")
        assert "torchext supports torch 2.11 to 2.15, but torch 2.3.0 is installed" in self.run_setup(monkeypatch)

    def test_newer_torch_is_refused_unless_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.16.0")
        message = self.run_setup(monkeypatch)
        assert (
            "supports torch 2.11 to 2.15, but torch 2.16.0 is installed: type `pip install 'torch==2.15.*'`" in message
        )
        assert message.endswith(", or accept that it may crash: TORCHEXT_ACCEPT_UNVERIFIED_TORCH=1")
        monkeypatch.setenv("TORCHEXT_ACCEPT_UNVERIFIED_TORCH", "1")
        assert needs.import_torch_extension_tools() is cpp_extension

    @pytest.mark.parametrize(
        ("where", "message"),
        [
            (("platform", "darwin"), "runs on Linux only, and this is darwin"),
            (("Py_GIL_DISABLED", 1), "relies on Python's global interpreter lock"),
        ],
        ids=["macOS", "free-threaded Python"],
    )
    def test_error_where_it_cannot_run(
        self, where: tuple[str, object], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name, value = where
        if name == "platform":
            monkeypatch.setattr(sys, name, value)
        else:
            monkeypatch.setitem(sysconfig.get_config_vars(), name, value)
        assert message in self.run_setup(monkeypatch)

    def test_metadata_of_binaries_admit_one_release_of_torch(self) -> None:
        requirements = runpy.run_path(str(ROOT / "setup.py"))["requirements"]
        assert requirements(is_compiled=True) == [f"torch=={'.'.join(map(str, TORCH_RELEASE))}.*"]
        assert requirements(is_compiled=False) == ["torch>=2.11,<2.16"]

    def test_wheels_for_several_releases_are_named_for_their_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        version = runpy.run_path(str(ROOT / "setup.py"))["version"]
        assert version() == torchext.__version__
        monkeypatch.setenv("TORCHEXT_LOCAL_VERSION", "1")
        assert version() == f"{torchext.__version__}+pt{'.'.join(map(str, TORCH_RELEASE))}"

    def test_warnings_are_errors_only_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flags = runpy.run_path(str(ROOT / "setup.py"))["compiler_flags"]
        monkeypatch.delenv("TORCHEXT_WERROR", raising=False)
        assert "-Werror" not in flags(cpp_extension)
        monkeypatch.setenv("TORCHEXT_WERROR", "1")
        assert "-Werror" in flags(cpp_extension)


class TestBuildCommand:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("[1/9] c++ -MMD -MF /b/x.o.d -I/i -c /b/fake_0.cpp -o /b/fake_0.o -O3 -std=c++20", "[1/9] fake_0.cpp"),
            ("[1/9] c++ -MF '/a b/x.o.d' -c '/a b/fake_0.cpp' -o '/a b/fake_0.o' -O3", "[1/9] fake_0.cpp"),
            ("gcc -fPIC -I/i -c /a b/fake_0.cpp -o /a b/fake_0.o -O3", "compiling fake_0.cpp"),
            (
                "g++ -shared -Wl,-O1 x.o -L/a b -lc10 -o build/lib/libtorchext.so -Wl,-z,defs",
                "linking build/lib/libtorchext.so",
            ),
            ("g++ -shared x.o -o /a b/_C.cpython-311.so", "linking /a b/_C.cpython-311.so"),
            ("csrc/core/fake/fake.cpp:3:1: error: no", "csrc/core/fake/fake.cpp:3:1: error: no"),
        ],
        ids=["ninja", "ninja, spaces", "no ninja, spaces", "link", "link, spaces", "error"],
    )
    def test_commands_are_shown_as_the_files_that_they_are_about(self, line: str, expected: str) -> None:
        assert output.shortened(f"{line}\n") == f"{expected}\n"

    def test_file_system_without_links_gets_a_copy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_links(*_: object) -> None:
            raise OSError("Operation not permitted")

        (tmp_path / "a").write_text("new")
        (tmp_path / "b").write_text("old")
        monkeypatch.setattr(os, "link", no_links)
        command.replace_by_link(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").read_text() == "new"

    def test_library_that_a_process_has_mapped_is_replaced_and_not_overwritten(self, tmp_path: Path) -> None:
        new, old = tmp_path / "built.so", tmp_path / "installed.so"
        new.write_bytes(b"new")
        old.write_bytes(b"old")
        with old.open("rb") as mapped:
            command.make_build_command(cpp_extension)(Distribution()).copy_file(str(new), str(old))
            assert mapped.read() == b"old"
        assert old.read_bytes() == b"new"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["built.so", "installed.so"]

    def test_objects_with_other_flags_have_another_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = set()
        for variable in ("TORCHEXT_WERROR", "TORCHEXT_COVERAGE", "TORCHEXT_SANITIZE", "TORCHEXT_QUICK"):
            monkeypatch.delenv(variable, raising=False)
        found.add(command.variant())
        for variable, value in (("WERROR", "1"), ("COVERAGE", "1"), ("SANITIZE", "thread"), ("QUICK", "1")):
            monkeypatch.setenv(f"TORCHEXT_{variable}", value)
            found.add(command.variant())
        assert len(found) == 5

    def test_precompiled_header_is_named_for_its_text_and_the_flags(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build = command.make_build_command(cpp_extension)(Distribution())
        monkeypatch.setattr(build, "compiler", SimpleNamespace(compiler_so=["c++"]), raising=False)
        header, names = tmp_path / "precompiled.h", []
        for text, flags in (("1", ["-O3"]), ("1", ["-O3"]), ("2", ["-O3"]), ("2", ["-O1"])):
            header.write_text(text)
            names.append(build._digest(header, SimpleNamespace(include_dirs=[], extra_compile_args=flags)))
        assert names[0] == names[1]
        assert len(set(names)) == 3

    def test_extensions_are_built_one_after_the_other_by_many_compilers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MAX_JOBS", "")
        monkeypatch.delenv("MAX_JOBS")
        build = command.make_build_command(cpp_extension)(Distribution())
        build.parallel = "3"
        build.finalize_options()
        assert build.parallel is None
        assert os.environ["MAX_JOBS"] == "3"

    def test_facts_name_the_version_without_a_local_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHEXT_LOCAL_VERSION", "1")
        assert f'set(torchext_VERSION "{torchext.__version__}")' in facts.build_facts("")


class TestInstallingAgain:
    """The message of the ImportError for another torch depends on the origin of this torchext."""

    def test_from_a_checkout(self) -> None:
        assert how_to_install_again().endswith(f"--no-build-isolation --force-reinstall --no-deps {ROOT}")

    @pytest.mark.parametrize(
        ("written", "sentence"),
        [
            ({"url": "file:///home/me/torchext"}, "Build it again: pip install .* --no-deps /home/me/torchext$"),
            (
                {"url": "file:///home/a%20b/tree", "subdirectory": "python"},
                "Build it again: pip install .* --no-deps '/home/a b/tree/python'$",
            ),
            (
                {"url": "https://host/torchext-0.1.0.tar.gz", "archive_info": {}},
                "Build it again: pip install .* https://host/torchext-0.1.0.tar.gz$",
            ),
            (
                {
                    "url": "https://host/a.git",
                    "vcs_info": {"vcs": "git", "commit_id": "5c1f", "requested_revision": "b"},
                },
                r"Build it again: pip install .* git\+https://host/a.git@5c1f$",
            ),
            (
                {"url": "ssh://host/a", "vcs_info": {"vcs": "hg", "commit_id": "5c1f"}, "subdirectory": "python"},
                r"Build it again: pip install .* 'hg\+ssh://host/a@5c1f#subdirectory=python'$",
            ),
            (
                {"url": "file:///w/torchext-0.1.0+pt2.11.whl"},
                r"Install the wheel torchext-\S+ from where you got /w/torchext-\S+whl, ",
            ),
            (None, r"Install the wheel torchext-0.1.0\+pt2.15 from where you got it, or build one from the source"),
        ],
        ids=["checkout", "spaces", "sdist", "git", "subdirectory", "wheel", "index"],
    )
    def test_from_the_argument_of_pip(
        self, written: dict[str, Any] | None, sentence: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Installed:
            def read_text(self, name: str) -> str | None:
                assert name == "direct_url.json"
                return None if written is None else json.dumps(written)

        monkeypatch.setattr(installation, "_ROOT", Path("/site-packages/torchext"))
        monkeypatch.setattr(installation, "distribution", lambda name: Installed())
        monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
        assert re.search(sentence, how_to_install_again())

    def test_of_a_torch_that_is_not_supported_names_those_that_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.16.0.dev20261101+cpu")
        assert "supports torch 2.11 to 2.15: install one of these" in how_to_install_again()


by_stub = pytest.mark.parametrize(
    ("stub", "module"), [("torchext/_C.pyi", _C), ("test/bindings/__init__.pyi", bindings)], ids=["_C", "bindings"]
)


class TestNames:
    @by_stub
    def test_stub_lists_the_names_of_the_module(self, stub: str, module: ModuleType) -> None:
        tree = ast.parse((ROOT / stub).read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        annotated = [n for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        variables = {ast.unparse(n.target) for n in annotated if ast.unparse(n.annotation) != "TypeAlias"}
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert functions.keys() | variables | classes == {name for name in dir(module) if not name.startswith("__")}

    @by_stub
    def test_stub_has_the_signatures_of_the_module(self, stub: str, module: ModuleType) -> None:
        tree = ast.parse((ROOT / stub).read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                doc = getattr(module, node.name).__doc__
                assert doc.startswith(f"{node.name}(")
                found = doc[len(node.name) + 1 : doc.index(") ->")]
                assert len(node.args.args) == (found.count(":")), f"{node.name}: {doc}"

    @pytest.mark.parametrize("name", sorted({*torchext.__all__} - {"__version__"}))
    def test_public_names_exist_and_are_documented(self, name: str) -> None:
        named = getattr(torchext, name)
        assert inspect.getdoc(named)
        for member in getattr(named, "__all__", []):
            module = named
            assert inspect.getdoc(getattr(module, member)), f"{member} has no docstring"

    def test_signatures_are_torchdistx_ones(self) -> None:
        from torchext import deferred_init, fake

        def parameters(function: object) -> list[str]:
            return list(inspect.signature(function).parameters)  # type: ignore[arg-type]

        assert parameters(fake.fake_mode) == ["gpu"]
        assert parameters(fake.is_fake) == ["tensor"]
        assert parameters(fake.meta_like) == ["fake"]
        assert parameters(deferred_init.materialize_tensor)[:1] == ["tensor"]
        assert parameters(deferred_init.materialize_module)[:3] == ["module", "buffers_only", "check_fn"]


def test_importing_again_leaves_real_tensors_alone() -> None:
    code = """
import sys, torch
from torchext.fake import fake_mode
with fake_mode():
    pass
for name in [name for name in sys.modules if name.split(".")[0] == "torchext" and name != "torchext._C"]:
    del sys.modules[name]
from torchext.fake import fake_mode
try:
    with fake_mode():
        pass
except RuntimeError:  # operators are registered once
    pass
print(repr(torch.ones(2)))
"""
    assert run_python(code) == "tensor([1., 1.])\n"
