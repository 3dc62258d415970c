"""Write docs/reference/api_table.md, the table of the public API; `--check` only compares."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from generated_page import write_or_check

import torchext

PAGE = Path(__file__).with_suffix(".md")
STUB = Path(torchext.__file__).with_name("_C.pyi")


def page() -> str:
    """Return the text of the page."""
    lines = [
        "# Public API",
        "",
        "All public names, with their signatures and results. `python docs/reference/api_table.py` writes this page",
        "from the docstrings. Deprecated names are not listed: they work, and a warning names the new one.",
    ]
    for module in modules():
        lines += ["", f"## `{module.__name__}`", "", _cells(inspect.getdoc(module)), "", "| name | summary |"]
        lines += ["| --- | --- |", *(f"| `{_escaped(call)}` | {summary} |" for call, summary in rows(module))]
    return "\n".join(lines) + "\n"


def modules() -> Iterator[ModuleType]:
    """Yield the public modules, the package first."""
    yield torchext
    for name in torchext.__all__:
        if isinstance(member := getattr(torchext, name), ModuleType):
            yield member
            importlib.import_module(member.__name__)


def rows(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the signature and the summary of each public name of a module, in alphabetical order."""
    for name in sorted(module.__all__, key=str.lower):
        member = getattr(module, name)
        if module is torchext and (isinstance(member, ModuleType) or name in torchext.errors.__all__):
            continue  # has its own section, or a row in `torchext.errors`
        if isinstance(member, str):
            yield f"{name}: str", "The version." if name == "__version__" else f"The name {member!r} in results."
        else:
            yield name + signature_of(member), _cells(inspect.getdoc(member))


def signature_of(member: object) -> str:
    """Return the parameters with their defaults, and the annotation of the result."""
    if isinstance(member, type) and issubclass(member, enum.Enum):
        return f": {', '.join(member.__members__)}"
    if isinstance(member, type) and issubclass(member, BaseException):
        return f"({', '.join(base.__name__ for base in member.__bases__)})"
    if isinstance(member, type) and (found := _signature_in_stub(member)):
        return found
    signature = inspect.signature(member)  # type: ignore[arg-type]
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    result = "" if isinstance(member, type) else f" -> {signature.return_annotation}"
    result = result.replace("-> Iterator[", "-> AbstractContextManager[")  # of `@contextmanager`
    return f"{inspect.Signature(parameters)}{result}"


def _signature_in_stub(cls: type) -> str:
    """Return the parameters of a class whose base is written in C++."""
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__base__.__name__:  # type: ignore[union-attr]
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__new__":
                    for argument in [*function.args.args, *function.args.kwonlyargs]:
                        argument.annotation = None
                    return f"({ast.unparse(function.args).removeprefix('cls, ').removeprefix('cls')})"
    return ""


def _cells(doc: str | None) -> str:
    return " ".join((doc or "").partition("\n\n")[0].split())


def _escaped(code: str) -> str:
    return code.replace("|", "\\|")


if __name__ == "__main__":
    write_or_check(PAGE, page())
