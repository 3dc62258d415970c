"""Models of transformers from folders that have a configuration, and no weights.

Where the memory of a model matters, and its values do not, the configuration is enough. transformers refuses a folder
without weights, so it is given an empty checkpoint: it makes what is missing, on the devices and with the dtypes that
it was asked for, and says that these weights were missing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..fake.assumed_values import programs_frame
from ..tools.imports import once_imported
from .current import current, while_world_is_open

__all__ = ["models_without_weights"]

MODULE = "transformers.modeling_utils"
RESOLVE = "_get_resolved_checkpoint_files"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.index.json")

# An element type is what transformers takes the dtype of a model from whose configuration names none.
EMPTY = b'{"__metadata__":{"format":"pt"},"no_weights":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'

_taught: set[int] = set()


@contextmanager
def models_without_weights() -> Iterator[None]:
    """Lets `from_pretrained()` make models of their configuration in the block, where there are no weights."""
    _teach()
    with once_imported(MODULE, _teach):
        yield


def _teach() -> None:
    module: Any = sys.modules.get(MODULE)
    if module is None or id(module) in _taught or not hasattr(module, RESOLVE):
        return
    _taught.add(id(module))
    while_world_is_open.patch(module, RESOLVE, _resolving, "refuses folders without weights")


def _resolving(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except OSError:
            folder = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
            if current() is None or folder is None or not _has_configuration_only(Path(folder)):
                raise
        _remark(str(folder))
        return [_empty_checkpoint()], None

    return resolve


def _has_configuration_only(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not any(True for kind in WEIGHTS for _ in folder.glob(kind))


def _remark(folder: str) -> None:
    job, frame = current(), programs_frame()
    if job is not None:
        place = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        job.remark(f"{folder} has no weights: the model was made from its configuration", place)


def _empty_checkpoint() -> str:
    path = Path(tempfile.mkdtemp(prefix="torchext-")) / "model.safetensors"
    path.write_bytes(len(EMPTY).to_bytes(8, "little") + EMPTY)
    return str(path)
