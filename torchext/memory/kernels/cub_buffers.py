"""The temporary storage of the CUB algorithms that PyTorch's kernels call (cub.cuh in ATen/cuda), in bytes."""

from __future__ import annotations

from .geometry import divide_up

__all__ = ["radix_sort_bytes", "scan_by_key_bytes", "scan_bytes", "segmented_sort_bytes", "unique_by_key_bytes"]

ALIGNMENT = 256

# By the bytes of the keys and values: the number of elements that a thread block sorts at once (tunings for sm90), and
# the largest number that one block sorts alone.
RADIX_TILES = {
    (1, 8): (3456, 2304),
    (2, 8): (5632, 2304),
    (4, 8): (5376, 2304),
    (8, 8): (4608, 2304),
    (4, 4): (6528, 4864),
    (8, 0): (5760, 2304),
}


def _aligned(nbytes: int) -> int:
    return divide_up(nbytes, ALIGNMENT) * ALIGNMENT


def _aliased(nbytes: int) -> int:
    """Follow `AliasTemporaries()`: each part, and possibly the whole, is aligned to 256 bytes."""
    return nbytes + ALIGNMENT - 1


def _tile_states(count: int, tile: int, state: int) -> int:
    """Return the size of the state of the tiles of a scan."""
    padding = 32
    return _aligned((divide_up(count, tile) + padding) * state)


def radix_sort_bytes(count: int, key: int, value: int, bits: int) -> int:
    """Return the storage of a sort: one pass per byte of the key ("onesweep"), from one buffer to another.

    Args:
        count: The number of elements.
        key: The bytes of a key.
        value: The bytes of a value, or 0 without values.
        bits: The number of the lowest bits of the keys that are compared.
    """
    tile, alone = RADIX_TILES.get((key, value), RADIX_TILES[8, 8])
    if count <= alone:
        return 1
    digits = 256
    passes = divide_up(bits, 8)
    bins = passes * digits * 8
    look_back = divide_up(count, tile) * digits * 4
    counters = _aligned(passes * 4)
    buffers = _aligned(count * key) + _aligned(count * value) if passes > 1 else 0
    return _aliased(bins + look_back + counters + buffers)


def segmented_sort_bytes(count: int, key: int, value: int) -> int:
    """Return the storage of a sort of segments."""
    return _aliased(_aligned(count * key) + _aligned(count * value))


def scan_bytes(count: int, number: int) -> int:
    """Return the storage of a scan of numbers of `number` bytes.

    For numbers of 4 bytes a state is a word. Larger numbers and halves have more items or words.
    """
    tile, state = {2: (7680, 16), 4: (1920, 8)}.get(number, (896, 16))
    return _aliased(_tile_states(count, tile, state) + ALIGNMENT)


def scan_by_key_bytes(count: int) -> int:
    """Return the storage of a scan of the values of each key."""
    tile = 2464
    return _aliased(_tile_states(count, tile, 16) + _aligned((divide_up(count, tile) + 1) * 8))


def unique_by_key_bytes(count: int) -> int:
    """Return the storage of a selection of the first value of each key."""
    return _aliased(_tile_states(count, 2432, 8) + 2 * ALIGNMENT)
