"""The command `torchext completion`: scripts that complete commands and flags in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

__all__ = ["configure"]

Parsers = Mapping[str, argparse.ArgumentParser]

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


def configure(parser: argparse.ArgumentParser, parsers: Callable[[], Parsers]) -> None:
    """Make `parser` the parser of this command, which completes the flags of `parsers`."""
    parser.description = (
        "Print a script that completes commands and flags. Load it with source <(torchext completion bash)."
    )
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell")
    parser.set_defaults(run=lambda options: _run(options, parsers()), verbose=False)


def _run(options: argparse.Namespace, parsers: Parsers) -> int:
    flags = {name.partition(" ")[2]: " ".join(_flags(parser)) for name, parser in parsers.items()}
    cases = "\n".join(f'    {name}) words="{flags}" ;;' for name, flags in flags.items() if name)
    commands = " ".join([*filter(None, flags), *_flags(parsers["torchext"])])
    print(SCRIPTS[options.shell] + BASH.format(cases=cases, commands=commands), end="")
    return 0


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(flag for flag in parser._option_string_actions if flag.startswith("--"))
