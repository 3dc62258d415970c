"""Actions that change global state or run on another thread, and values that depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fuzz.machine import Machine
    from fuzz.vocabulary import Action

__all__ = ["ACTIONS", "FACTORIES", "restored_settings"]

DEFAULT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# More than the 32,768 elements from which on kernels use several threads, in sizes with few factors of two.
LARGE_SHAPES = ((33, 33, 33), (181, 183), (32771,), (2, 16411), (65536,))


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore the settings that the actions below change."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.set_float32_matmul_precision(precision)


def on_thread(call: Callable[[], Tensor | None]) -> Tensor | None:
    """Return or raise the result of `call` on a new thread."""
    results: list[Tensor | None] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            with torch.no_grad():
                results.append(call())
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def fill_memory(machine: Machine, a: Tensor, b: Tensor, n: int) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = n % 2 == 0


FACTORIES: dict[str, Callable[[tuple[int, ...], int, int], Tensor]] = {
    "large": lambda shape, n, m: torch.randn(LARGE_SHAPES[n % len(LARGE_SHAPES)]),
    "denormal": lambda shape, n, m: torch.full(shape, 1e-39 * (1 + n % 5), dtype=torch.float32),
    "default_dtype": lambda shape, n, m: torch.randn(shape),
}

ACTIONS: dict[str, Action] = {
    "flush_denormal": lambda m, a, b, n: torch.set_flush_denormal(n % 2 == 0) and None,
    "num_threads": lambda m, a, b, n: torch.set_num_threads(1 + n % 2),
    "set_default_dtype": lambda m, a, b, n: torch.set_default_dtype(DEFAULT_DTYPES[n % len(DEFAULT_DTYPES)]),
    "deterministic": lambda m, a, b, n: torch.use_deterministic_algorithms(n % 2 == 0, warn_only=n % 3 == 0),
    "fill_memory": fill_memory,
    "matmul_precision": lambda m, a, b, n: torch.set_float32_matmul_precision("medium" if n % 2 else "highest"),
    "scale_down": lambda m, a, b, n: a * 1e-20,
    "sum_of_large": lambda m, a, b, n: torch.randn(LARGE_SHAPES[n % len(LARGE_SHAPES)]).sum(),
    "compute_on_thread": lambda m, a, b, n: on_thread(lambda: (a * 2).sub_(n % 3)),
    "write_on_thread": lambda m, a, b, n: on_thread(lambda: a.add_(1)) and None,
    "read_on_thread": lambda m, a, b, n: on_thread(lambda: a.new_tensor(a.sum().item())),
    "fill_on_thread": lambda m, a, b, n: on_thread(lambda: a.normal_() if a.numel() else None),
}
