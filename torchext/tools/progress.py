"""Showing how far something that takes long has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(total: int, is_shown: bool, doing: str = "materializing") -> Iterator[Callable[[int], object] | None]:
    """Shows a bar of `total` bytes, and how many there are in a second, while the block runs.

    Args:
        total: The number of bytes.
        is_shown: With false, nothing is shown and nothing imported.
        doing: What the bar is called.

    Yields:
        What is to be called with the number of bytes that have been added, or None when no bar is shown.

    Raises:
        ImportError: tqdm is not installed.
    """
    if not is_shown:
        yield None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("`progress=True` shows its bar with tqdm. Install it: pip install tqdm") from error
    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update
