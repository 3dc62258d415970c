"""Models of transformers from folders with a configuration but no weights.

The memory of a model depends only on its configuration, but transformers rejects a folder without weights. So it
receives an empty checkpoint: it creates the missing weights on the requested devices, with the requested dtypes, and
logs that they were missing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from ..fake.values import programs_frame
from ..internals.imports import patching
from ..internals.source_lines import place_of
from .current import current, while_world_is_open

__all__ = ["models_without_weights"]

MODULE = "transformers.modeling_utils"
RESOLVE = "_get_resolved_checkpoint_files"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.index.json")

# If the configuration has no dtype, transformers uses that of the first tensor, so the checkpoint has an empty tensor.
EMPTY = b'{"__metadata__":{"format":"pt"},"no_weights":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'


def models_without_weights() -> AbstractContextManager[None]:
    """Let `from_pretrained()` construct models from their configuration in the block if the folder has no weights."""
    return patching(MODULE, (RESOLVE,), _patch)


def _patch(module: ModuleType) -> None:
    while_world_is_open.patch(module, RESOLVE, _resolving, "rejects folders without weights")


def _resolving(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except OSError:
            given = signature(original).bind(*args, **kwargs).arguments
            folder = given.get("pretrained_model_name_or_path")
            subfolder = (given.get("download_kwargs") or {}).get("subfolder") or ""
            job = current()
            if job is None or folder is None or not _has_configuration_only(Path(folder, subfolder)):
                raise
        remark = f"{folder} has no weights: the model was made from its configuration"
        job.remark(remark, place_of(programs_frame()))
        checkpoint = Path(job.when_left.enter_context(TemporaryDirectory(prefix="torchext-"))) / "model.safetensors"
        checkpoint.write_bytes(len(EMPTY).to_bytes(8, "little") + EMPTY)
        return [str(checkpoint)], None

    return resolve


def _has_configuration_only(folder: Path) -> bool:
    """Return true if a folder has no weights of any variant. A missing variant is an error of the program."""
    return (folder / "config.json").is_file() and not any(True for kind in WEIGHTS for _ in folder.glob(kind))
