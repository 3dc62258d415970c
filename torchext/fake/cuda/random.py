"""Random number generators of fake CUDA devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ... import _C
from .answers import while_devices_exist
from .devices import index_of

__all__ = ["RANDOM"]


def _generator(device: Any = "cuda") -> torch.Generator:
    return _C.default_fake_cuda_generator(index_of(device))


def _generators() -> list[torch.Generator]:
    return [_generator(i) for i in range(_C.fake_cuda_devices())]


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    if _C.is_fake(new_state):
        raise RuntimeError(
            "Cannot set the state of a generator from a fake tensor, which has no values. Create the state outside "
            "of fake_mode()."
        )
    _generator(device).set_state(new_state)


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for i, state in enumerate(new_states):
        _set_rng_state(state, i)


def _manual_seed_all(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(int(seed))


def _seed_all() -> None:
    seed = None
    for generator in _generators():
        seed = generator.seed() if seed is None else generator.manual_seed(seed).initial_seed()


RANDOM: dict[str, Callable[..., Any]] = {
    "_get_generator": _generator,
    "get_rng_state": lambda device="cuda": _generator(device).get_state(),
    "get_rng_state_all": lambda: [generator.get_state() for generator in _generators()],
    "initial_seed": lambda: _generator().initial_seed(),
    "manual_seed": lambda seed: _generator().manual_seed(int(seed)) and None,
    "manual_seed_all": _manual_seed_all,
    "seed": lambda: _generator().seed() and None,
    "seed_all": _seed_all,
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": _set_rng_state_all,
}


class _DefaultGenerators(Sequence[torch.Generator]):
    """`torch.cuda.default_generators`, with the generators of fake devices on threads that have them."""

    def __init__(self, original: tuple[torch.Generator, ...]) -> None:
        self._original = original

    def _current(self) -> tuple[torch.Generator, ...]:
        return tuple(_generators()) if _C.fake_cuda_devices() else self._original

    def __len__(self) -> int:
        return len(self._current())

    def __getitem__(self, index: Any) -> Any:
        return self._current()[index]

    def __eq__(self, other: object) -> bool:
        return self._current() == (other._current() if isinstance(other, _DefaultGenerators) else other)

    def __hash__(self) -> int:
        return hash(self._current())

    def __repr__(self) -> str:
        return repr(self._current())


def _declare_generators() -> None:
    while_devices_exist.patch(torch.cuda, "default_generators", _DefaultGenerators, "looks for real CUDA devices")


while_devices_exist.declare(_declare_generators)
