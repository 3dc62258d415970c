"""Write docs/reference/command_line.md, the reference of the command line; `--check` only compares.

It reads argparse's parsers, not their help texts, which differ between versions of Python.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from generated_page import write_or_check

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Command line

All commands of torchext with their flags and arguments.

<!-- written by docs/reference/command_line.py -->
"""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers by the words that call them."""
    from torchext.commands import parsers

    return parsers()


def page(commands: dict[str, argparse.ArgumentParser]) -> str:
    """Return the text of the page."""
    text = HEAD + "".join("\n" + "\n".join(section(name, parser)) + "\n" for name, parser in commands.items())
    return re.sub(r"\n{3,}", "\n\n", text)


def section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines on one command: usage, description, and a table for each group of arguments."""
    yield from (f"## {name}", "", "```text", usage(parser), "```")
    if parser.description:
        yield from prose(parser.description)
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        rows = [row for action in actions for row in rows_of(action, parser)]
        if rows:
            title = (group.title or "options").capitalize()
            yield from ("", f"| {title} | |", "| --- | --- |", *rows)
    if parser.epilog:
        yield from prose(parser.epilog)


def usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage on one line for each flag that fits, the same on every version of Python and terminal."""
    words = [parser.prog]
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        word = f"{action.option_strings[-1]} {_values(action)}".strip() if action.option_strings else _values(action)
        words.append(word if action.required or not action.option_strings else f"[{word}]")
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > 100:
            lines.append("   ")
        lines[-1] += f" {word}"
    return "\n".join(lines)


def rows_of(action: argparse.Action, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the rows of the table on one argument; a command with subcommands has one for each."""
    if isinstance(action, argparse._SubParsersAction):
        for choice in action._choices_actions:
            yield _row(f"`{choice.dest}`", choice.help or "")
        return
    names = ", ".join(f"`{name} {_values(action)}`".replace(" `", "`") for name in action.option_strings)
    yield _row(names or f"`{_values(action)}`", _help(action, parser))


def _row(name: str, words: str) -> str:
    cells = (" ".join(cell.split()).replace("|", r"\|") for cell in (name, words))
    return f"| {' | '.join(cells)} |"


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    choices = ", ".join(map(str, action.choices or ()))
    return code_in((action.help or "") % {**vars(action), "choices": choices, "prog": parser.prog})


def code_in(text: str) -> str:
    """Return `text` with flags marked as code."""
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)(?![\w`])", r"`\1`", text)


def _values(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):
        return "COMMAND ..."
    if action.nargs == 0:
        return ""
    default = action.dest.upper() if action.option_strings else action.dest
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else default
    name = action.metavar or choices
    if not isinstance(name, str):
        return " ".join(name)
    forms = {argparse.REMAINDER: "{} ...", "*": "[{} ...]", "?": "[{}]", "+": "{0} [{0} ...]"}
    form = forms.get(action.nargs, "{}") if isinstance(action.nargs, str) else " ".join(["{0}"] * (action.nargs or 1))
    return form.format(name)


def prose(text: str) -> Iterator[str]:
    """Yield the lines of a description: indented lines are examples or lists, which become code."""
    for part in filter(None, re.split(r"((?:^  .*\n?)+)", text, flags=re.M)):
        if part.startswith("  "):
            yield from ("", "```text", textwrap.dedent(part).rstrip(), "```")
        elif part.strip():
            words = re.sub(r"^([a-z])(?=[a-z ]*:$)", lambda match: f"\n{match[1].upper()}", part.strip(), flags=re.M)
            yield from ("", code_in(words.lstrip()))


if __name__ == "__main__":
    write_or_check(PAGE, page(parsers()))
