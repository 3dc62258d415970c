"""Settings that affect kernels besides their arguments: csrc/libraries/support/kernel_settings.h."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import bindings
import pytest
import torch
from common import assert_same_tensor, build_both, in_forked_process
from torch import Tensor, nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "deferred_init.md"

Setter = Callable[[Any], object]
Reading = Callable[[Callable[[], list[float]]], Tensor]


class _Attribute:
    """Sets `owner.name`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, value: Any) -> None:
        setattr(self.owner, self.name, value)


def set_precision(backend: str, op: str) -> Setter:
    return lambda value: torch._C._set_fp32_precision_setter(backend, op, value)


def set_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=value)


def allow_fp16_reduction(value: bool) -> None:
    with suppress(RuntimeError):  # on processors without arithmetic in half precision
        torch._C._set_cpu_allow_fp16_reduced_precision_reduction(value)


MATMUL = torch.backends.cuda.matmul
ENGINES = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
OTHER_ENGINE = next((engine for engine in ENGINES if engine != torch.backends.quantized.engine), None)

# A function that changes each setting, and a new value. The setting's initial value is the other one.
SETTINGS: dict[str, tuple[Setter, Any, Any]] = {
    "threads": (torch.set_num_threads, 3, torch.get_num_threads()),
    "flush_denormal": (torch.set_flush_denormal, True, False),
    "deterministic_algorithms": (set_warn_only, True, False),
    "fill_uninitialized_memory": (_Attribute(torch.utils.deterministic, "fill_uninitialized_memory"), False, True),
    "mkldnn.enabled": (torch._C._set_mkldnn_enabled, False, True),
    "mkldnn.deterministic": (torch._C._set_mkldnn_deterministic, True, False),
    "mkldnn.conv.fp32_precision": (set_precision("mkldnn", "conv"), "bf16", "none"),
    "mkldnn.rnn.fp32_precision": (set_precision("mkldnn", "rnn"), "bf16", "none"),
    "mkldnn.matmul.fp32_precision": (set_precision("mkldnn", "matmul"), "bf16", "none"),
    "nnpack.enabled": (torch._C._set_nnpack_enabled, False, True),
    "quantized.engine": (
        _Attribute(torch.backends.quantized, "engine"),
        OTHER_ENGINE or torch.backends.quantized.engine,
        torch.backends.quantized.engine,
    ),
    "cpu.allow_fp16_reduction": (allow_fp16_reduction, True, False),
    "cudnn.enabled": (torch._C._set_cudnn_enabled, False, True),
    "cudnn.benchmark": (torch._C._set_cudnn_benchmark, True, False),
    "cudnn.benchmark_limit": (torch._C._cuda_set_cudnn_benchmark_limit, 3, 10)
    if hasattr(torch._C, "_cuda_set_cudnn_benchmark_limit")
    else (lambda _: None, None, None),
    "cudnn.deterministic": (torch._C._set_cudnn_deterministic, True, False),
    "cuda.fp16_reduction": (_Attribute(MATMUL, "allow_fp16_reduced_precision_reduction"), False, True),
    "cuda.bf16_reduction": (_Attribute(MATMUL, "allow_bf16_reduced_precision_reduction"), False, True),
    "cuda.fp16_accumulation": (_Attribute(MATMUL, "allow_fp16_accumulation"), True, False),
    "cuda.linalg_library": (lambda _: None, None, None),  # a build without CUDA has one
    "cuda.blas_library": (lambda _: None, None, None),
}

# Compared instead of restored.
COMPARED = ["cuda.conv.fp32_precision", "cuda.rnn.fp32_precision", "cuda.matmul.fp32_precision"]


@contextmanager
def changed(name: str) -> Iterator[None]:
    setter, value, before = SETTINGS[name]
    setter(value)
    try:
        yield
    finally:
        setter(before)


@pytest.fixture
def reading() -> Iterator[Reading]:
    """Record a custom operator whose Python kernel returns the result of a function at the time of its run."""
    functions: list[Callable[[], list[float]]] = []
    library = torch.library.Library("torchext_test_settings", "FRAGMENT")
    library.define("read(Tensor x) -> Tensor")
    library.impl(
        "read",
        lambda _: torch.tensor(functions[-1](), dtype=torch.float64, device="cpu"),
        "CompositeExplicitAutograd",
    )
    size = [0]
    library.impl("read", lambda _: torch.empty(size, dtype=torch.float64, device="meta"), "Meta")

    def record(function: Callable[[], list[float]]) -> Tensor:
        functions.append(function)
        size[0] = len(function())
        recorded: Tensor = deferred_init(lambda: torch.ops.torchext_test_settings.read(torch.ones(1, device="cpu")))
        assert is_deferred(recorded)
        return recorded

    yield record
    library._destroy()


def settings() -> list[float]:
    return [float(value) for value in bindings.kernel_settings().values()]


@pytest.mark.parametrize("name", SETTINGS)
def test_operators_see_the_setting_of_the_recording(name: str, reading: Reading) -> None:
    before = bindings.kernel_settings()
    with changed(name):
        wanted = bindings.kernel_settings()
        recorded = reading(settings)
    assert bindings.kernel_settings() == before
    assert [other for other in before if wanted[other] != before[other]] in ([name], [])
    assert materialize_tensor(recorded).tolist() == list(wanted.values())
    assert bindings.kernel_settings() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_replay_do_not_count(name: str, reading: Reading) -> None:
    wanted = settings()
    recorded = reading(settings)
    with changed(name):
        changed_settings = settings()
        assert materialize_tensor(recorded).tolist() == wanted
        assert settings() == changed_settings


def test_every_setting_has_a_test_and_a_row_in_the_documentation() -> None:
    names = list(bindings.kernel_settings())
    assert sorted(names) == sorted([*SETTINGS, *COMPARED])
    document = DOCUMENT.read_text()
    assert [name for name in names if f"`{name}`" not in document] == []


def test_precision_that_is_inherited_is_so_again() -> None:
    """Replay sets the precision for one operator. Afterwards it is inherited from the backend again."""
    with changed("mkldnn.matmul.fp32_precision"):
        recorded = deferred_init(lambda: torch.ones(4, 4) @ torch.ones(4, 4))
    materialize_tensor(recorded)
    set_precision("mkldnn", "all")("bf16")
    try:
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
    finally:
        set_precision("mkldnn", "all")("none")


# The setting of an eager computation, and a result that depends on it.
RESULTS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "a sum on several threads": ("threads", lambda: torch.randn(1 << 20).sum()),
    "random numbers that are denormal": ("flush_denormal", lambda: torch.randn(100_000) * 1e-39),
    "a product that is denormal": ("flush_denormal", lambda: torch.full((70_000,), 1e-30) * 1e-10),
    "a part of a product that is denormal": (
        "flush_denormal",
        lambda: (torch.empty(70_000).uniform_() * 1e-38)[5000:5100].clone(),
    ),
    "memory that was not written": ("deterministic_algorithms", lambda: torch.empty(10, 10)[2:4].clone()),
    "a product of matrices": ("mkldnn.matmul.fp32_precision", lambda: torch.randn(64, 64) @ torch.randn(64, 64)),
    "a convolution": ("mkldnn.enabled", lambda: nn.Conv2d(8, 8, 3)(torch.randn(2, 8, 16, 16)).detach()),
}


@pytest.mark.parametrize("case", RESULTS)
def test_values_are_those_of_the_setting_of_the_recording(case: str) -> None:
    name, build = RESULTS[case]
    with changed(name):
        eager, deferred = build_both(build)
    assert_same_tensor(materialize_tensor(deferred), eager)


@pytest.mark.parametrize("case", RESULTS)
def test_values_are_not_those_of_the_setting_of_the_replay(case: str) -> None:
    name, build = RESULTS[case]
    if name == "deterministic_algorithms":
        pytest.skip("what memory contains that was not written is undefined")
    eager, deferred = build_both(build)
    with changed(name):
        materialize_tensor(deferred)
    assert_same_tensor(deferred, eager)


def test_random_changes_of_all_settings_between_operators() -> None:
    names = [name for name, (_, value, _) in SETTINGS.items() if value is not None]
    generator = torch.Generator().manual_seed(0)
    picks = [names[i] for i in torch.randint(len(names), (60,), generator=generator).tolist()]

    def build() -> list[Tensor]:
        results = []
        x = torch.randn(200, 200)
        for first, second in pairwise(picks):
            with changed(first), changed(second) if first != second else ExitStack():
                results.append((x @ x.t()).sum() + (x * 1e-38).cumsum(0).sum())
        return results

    eager, deferred = build_both(build)
    before = bindings.kernel_settings()
    for found, expected in zip(reversed(deferred), reversed(eager), strict=True):
        assert_same_tensor(materialize_tensor(found), expected)
    assert bindings.kernel_settings() == before


def test_settings_are_restored_after_an_error() -> None:
    library = torch.library.Library("torchext_test_settings_error", "FRAGMENT")
    library.define("fail(Tensor x) -> Tensor")

    def fail(_: Tensor) -> Tensor:
        raise LookupError("mine")

    library.impl("fail", fail, "CompositeExplicitAutograd")
    library.impl("fail", torch.empty_like, "Meta")
    with changed("flush_denormal"), changed("threads"), changed("mkldnn.enabled"):
        recorded = deferred_init(lambda: torch.ops.torchext_test_settings_error.fail(torch.ones(2)))
    before = bindings.kernel_settings()
    with pytest.raises(LookupError, match="mine"):
        materialize_tensor(recorded)
    assert bindings.kernel_settings() == before
    library._destroy()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": lambda: torch.device("meta"),
    "grad mode": torch.no_grad,
    "default dtype": lambda: _default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
}


def modes() -> list[float]:
    return [
        float(torch.empty(1).is_meta),
        float(torch.is_grad_enabled()),
        float(torch.empty(1).itemsize),
        float(torch.is_autocast_enabled("cpu")),
    ]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MODES)
def test_kernels_in_python_see_the_modes_of_the_recording(name: str, reading: Reading) -> None:
    recorded_outside = reading(modes)
    outside = torch.ops.torchext_test_settings.read(torch.ones(1)).tolist()
    with MODES[name]():
        recorded_inside = reading(modes)
        inside = torch.ops.torchext_test_settings.read(torch.ones(1, device="cpu")).tolist()
        assert materialize_tensor(recorded_outside).tolist() == outside
    assert materialize_tensor(recorded_inside).tolist() == inside


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_transforms_around_a_replay_do_not_count(transform: Callable[..., Any]) -> None:
    eager, deferred = build_both(lambda: torch.randn(40) * torch.bernoulli(torch.full((40,), 0.5)))

    def materialize(x: Tensor) -> Tensor:
        materialize_tensor(deferred)
        return x.sum()

    transform(materialize)(torch.ones(3))
    assert_same_tensor(deferred, eager)


FORKED_EARLY = """
import multiprocessing
import os
import sys
import torch
torch.set_num_threads(2)
torch.ones(1 << 20).sqrt()  # makes a pool, whose threads the fork loses
if (worker := os.fork()):
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
import signal
signal.alarm(60)
import torchext.fake
multiprocessing.Queue().put(1)  # starts a thread
if (child := os.fork()):
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0)
"""


def test_process_that_was_forked_before_it_imported_torchext_may_fork() -> None:
    assert subprocess.run([sys.executable, "-c", FORKED_EARLY]).returncode == 0


def test_forked_process_restores_the_number_of_threads() -> None:
    numel = 1 << 16
    with changed("threads"):
        torch.manual_seed(0)
        eager = torch.randn(numel).sum()  # starts the threads
        torch.manual_seed(0)
        total = deferred_init(lambda: torch.randn(numel).sum())
        layer = deferred_init(nn.Linear, numel, 2)

    def materialize() -> None:
        torch.set_num_threads(1)
        materialize_module(layer)
        assert_same_tensor(materialize_tensor(total), eager)
        assert torch.get_num_threads() == 1

    assert in_forked_process(materialize) == 0
