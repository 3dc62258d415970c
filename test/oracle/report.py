"""Prints the allocations of a program on fakes, and its memory report: `python -m oracle.report PROGRAM`."""

from __future__ import annotations

import itertools
import json
import os
import sys

from oracle.compare import run_events, world
from oracle.programs import PROGRAMS

from torchext.memory import track_memory


def main(name: str) -> None:
    # The order in which autocast's cache frees its casts depends on addresses.
    for is_free, group in itertools.groupby(run_events(name, is_fake=True), lambda event: event.startswith("-")):
        events = list(group)
        print("\n".join(sorted(events) if is_free else events))
    with world(is_fake=True), track_memory() as report:
        PROGRAMS[name]()()
    print(json.dumps(report.to_dict(), default=str, sort_keys=True, indent=1))
    sys.stdout.flush()
    os._exit(0)  # an autograd thread that still runs may crash the process at its end


if __name__ == "__main__":
    main(sys.argv[1])
