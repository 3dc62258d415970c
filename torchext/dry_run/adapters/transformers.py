"""Models of transformers from folders with a configuration but no weights.

The memory of a model depends only on its configuration, but transformers rejects a folder without weights. So it
receives an empty checkpoint: it creates the missing weights on the requested devices, with the requested dtypes, and
logs that they were missing.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...fake.values import programs_frame
from ...internals.events import place_of
from ...internals.patching import Function
from ..current import current, while_world_is_open

__all__: list[str] = []

RESOLVE = "_get_resolved_checkpoint_files"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.index.json")

# If the configuration has no dtype, transformers uses that of the first tensor, so the checkpoint has an empty tensor.
EMPTY = b'{"__metadata__":{"format":"pt"},"no_weights":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'


@while_world_is_open.replaces(
    "transformers.modeling_utils", RESOLVE, needs=RESOLVE, reason="rejects folders without weights"
)
def _resolve(original: Function, /, *args: Any, **kwargs: Any) -> Any:
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


def _has_configuration_only(folder: Path) -> bool:
    """Return true if a folder has no weights of any variant. A missing variant is an error of the program."""
    return (folder / "config.json").is_file() and not any(True for kind in WEIGHTS for _ in folder.glob(kind))
