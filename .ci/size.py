"""Print the number of lines of each component of the sources, now and at an earlier commit.

size.py [COMMIT]     default: the last tag, if there is one
"""

from __future__ import annotations

import collections
import subprocess
import sys

# Budget for csrc and torchext together. It shrinks with each issue; a change that needs more lines gives a reason. It
# was 80,150 before recipes, fills and traits had one mechanism each, and files of one subject were joined, and 73,650
# before `torch.compile` on fake GPUs.
BUDGET = 74_150
# Budget for csrc/core, which a newcomer must understand.
CORE_BUDGET = 10_400
SUFFIXES = (".cpp", ".h", ".py", ".pyi")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def lines_by_room(commit: str) -> collections.Counter[str]:
    """Return the numbers of lines of the tracked sources of a commit, by their first two folders."""
    lines: collections.Counter[str] = collections.Counter()
    for row in _git("grep", "-c", "", commit, "--", "csrc", "torchext").splitlines():
        path, count = row.removeprefix(f"{commit}:").rsplit(":", 1)
        if path.endswith(SUFFIXES):
            parts = path.split("/")
            lines["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += int(count)
    return lines


def _earlier(arguments: list[str]) -> str | None:
    if arguments:
        return arguments[0]
    tags = _git("tag", "--sort=-creatordate", "--merged").split()
    return tags[0] if tags else None


def main() -> None:
    """Print the table. Exit with an error beyond the budget."""
    commit = _earlier(sys.argv[1:])
    now, before = lines_by_room("HEAD"), lines_by_room(commit) if commit else None
    total = "csrc and torchext"
    for counts in (now, before):
        if counts is not None:
            counts[total] = sum(counts.values())
    for room in sorted(now, key=lambda room: (room != total, -now[room])):
        change = f"  {now[room] - before[room]:+7,} since {commit}" if before is not None else ""
        print(f"{now[room]:8,}  {room}{change}")
    print(f"{BUDGET:8,}  is the budget, and {CORE_BUDGET:,} that of csrc/core")
    if now["csrc/core"] > CORE_BUDGET:
        sys.exit(f"csrc/core exceeds the budget of .ci/size.py by {now['csrc/core'] - CORE_BUDGET:,} lines.")
    if now[total] > BUDGET:
        sys.exit(f"csrc and torchext exceed the budget of .ci/size.py by {now[total] - BUDGET:,} lines.")


if __name__ == "__main__":
    main()
