"""Replaces torchdistx in programs that import it by that name."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from . import deferred_init, fake

__all__ = ["install_as_torchdistx"]


def __dir__() -> list[str]:
    return __all__


_NAME = "torchdistx"
_FSDP = "torch.distributed.fsdp._init_utils"


def install_as_torchdistx() -> None:
    """Make `import torchdistx` find torchext, in this process.

    Afterwards `torchdistx.deferred_init` and `torchdistx.fake` are torchext's modules, and PyTorch's
    `FullyShardedDataParallel`, which looks for torchdistx, materializes deferred modules one wrapped submodule at a
    time. FSDP may have been imported before. Further calls have no effect.

    Raises:
        RuntimeError: The real torchdistx has been imported. The two cannot be used in one process.
    """
    _refuse_the_real_one()
    if sys.modules.get(_NAME) is None:
        package = ModuleType(_NAME, "torchext, under the name of torchdistx.")
        package.__spec__ = ModuleSpec(_NAME, loader=None, is_package=True)
        package.__path__ = []
        package.deferred_init, package.fake = deferred_init, fake  # type: ignore[attr-defined]
        sys.modules[_NAME] = package
        sys.modules[f"{_NAME}.deferred_init"] = deferred_init
        sys.modules[f"{_NAME}.fake"] = fake
    _tell_fsdp()


def _refuse_the_real_one() -> None:
    for name, module in list(sys.modules.items()):
        is_ours = module is None or getattr(module, "fake", module) is fake or module is deferred_init
        if name.partition(".")[0] == _NAME and not is_ours:
            raise RuntimeError(
                f"torchext cannot stand in for torchdistx, because `{name}` has been imported from "
                f"{getattr(module, '__file__', 'somewhere else')}. Call install_as_torchdistx() before anything "
                "imports torchdistx, or uninstall torchdistx."
            )


def _tell_fsdp() -> None:
    """Set the variable in which FSDP records, when it is imported, whether torchdistx is available."""
    fsdp = sys.modules.get(_FSDP)
    if fsdp is not None:
        vars(fsdp).update(_TORCHDISTX_AVAIL=True, deferred_init=deferred_init, fake=fake)
