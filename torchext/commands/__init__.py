"""The command `torchext`: dry runs, checkpoints, initial weights, bug reports and routes of calls."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..internals import terminal
from . import dry_run, report
from .flags import configure_check_init, configure_checkpoint, configure_env, configure_route

__all__ = ["main", "parser", "parsers"]


DESCRIPTION = "Build, shard, checkpoint and dry-run PyTorch models that do not fit on your machine."


class _Command(NamedTuple):
    text: str
    configure: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "dry-run": _Command("run ranks of a training job without its GPUs", dry_run.configure),
    "report": _Command("print, convert and compare the reports of dry runs", report.configure),
    "checkpoint": _Command("write the initial checkpoint of a model in bounded memory", configure_checkpoint),
    "check-init": _Command("compare the initial weights on a mesh with those of one process", configure_check_init),
    "env": _Command("print the versions and the state that a bug report needs", configure_env),
    "route": _Command("print the dispatch keys that a call of an operator visits", configure_route),
    "completion": _Command("print a completion script for a shell", lambda parser: _configure_completion(parser)),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command `torchext`."""
    return parsers()["torchext"]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of `torchext` and those of its commands, by their full names, as in `torchext dry-run`."""
    root = terminal.CommandLineParser("torchext", description=DESCRIPTION)
    terminal.add_version(root)
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    found: dict[str, argparse.ArgumentParser] = {"torchext": root}
    for name, command in COMMANDS.items():
        found[f"torchext {name}"] = commands.add_parser(name, help=command.text)
        command.configure(found[f"torchext {name}"])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments, by default those of the process, and return its exit code."""
    return terminal.run_command(parser(), arguments)


# ---- The command `torchext completion`: scripts that complete commands and flags in a shell


# After a script or `--`, and for words that are not flags, file names are completed.
BASH = """\
_torchext() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words i
  case " ${{COMP_WORDS[*]:1:COMP_CWORD-1}} " in *" -- "*) COMPREPLY=(); return;; esac
  case ${{COMP_WORDS[1]}} in
{cases}
    *) words="{commands}" ;;
  esac
  [ "$COMP_CWORD" = 1 ] && words="{commands}"
  [ "$COMP_CWORD" = 1 ] || [[ $word == -* ]] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _torchext torchext
"""
SCRIPTS = {"bash": "", "zsh": "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"}


def _configure_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a script that completes commands and flags. Load it with source <(torchext completion bash)."
    )
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell")
    parser.set_defaults(run=_complete, verbose=False)


def _complete(options: argparse.Namespace) -> int:
    found = parsers()
    flags = {name.partition(" ")[2]: " ".join(_flags(parser)) for name, parser in found.items()}
    cases = "\n".join(f'    {name}) words="{flags}" ;;' for name, flags in flags.items() if name)
    commands = " ".join([*filter(None, flags), *_flags(found["torchext"])])
    print(SCRIPTS[options.shell] + BASH.format(cases=cases, commands=commands), end="")
    return 0


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(flag for flag in parser._option_string_actions if flag.startswith("--"))
