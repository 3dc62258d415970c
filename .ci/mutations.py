"""Check that tests detect the defects that were fixed: revert the code of fixes one by one, and run the tests.

    .ci/mutations.py FOLDER                revert 40 commits of fixes.txt, chosen by a seed that is printed
    .ci/mutations.py FOLDER --resume       continue an interrupted run
    .ci/mutations.py FOLDER --list         print the choice only

A mutant is a copy of HEAD in which the changes of one commit to csrc and torchext are reverted. The tests are those of
HEAD. FOLDER holds the copy, which has its own build, the outcomes, and the diff and the output of each mutant. The
checkout does not change, and its uncommitted changes are not tested.

A commit is reverted if at least half of its changed lines of code are found (reverts.py). Another one is drawn
otherwise, and for a mutant that does not compile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reverts import Mutant, Sources, revert

ROOT = Path(__file__).absolute().parents[1]
FIXES = Path(__file__).with_name("fixes.txt")

LEAST_SHARE = 0.5  # of the changed lines of code, to be found
LEAST_EVERY_DAY = 0.9  # of the mutants, to be found by the everyday tests
BUILD_LIMIT, TEST_LIMIT = 7200.0, 1500.0  # seconds. Tests may also take three times as long as on HEAD
HUNG, NO_TESTS_COLLECTED = "hung", 5  # the second is pytest's exit code
# These test texts, the sources and the suite, so that they may detect a revert without observing the defect.
NOT_OF_THE_CODE = [f"test/package/test_{name}.py" for name in ("api", "docs", "prose", "rooms", "site", "tiers")]
TIERS = EVERYDAY, REST = ("everyday", "rest")  # `--tier`: test/tiers.py
MISSED, DRAWN_AGAIN = "not found", "drawn again"


# ---- Runs


class Copy:
    """A clone of this repository with its own build."""

    def __init__(self, root: Path, python: str, jobs: int, tiers: Sequence[str], arguments: Sequence[str]) -> None:
        self.root = root
        self.limits: dict[str, float] = dict.fromkeys(TIERS, TEST_LIMIT)
        self.tiers = tiers
        self._python = python
        self._jobs = str(jobs)
        self._arguments = arguments
        self._environment = {**os.environ, "PYTHONPATH": str(root), "MAX_JOBS": self._jobs}
        self._environment["PATH"] = f"{Path(python).parent}:{os.environ['PATH']}"  # another ninja would compile all
        self._environment["TORCHEXT_QUICK"] = "1"
        self._environment.pop("TORCHEXT_WERROR", None)  # reverted code may leave a function unused

    def git(self, *arguments: str) -> str:
        """Run git, and return its output."""
        command = ["git", *arguments]
        return subprocess.run(command, cwd=self.root, stdout=subprocess.PIPE, text=True, check=True).stdout

    def update(self) -> None:
        """Check out HEAD of the checkout. Only changed files are written, so a later build is incremental."""
        if not self.root.exists():
            subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(self.root)], check=True)
        self.git("fetch", "--quiet", str(ROOT), "HEAD")
        self.git("checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
        self.reset()

    def reset(self) -> None:
        """Remove the changes of a mutant."""
        self.git("checkout", "--quiet", "--force", "HEAD")
        self.git("clean", "--quiet", "--force", "-d")

    def diff_of(self, commit: str) -> str:
        """Return the changes of a commit to the code."""
        return self.git("diff", "-U12", "--histogram", f"{commit}^", commit, "--", "csrc", "torchext")

    def touched_tests(self, commit: str) -> list[str]:
        """Return the test files that a commit changed, that still exist, and that observe the code."""
        names = self.git("diff", "--name-only", f"{commit}^", commit, "--", "test").split()
        names = [name for name in names if Path(name).match("test_*.py") and name not in NOT_OF_THE_CODE]
        return [name for name in names if (self.root / name).exists()]

    def can_build(self, folder: Path) -> bool:
        """Compile and import. Return whether both succeed."""
        build = [self._python, "setup.py", "--quiet", "build_ext", "--inplace"]
        commands = {"build": build, "import": [self._python, "-c", "import torchext"]}
        return all(self._run(command, folder / f"{name}.txt", BUILD_LIMIT) == 0 for name, command in commands.items())

    def failure(self, tests: Sequence[str], tier: str, output: Path) -> str:
        """Run tests. Return the first that fails, or another reason for a failure, or nothing."""
        ignored = [f"--ignore={name}" for name in NOT_OF_THE_CODE]
        options = [*ignored, "-qx", f"-n{self._jobs}", "--dist=worksteal", f"--tier={tier}", *self._arguments]
        code = self._run([self._python, "-m", "pytest", *tests, *options], output, self.limits.get(tier))
        if code in (0, NO_TESTS_COLLECTED):
            return ""
        found = re.search(r"^(?:FAILED|ERROR) (test/.+?)(?: - .*)?$", output.read_text(errors="replace"), re.M)
        return HUNG if code == HUNG else found[1] if found else f"exit code {code}"

    def measure(self, folder: Path) -> None:
        """Check that HEAD passes, and set the time limits."""
        if not self.can_build(folder):
            sys.exit(f"HEAD does not build: {folder}")
        for tier in self.tiers:
            begin = time.monotonic()
            if failed := self.failure(["test"], tier, folder / f"{tier}.txt"):
                sys.exit(f"HEAD fails: {failed}, see {folder / tier}.txt")
            self.limits[tier] = max(TEST_LIMIT, 3 * (time.monotonic() - begin))

    def _run(self, command: Sequence[str], output: Path, limit: float | None) -> int | str:
        with output.open("w") as stream:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return HUNG
            finally:
                if process.returncode is None:  # hung or interrupted
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


class Outcome(NamedTuple):
    """The outcome of a mutant. `tier` is that of the first failing test, or `MISSED` or `DRAWN_AGAIN`."""

    commit: str
    subject: str
    share: float
    tier: str
    test: str
    seconds: int

    def __str__(self) -> str:
        tier = {EVERYDAY: "every day", REST: "make ci"}.get(self.tier, self.tier)
        return f"| {self.commit} | {self.subject} | {tier} | {self.test} |"


def examine(copy: Copy, commit: str, mutant: Mutant, folder: Path) -> tuple[str, str]:
    """Build a mutant and run the tests, those that the commit changed first. Return the tier and the failing test."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.reset()
    for name, text in mutant.files.items():
        (copy.root / name).write_text(text)
    (folder / "mutant.diff").write_text(copy.git("diff"))
    if not copy.can_build(folder):
        return DRAWN_AGAIN, "does not build"
    for tier in copy.tiers:
        for name, tests in (("touched", copy.touched_tests(commit)), ("all", ["test"])):
            if tests and (failed := copy.failure(tests, tier, folder / f"{tier}-{name}.txt")):
                return tier, failed
    return MISSED, ""


# ---- The command


class Journal:
    """The seed, the commit, the time limits and the outcomes of a run, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[str, Outcome] = {}

    def begin(self, seed: int, copy: Copy) -> None:
        """Begin a new file."""
        first = {"seed": seed, "head": copy.git("rev-parse", "HEAD").strip(), "limits": copy.limits}
        self._path.write_text(json.dumps(first) + "\n")

    def load(self, copy: Copy) -> int:
        """Read the outcomes of an interrupted run, go back to its commit, and return its seed."""
        if not self._path.exists():
            sys.exit(f"There is no run to continue in {self._path.parent}.")
        first, *rows = map(json.loads, self._path.read_text().splitlines())
        self.outcomes = {row["commit"]: Outcome(**row) for row in rows}
        copy.git("checkout", "--quiet", "--force", "--detach", first["head"])
        copy.reset()
        copy.limits = first["limits"]
        return int(first["seed"])

    def add(self, outcome: Outcome) -> None:
        """Append an outcome."""
        self.outcomes[outcome.commit] = outcome
        with self._path.open("a") as file:
            file.write(json.dumps(outcome._asdict()) + "\n")


def draw(seed: int) -> list[str]:
    """Return the listed commits in a random order."""
    fixes = [line.split()[0] for line in FIXES.read_text().splitlines() if line and not line.startswith("#")]
    return random.Random(seed).sample(fixes, len(fixes))


def run(options: argparse.Namespace) -> list[Outcome]:
    """Return the outcomes of as many commits as requested, or of all that can be reverted."""
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    copy = Copy(folder / "copy", options.python, options.jobs, options.tiers, options.tests)
    journal = Journal(folder / "outcomes.jsonl")
    seed = options.seed
    if options.resume:
        seed = journal.load(copy)
    else:
        copy.update()
    print(f"seed {seed}, HEAD is {copy.git('log', '-1', '--format=%h %s').strip()}", flush=True)
    if not options.resume and not options.list:
        (folder / "HEAD").mkdir(exist_ok=True)
        if not options.head_passes:
            copy.measure(folder / "HEAD")
        journal.begin(seed, copy)
    sources, counted = Sources(copy.root), list[Outcome]()
    for commit in options.commits or draw(seed):
        subject = copy.git("log", "-1", "--format=%s", commit).strip()
        mutant = revert(sources, copy.diff_of(commit))
        begin = time.monotonic()
        if mutant.share < LEAST_SHARE:
            outcome = Outcome(commit, subject, mutant.share, DRAWN_AGAIN, "does not revert", 0)
        elif options.list:
            outcome = Outcome(commit, subject, mutant.share, f"reverts {mutant.share:.0%}", "", 0)
        elif commit in journal.outcomes:
            outcome = journal.outcomes[commit]
        else:
            tier, test = examine(copy, commit, mutant, folder / "mutants" / commit)
            outcome = Outcome(commit, subject, mutant.share, tier, test, round(time.monotonic() - begin))
            journal.add(outcome)
        counted += [outcome] if outcome.tier != DRAWN_AGAIN else []
        print(f"[{len(counted)} of {options.count}] {outcome}", flush=True)
        if len(counted) == options.count:
            break
    return counted


def report(outcomes: Sequence[Outcome], count: int) -> bool:
    """Print the table and the counts, and return whether they suffice."""
    print("\n| commit | fix | found | first failing test |\n| --- | --- | --- | --- |")
    print(*outcomes, sep="\n")
    every_day = sum(outcome.tier == EVERYDAY for outcome in outcomes)
    found = every_day + sum(outcome.tier == REST for outcome in outcomes)
    print(f"\nevery day: {every_day} of {count}, make ci: {found} of {count}")
    return every_day >= LEAST_EVERY_DAY * count and found == count


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Revert fixes one by one, and check that tests fail.")
    parser.add_argument("folder", type=Path, help="the folder for the copy and the outcomes")
    parser.add_argument("--python", default=sys.executable, help="the Python of an environment with torch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="the number of parallel processes")
    parser.add_argument("--count", type=int, default=40, help="the number of commits (default: 40)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the seed of the choice (default: the time)")
    parser.add_argument("--commits", nargs="+", metavar="HASH", help="these commits instead of a random choice")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS, help="run these tiers only (default: both)")
    parser.add_argument("--head-passes", action="store_true", help="do not run the tests on HEAD first")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run, with the same options")
    parser.add_argument("--list", action="store_true", help="print the choice, without building and testing")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=[], help="last: further arguments for pytest")
    options = parser.parse_args()
    python = shutil.which(options.python)
    if python is None:
        parser.error(f"--python: {options.python} does not exist")
    options.python = str(Path(python).absolute())  # links are kept: the target is not in the environment
    options.count = len(options.commits) if options.commits else options.count
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the tests
    options = parse()
    outcomes = run(options)
    sys.exit(0 if options.list or report(outcomes, options.count) else 1)
