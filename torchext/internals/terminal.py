"""The parts that all commands share: flags, colors, JSON, log messages, and suggestions for misspelled names."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from ..installation import library_built_for, torch_version
from ..version import __version__

__all__ = [
    "INTERRUPTED",
    "SCHEMA",
    "STDERR",
    "STDOUT",
    "CommandLineParser",
    "add_shared_flags",
    "argument",
    "at_least_1",
    "colored",
    "log_to_stderr",
    "needs",
    "output_file",
    "parse_ranks",
    "positive",
    "run_command",
    "suggestion",
    "versions",
    "with_header",
    "write_json",
]

T = TypeVar("T")

INTERRUPTED = 130  # as shells report SIGINT
BROKEN_PIPE = 141  # as shells report SIGPIPE
STDOUT = Path("-")
STDERR = 2  # the file descriptor
SCHEMA = 1
"""The version of the JSON that commands write. It increases when a key is removed or changes its meaning."""

NEEDS = "needs"  # an attribute of flags
UNRECOGNIZED = "unrecognized arguments: "  # argparse's words
CODES = {"green": "32", "red": "31", "bold": "1"}


class CommandLineParser(argparse.ArgumentParser):
    """A parser whose errors name the nearest flag or command, and which checks what flags need (`needs()`)."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the known arguments. A parser of a command reports unknown ones itself, with its own flags."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._subparsers:
            self.error(f"{UNRECOGNIZED}{' '.join(unknown)}")
        given = [action for action in self._actions if getattr(options, action.dest, action.default) != action.default]
        for action in given:
            needed = getattr(action, NEEDS, None)
            if needed is not None and needed not in given:
                self.error(
                    f"{action.option_strings[0]} needs {needed.option_strings[0]} {needed.metavar or ''}".rstrip()
                )
        to_stdout = [a.option_strings[0] for a in given if a.type is output_file and getattr(options, a.dest) == STDOUT]
        if len(to_stdout) > 1:
            self.error(f"{' and '.join(sorted(to_stdout))} cannot both write to stdout")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and an error, which names the nearest flag if a flag is unknown."""
        unknown = message.removeprefix(UNRECOGNIZED).split() if message.startswith(UNRECOGNIZED) else []
        flag = next((argument.partition("=")[0] for argument in unknown if argument.startswith("--")), "")
        super().error(message + suggestion(flag, self._option_string_actions))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(map(str, action.choices))
            near = suggestion(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"expected one of {choices}; got {value!r}{near}")


def needs(needed: argparse.Action, *flags: argparse.Action) -> None:
    """Let the parser refuse `flags` if `needed` is not given."""
    for flag in flags:
        setattr(flag, NEEDS, needed)


def add_shared_flags(parser: argparse.ArgumentParser, *, quiet: str = "print no progress") -> None:
    """Add the flags that all commands have.

    Args:
        parser: The parser of a command.
        quiet: The help text of `--quiet`.
    """
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the results as JSON; - writes them to stdout"
    )
    group.add_argument("--quiet", action="store_true", help=quiet)
    group.add_argument("--verbose", action="store_true", help="print the log messages of torchext to stderr")
    add_version(group)


def add_version(parser: argparse._ActionsContainer) -> None:
    """Add `--version`."""
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")


class _Version(argparse.Action):
    """Prints the versions, which are found only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        text = "torchext {torchext} (built for torch {torch_of_build}; torch {torch}, Python {python})"
        print(text.format(**versions()))
        parser.exit()


def versions() -> dict[str, str]:
    """Return the versions of torchext, of torch when torchext was built, of torch, and of Python."""
    return {
        "torchext": __version__,
        "torch_of_build": (library_built_for() or "unknown").partition("+")[0],
        "torch": torch_version(),
        "python": platform.python_version(),
    }


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return `parse` for `type=`. argparse prints the message of an error only if that is an `ArgumentTypeError`."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


@argument
def at_least_1(text: str) -> int:
    """Return a number of things, for `type=`."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected at least 1, got {text}")
    return int(text)


@argument
def positive(text: str) -> float:
    """Return a positive number, for `type=`."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"expected a positive number, got {text}")
    return number


def output_file(text: str) -> Path:
    """Return the path of a file to write, for `type=`.

    Raises:
        ArgumentTypeError: Its folder does not exist, or the file cannot be written.
    """
    path = Path(text)
    if path == STDOUT:
        return path
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} does not exist")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {text!r}")
    return path


def parse_ranks(text: str, words: Sequence[str] = ()) -> list[int]:
    """Return the ranks that a flag names, such as `0,8-15`, each once and in that order.

    Args:
        text: The value of the flag.
        words: Further values that the flag accepts, for the error.

    Raises:
        ValueError: `text` does not name ranks.
    """
    ranks: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            expected = ", or ".join(["ranks such as 0,8-15", *words])
            raise ValueError(f"expected {expected}; got {text!r}{suggestion(text, words)}")
        if dash and int(first) > int(last):
            raise ValueError(f"the range {part.strip()!r} is reversed. Did you mean {last}-{first}?")
        ranks.update(dict.fromkeys(range(int(first), int(last or first) + 1)))
    return list(ranks)


def with_header(command: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` with the version of the schema, the command and the versions, which begin each JSON."""
    return {"schema": SCHEMA, "command": command, "versions": versions(), **content}


def write_json(target: Path | None, command: str, content: dict[str, Any]) -> None:
    """Write the results of `command` to `target`, or to stdout for `-`, with the version of the schema.

    Does nothing if `target` is None.
    """
    if target is None:
        return
    text = json.dumps(with_header(command, content), indent=1) + "\n"
    if target == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        target.write_text(text, encoding="utf-8")


def colored(text: str, color: str, stream: TextIO) -> str:
    """Return `text` in a color if `stream` is a terminal and the variable `NO_COLOR` is unset or empty."""
    if os.environ.get("NO_COLOR") or not stream.isatty():
        return text
    return f"\x1b[{CODES[color]}m{text}\x1b[0m"


def suggestion(name: str, known: Iterable[str], most: int = 3) -> str:
    """Return `. Did you mean ...?` with at most `most` of the nearest known names, or nothing if none is near."""
    near = get_close_matches(name, list(known), n=most, cutoff=0.65) if name else []
    return f". Did you mean {' or '.join(near)}?" if near else ""


def log_to_stderr() -> None:
    """Print all log messages of `torchext.*` to stderr."""
    logger = logging.getLogger("torchext")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Parse the arguments, by default those of the process, run the command in `options.run`, and return its code."""
    try:
        try:
            options = parser.parse_args(arguments)
            if options.verbose:
                log_to_stderr()
            code: int = options.run(options)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has ended, as in `torchext env | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again when it exits
        return BROKEN_PIPE
    return code
