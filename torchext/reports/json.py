"""The JSON report of `torchext dry-run --json`.

Numbers of bytes and of operations are integers, times are in seconds. Keys may be added without a new `schema`. Two
runs of one program differ in the keys `seconds` only, unless the program itself is random.

    schema: the version of this description, 1
    command: "dry-run"
    versions: torchext, torch_of_build, torch, python
    program: the command line after `--`
    folder: the current directory
    world_size, per_node: the size of the job, and of a machine
    values: the policy for reads of values that do not exist
    exit_code: of the command (`torchext dry-run --help`)
    interrupted: whether ranks are missing because of Ctrl-C
    other_mismatches: errors about messages between ranks that are not reported
    gpu: name, count, memory, capability, multiprocessors, context
    ranks: a list, in the order of the runs:
        rank
        outcome: "fits", "does not fit", "failed", "too few", or "uses no GPU" if nothing was allocated on one
        unit: "step" or "forward pass"
        requested, completed: numbers of these; requested is null with --to-end
        forward_passes, backward_passes: numbers of passes that began
        seconds: the duration, without starting Python
        program_exit_code: of the program; 0 if it did not end itself
        error, error_summary: the traceback of the program, and its last line; empty without an error
        out_of_memory: the message of the device that ran out of memory, or empty. The devices below then show the
            memory that the rank needs, if the program could be run to that point
        devices: a list, GPUs first:
            device: "cuda:0", ..., "cpu" (pageable memory of the host), "pinned"
            peak_allocated, peak_reserved: the largest numbers of bytes
            total: the memory of the device; 0 for the host
            headroom: total - peak_reserved; null for the host
            fragmentation: bytes that were reserved but unused at the peak of allocated memory
            categories, modules, lines: bytes at that peak by category, by module and by source line
            line_peaks: the most bytes that each source line held at any moment
            largest: the 20 largest tensors at that peak: bytes, category, name, line
        collectives: a list of phase, group, group_size, operator, calls, bytes_sent, bytes_received
        peers: the ranks with which messages are exchanged
        flops: the operations of one step or forward pass, or null; flops_error: the reason for null
        bound: the lower bound of the time of one step or forward pass, or null; bound_error: the reason for null, if
            `flops_error` is not the reason
            seconds: the least time
            compute, memory, network: the least times of operations, of memory traffic and of communication
            not_overlapped: the part of `seconds` that communication adds
            utilization: the upper limit of the MFU, or null
            flops, is_compiled, rates: see `torchext.dry_run.TimeBound`
            operators: a list of operator, module, line, calls, seconds, bounded_by
        values: answered reads of values that do not exist: line, reader, operator, answer, kind, policy, count
        files: changes that the program would make: path, change, bytes
        remarks: differences between the dry run and the program
        mismatches: errors about messages of this rank whose sizes differ between sender and receiver
        code: the source code of the lines of `line_peaks`, by line
        timeline: the memory of the device with the largest peak over time; empty without memory:
            device, peak_allocated
            categories: names and colors
            points: a list of event, reserved, bytes of each category
            seconds: the time of each point
            details: the largest tensors at some events: bytes, category, name, line
    comparison: with --compare, the differences from another report; see `comparison.py`
    advice: with --advise, the runs of the first rank with remedies; null if the program fails without them:
        gpu; limit: the bytes that the program may reserve
        is_complete: whether the search ended before its limits
        baseline, solution, and lists front, outcomes, failed of runs:
            name, numerics: "exact", "rounding", "arguments" or "changed"
            remedies: a list of kind, name, numerics, snippet
            fits: whether the run fits on the GPU; peak_reserved, peak_allocated, pinned, bytes_sent: bytes
            flops: the operations of a step, or null
            error: that of a run in `failed`
        solution is null if no run fits within the limit, and has all changes in `snippet`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..descriptions.gpus import FakeGPU
from .model import RankReport

__all__ = ["json_report"]


def json_report(job: dict[str, Any], gpu: FakeGPU, reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return the content of the JSON report, without `schema`, `command` and `versions`.

    Args:
        job: The keys before `gpu`.
        gpu: The GPUs of a machine.
        reports: The reports of the ranks.
    """
    names = ("name", "count", "memory", "capability", "multiprocessors", "context")
    return {
        **job,
        "gpu": {name: getattr(gpu, name) for name in names},
        "ranks": [report.to_dict() for report in reports],
    }
