"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(total: int, doing: str = "materializing") -> Iterator[Callable[[int], object]]:
    """Show a progress bar for `total` bytes, with the rate, while the block runs.

    Args:
        total: The number of bytes.
        doing: The label of the progress bar.

    Yields:
        A function that takes the number of further bytes.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("`progress=True` needs tqdm. Install it: pip install tqdm") from error
    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update
