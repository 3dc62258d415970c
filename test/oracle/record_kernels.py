"""Records the allocations of CUDA kernels besides their results, for test/memory/test_kernel_memory.py.

    cd test export LD_PRELOAD=libnullcuda.so TORCH_CUBLAS_WORKSPACE_CACHE=1 python -m oracle.record_kernels >
    memory/kernel_traces.jsonl

Needs a CUDA build of PyTorch, and the null driver; no GPU. A line of the output is a call: the operator, its arguments,
its results, and the allocator's actions during the call: `R0` is the allocation of the first result, `A0:512` that of
512 bytes for another purpose, `F0` and so on their frees.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from oracle.kernel_calls import calls
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Allocates cuBLAS's persistent workspace (if enabled) before the recording.
WARM_UP = 64


def start() -> None:
    """Begin to record the allocator's actions."""
    torch.cuda.memory._record_memory_history(max_entries=100000, context=None, clear_history=True)


def events() -> list[tuple[bool, int, int]]:
    """Return the recorded events: whether it is an allocation, its address, and the bytes."""
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    known = {"alloc": True, "free_requested": False}
    return [(known[event["action"]], event["addr"], event["size"]) for event in trace if event["action"] in known]


def encode(value: Any) -> Any:
    """Write an argument or a result as JSON."""
    if isinstance(value, Tensor):
        return encode_tensor(value)
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.layout | torch.memory_format | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    message = f"a {type(value).__name__} cannot be written"
    raise TypeError(message)


def encode_tensor(tensor: Tensor) -> dict[str, Any]:
    """Return the metadata of a tensor, without default values."""
    result: dict[str, Any] = {"t": str(tensor.dtype).removeprefix("torch."), "s": list(tensor.shape)}
    if not tensor.is_contiguous():
        result["st"] = list(tensor.stride())
    if tensor.storage_offset():
        result["o"] = tensor.storage_offset()
    if tensor.device.type != "cuda":
        result["d"] = tensor.device.type
    return result


def names_of_storages(values: Any, letter: str) -> dict[int, str]:
    """Return the addresses of the storages of all CUDA tensors in `values`."""
    names: dict[int, str] = {}
    for i, leaf in enumerate(tree_leaves(values)):
        if isinstance(leaf, Tensor) and leaf.device.type == "cuda" and leaf.numel() > 0:
            names.setdefault(leaf.untyped_storage().data_ptr(), f"{letter}{i}")
    return names


def describe(trace: list[tuple[bool, int, int]], results: Any, arguments: Any) -> str:
    """Return the steps of a call, from the events."""
    inputs = names_of_storages(arguments, "I")
    outputs = {at: name for at, name in names_of_storages(results, "R").items() if at not in inputs}
    last = {at: i for i, (_, at, _) in enumerate(trace)}
    steps: list[str] = []
    alive: dict[int, int] = {}
    count = 0
    for i, (is_allocation, at, size) in enumerate(trace):
        if not is_allocation:
            if at in alive:
                steps.append(f"F{alive.pop(at)}")
        elif last[at] == i and at in outputs:
            steps.append(outputs[at])
        elif last[at] != i or at not in inputs:
            steps.append(f"A{count}:{size}")
            alive[at] = count
            count += 1
    return " ".join(steps)


def record(op: torch._ops.OpOverload, arguments: Sequence[Any]) -> str:
    """Make a call, and return its line."""
    encoded = encode(arguments)
    schema = op._schema
    by_name = {slot.name: value for slot, value in zip(schema.arguments, arguments, strict=True) if slot.kwarg_only}
    by_position = arguments[: len(arguments) - len(by_name)]
    start()
    results = op(*by_position, **by_name)
    steps = describe(events(), results, arguments)
    packed = results if isinstance(results, tuple) else (results,)
    return json.dumps({"op": op.name(), "args": encoded, "results": encode(packed), "steps": steps})


def main() -> None:
    """Record all calls, once each."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.enabled = False
    square = torch.zeros(WARM_UP, WARM_UP, device="cuda")
    square @ square
    for line in dict.fromkeys(record(op, arguments) for op, arguments in calls()):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
