"""The store of a job of which only one process exists."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

__all__ = ["LonelyStore"]


class LonelyStore(Store):
    """Keeps what this process sets, and raises an error for what only others could set, instead of waiting for them.

    PyTorch's C++ calls the methods through its trampoline `PythonStore`, whose names they have.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self._who = f"rank {rank} of {size}"
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Keeps `value`."""
        self._values[key] = _to_bytes(value)

    def get(self, key: str) -> bytes:
        """Returns what was set.

        Raises:
            RuntimeError: This process has not set it, so a real one would wait for another.
        """
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Counts, as `Store.add()` does: in decimal digits."""
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets `desired` if the value is `expected`, or if there is none and nothing is expected; returns the value."""
        expected, desired = _to_bytes(expected), _to_bytes(desired)
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to what was set."""
        self._values[key] = self._values.get(key, b"") + _to_bytes(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Returns what was set for all of them."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Sets several."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        """Returns true if all were set."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Does nothing if all were set.

        Raises:
            RuntimeError: One was not, and nobody is there to do it.
        """
        for key in keys:
            if key not in self._values:
                raise RuntimeError(
                    f"The program waits for the key {key!r} of the store, which another process would set. In this dry "
                    f"run {self._who} is alone, and has not set it. Set it in this process as well, or leave the "
                    "exchange out of the dry run."
                )

    def delete_key(self, key: str) -> bool:
        """Returns true if there was one."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys this process has set."""
        return len(self._values)

    getNumKeys, deleteKey = num_keys, delete_key  # noqa: N815  (what some releases of the trampoline ask for)

    def has_extended_api(self) -> bool:
        """`append`, `multi_get` and `multi_set` are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing is waited for."""


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
