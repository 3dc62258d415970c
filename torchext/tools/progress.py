"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(total: int, is_shown: bool, doing: str = "materializing") -> Iterator[Callable[[int], object] | None]:
    """Show a progress bar for `total` bytes, with the rate, while the block runs.

    Args:
        total: The number of bytes.
        is_shown: If false, nothing is shown and nothing is imported.
        doing: The label of the progress bar.

    Yields:
        A function that takes the number of further bytes, or None if no progress bar is shown.

    Raises:
        ImportError: tqdm is not installed.
    """
    if not is_shown:
        yield None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("`progress=True` needs tqdm. Install it: pip install tqdm") from error
    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update
