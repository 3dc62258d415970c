"""Results of fakes on CUDA have the layouts of CUDA's host code, also for arguments that are not contiguous."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from common import COMPUTES_ON_CUDA
from comparisons import metadata
from sweeps.operators import tensors_in
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from torchext.fake import fake_like, fake_mode

pytestmark = [
    pytest.mark.cuda_host,
    pytest.mark.skipif(COMPUTES_ON_CUDA, reason="needs the null driver: make cuda-host"),
]

SAMPLES = 4
# Operators whose result sizes depend on values, which are not computed.
NEEDS_VALUES = {"masked_select", "nonzero", "_unique", "_unique2", "unique_consecutive", "unique_dim"}
# Operators outside of the dispatcher, with other layouts, or that end the process under the null driver.
LEFT_OUT = (
    *("jiterator", "sparse", "to_sparse"),
    *("matrix_exp", "mode", "nn.functional.scaled_dot_product_attention"),
)
# Known differences. None of them changes the required memory.
DIFFERS = {
    "_log_softmax_backward_data": "is contiguous, where its Meta kernel keeps the layout of the gradient",
    "native_dropout_backward": "has the suggested memory format, where its Meta kernel keeps all strides",
    "_linalg_svd": "whether complex vectors are lazily conjugated depends on cuSOLVER's function",
}
# Operators that fakes reject but the null driver accepts.
REFUSED: set[str] = set()
COMPARED = {"shape", "dtype", "device", "strides_that_matter", "is_conj"}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "sliced": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[:1].expand_as(t) if t.dim() > 1 and t.numel() else t,
}


def name_of(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


class CompareWithFakes(TorchDispatchMode):
    """Repeats each call on fakes, unless it writes to its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compared: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.different: dict[str, tuple[object, ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or func.namespace != "aten":
            return func(*args, **kwargs)
        fake_args, fake_kwargs = tree_map_only(Tensor, fake_like, (args, dict(kwargs)))
        results = func(*args, **kwargs)
        with suppress(Exception), _disable_current_modes(), fake_mode():
            self._compare(func, args, results, func(*fake_args, **fake_kwargs))
        return results

    def _compare(self, func: Any, args: object, real: object, fake: object) -> None:
        name = name_of(func)
        wanted, found = (metadata(tree_leaves(results), COMPARED) for results in (real, fake))
        self.compared[name] += 1
        if wanted != found and name not in NEEDS_VALUES | DIFFERS.keys():
            self.different[name] = (metadata(args, COMPARED | {"value"}), wanted, found)


def calls(op: OpInfo) -> Iterator[tuple[Any, Any, Any]]:
    """Return samples of `op` on CUDA, in each of the layouts."""
    for dtype in (torch.float32, torch.float16):
        samples: list[Any] = []
        if dtype in op.supported_dtypes("cpu"):
            with suppress(Exception):
                samples = list(itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES))
        for sample, lay_out in itertools.product(samples, LAYOUTS.values()):

            def convert(tensor: Tensor, dtype: torch.dtype = dtype, lay_out: Any = lay_out) -> Tensor:
                return lay_out(tensor.detach().to("cuda")).requires_grad_(tensor.dtype == dtype)  # type: ignore[no-any-return]

            yield tree_map_only(Tensor, convert, (sample.input, list(sample.args), dict(sample.kwargs)))


@pytest.mark.parametrize("part", range(8))
def test_results_are_laid_out_as_by_pytorchs_host_code(part: int) -> None:
    compare = CompareWithFakes()
    usual = [op for op in op_db if not op.name.startswith(LEFT_OUT)]
    with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=False):
        warnings.simplefilter("ignore")  # of samples that provoke them
        for op in usual[part::8]:
            for first, args, kwargs in calls(op):
                with suppress(Exception), torch.autograd.set_multithreading_enabled(False), compare:
                    results = tensors_in(op(first, *args, **kwargs))
                    losses = [result.abs().sum() for result in results if result.requires_grad]
                    if losses:
                        torch.autograd.backward(losses)
    assert compare.different == {}
    assert {name: error for name, error in compare.refused.items() if name not in REFUSED} == {}
    assert compare.compared.total() > 1000
    assert len(compare.compared) > 80
