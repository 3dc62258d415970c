"""Files of safetensors without values: names, shapes and types, and a hole as long as the values.

They begin like all placeholders (`placeholders.py`), so safetensors rejects them outside of dry runs.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..fake import fake_mode
from .placeholders import known_list, opened, read_header, write_placeholder

__all__ = ["MovedFile", "PlaceholderFile", "is_moved", "load_bytes", "placeholder_bytes", "save_file"]

FRAMEWORK = ("pt", "torch", "pytorch")  # the names of safetensors for PyTorch


def save_file(tensors: Mapping[str, torch.Tensor], file: Any, metadata: Any = None) -> None:
    """Write the description of `tensors` to a path or a file."""
    codes = {dtype: code for code, dtype in _dtypes().items()}
    described = {
        name: [codes[tensor.dtype], list(tensor.shape), known_list(tensor)] for name, tensor in tensors.items()
    }
    header = json.dumps({"metadata": metadata, "tensors": described}).encode()
    with opened(file, "wb") as new:
        write_placeholder(new, header, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))


def placeholder_bytes(tensors: Mapping[str, torch.Tensor], metadata: Any = None) -> bytes:
    """Return the description of `tensors`, as `safetensors.torch.save()` returns their values."""
    content = io.BytesIO()
    save_file(tensors, content, metadata)
    return content.getvalue()


def load_bytes(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors that `placeholder_bytes()` has described, as fakes on the CPU."""
    return PlaceholderFile(io.BytesIO(data)).get_tensors()


class PlaceholderFile:
    """The result of `safetensors.safe_open` for a file without values: its tensors are fakes.

    Args:
        filename: The path.
        framework: The framework, which must be PyTorch.
        device: The device of the fakes.
    """

    def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> None:
        if framework not in FRAMEWORK:
            raise ValueError(
                f"safe_open: {filename} was written by a dry run and has no values, which framework={framework!r} "
                "requires; use framework='pt'"
            )
        with opened(filename, "rb") as content:
            header = json.loads(read_header(content))
        self._device = _device(device)
        self._metadata: dict[str, str] | None = header["metadata"]
        self._described: dict[str, tuple[str, list[int], list[Any] | None]] = header["tensors"]

    def __enter__(self) -> PlaceholderFile:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def keys(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self._described)

    def offset_keys(self) -> list[str]:
        """Return the names in the order of the file."""
        return list(self._described)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the program."""
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        code, shape, values = self._find(name)
        dtype = _dtypes()[code]
        with fake_mode():
            if values is not None:
                return torch.tensor(values, dtype=dtype).view(shape).to(self._device)
            return torch.empty(shape, dtype=dtype, device=self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        return {name: self.get_tensor(name) for name in self._described}

    def get_slice(self, name: str) -> _Slice:
        """Return a view for reading parts of a tensor."""
        code, shape, _ = self._find(name)
        return _Slice(self, name, code, shape)

    def _find(self, name: str) -> tuple[str, list[int], list[Any] | None]:
        if name not in self._described:
            raise sys.modules["safetensors"].SafetensorError(f"File does not contain tensor {name}")
        return self._described[name]


class MovedFile:
    """A file of safetensors whose tensors are read on the CPU, and moved to a fake device.

    The library itself would allocate device memory, and copy to its address.

    Args:
        file: The result of `safetensors.safe_open` on the CPU.
        device: The device.
    """

    def __init__(self, file: Any, device: Any) -> None:
        self._file = file
        self._device = _device(device)

    def __enter__(self) -> MovedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118 (it is not a mapping)

    def get_slice(self, name: str) -> _MovedSlice:
        """Return a view for reading parts of a tensor."""
        return _MovedSlice(self._file.get_slice(name), self._device)


class _MovedSlice:
    def __init__(self, part: Any, device: torch.device) -> None:
        self._part = part
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._part[index]
        return part.to(self._device)


class _Slice:
    def __init__(self, file: PlaceholderFile, name: str, code: str, shape: list[int]) -> None:
        self._file = file
        self._name = name
        self._code = code
        self._shape = shape

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype in the file."""
        return self._code

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._file.get_tensor(self._name)[index]
        return part.clone()  # has only the memory of that part


def is_moved(framework: Any, device: Any) -> bool:
    """Return true if `safetensors.safe_open` with these arguments returns tensors on another device than the CPU."""
    return framework in FRAMEWORK and _device(device).type != "cpu"


def _device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _dtypes() -> dict[str, torch.dtype]:
    types: dict[str, torch.dtype] = sys.modules["safetensors.torch"]._TYPES
    return types
