"""The store of a job that runs only one rank."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store

__all__ = ["SingleRankStore"]


class SingleRankStore(Store):
    """Keeps the values that this rank sets, and raises an error for missing keys instead of waiting for other ranks.

    PyTorch's C++ calls the methods through its trampoline `PythonStore`, which fixes their names.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self._rank = f"rank {rank} of {size}"
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._values[key] = _to_bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value of a key.

        Raises:
            RuntimeError: This rank has not set the key, so a real rank would wait for another one.
        """
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is stored in decimal digits as by `Store.add()`."""
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `desired` if the value is `expected`; a missing key has an empty value. Return the value."""
        expected, desired = _to_bytes(expected), _to_bytes(desired)
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._values[key] = self._values.get(key, b"") + _to_bytes(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return true if all keys are set."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return if all keys are set.

        Raises:
            RuntimeError: A key is missing, and no other rank runs that could set it.
        """
        for key in keys:
            if key not in self._values:
                raise RuntimeError(
                    f"The program waits for the key {key!r} of the store, which another rank would set. In this dry "
                    f"run {self._rank} runs alone, and has not set it. Set it on this rank, or skip the exchange in a "
                    "dry run."
                )

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return true if it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    getNumKeys, deleteKey = num_keys, delete_key  # noqa: N815  (the names in some releases of the trampoline)

    def has_extended_api(self) -> bool:
        """Return true: `append`, `multi_get` and `multi_set` are implemented."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the store never waits."""


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
