"""Quotations and names in the pages, and the messages and definitions in the sources."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILURES = ROOT / "docs" / "how_to" / "troubleshooting.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "csrc" / "FILES.md",
    *(ROOT / folder / "README.md" for folder in ("csrc", "test", "torchext")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CPP = sorted(
    path
    for folder in ("csrc", "test/cpp", "torchext/include")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".cpp", ".h")
)
PYTHON = sorted(
    path for folder in ("torchext", "test", "benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py")
)
VALUE = "\0"  # stands for the parts of a message that vary


TITLES = {"Fake Tensors & Deferred Module Initialization", "Storages, not tensors"}  # quoted, but not messages

# PyTorch's files that comments and pages name, with their folder if torchext has a file of the same name.
PYTORCHS = {
    "CUDAGeneratorImpl.cpp",
    "BinaryOps.cpp",
    "Device.h",
    "Generator.h",
    "IndexingUtils.h",
    "RNN.cpp",
    "Resize.cpp",
    "TensorConversions.cpp",
    "Utils.cpp",
    "CUDAStream.cpp",
    "sdp_utils.cpp",
    "CUDACachingAllocator.cpp",
    "CublasHandlePool.cpp",
    "ConvolutionMM2d.cu",
    "Attention.cpp",
    "ForeachReduceOp.cu",
    "ForeachUtils.h",
    "EmbeddingBag.cu",
    "Loss.cpp",
    "Loss.cu",
    "attention.cu",
    "flash_api.cpp",
    "group_norm_kernel.cu",
    "kernel_backward.h",
    "kernel_forward.h",
    "layer_norm_kernel.cu",
    "ReduceOps.cpp",
    "ADInplaceOrViewType.cpp",
    "AutocastRNN.cpp",
    "Blas.cpp",
    "Convolution.cpp",
    "Copy.cpp",
    "DistributionTemplates.h",
    "MathBitsFallback.h",
    "ProcessGroupNCCL.cpp",
    "RangeFactories.cpp",
    "default_comm_hooks.cpp",
    "reducer.cpp",
    "reducer.hpp",
    "Distributions.cpp",
    "comm.cpp",
    "python_variable.cpp",
    "Dropout.cpp",
    "Exception.cpp",
    "LinearAlgebra.cpp",
    "MaxPooling.cpp",
    "MetaFallbackKernel.cpp",
    "Normalization.cpp",
    "PythonFallbackKernel.cpp",
    "Resize.h",
    "SpectralOps.cpp",
    "TensorAdvancedIndexing.cpp",
    "TensorFactories.cpp",
    "TensorImpl.h",
    "TensorSubclassLikeUtils.h",
    "_meta_registrations.py",
    "alloc_cpu.cpp",
    "backend_fallback_test.cpp",
    "cudagraph_utils.py",
    "fake_tensor.py",
    "input_buffer.cpp",
    "meta_utils.py",
    "mixed_data_type.h",
    "nested_tensor.py",
    "pybind_utils.cpp",
    "python_scalars.h",
    "saved_variable.cpp",
    "tensor_new.cpp",
    "tensor_new.h",
    "tensor_numpy.cpp",
}
USERS = {"model.py", "train.py"}  # in examples of output


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def plain(text: str) -> str:
    return " ".join(text.split())


# ---- Messages.


@functools.cache
def quotes(page: Path) -> tuple[str, ...]:
    """Yield the messages that a page quotes."""
    text = page.read_text()
    listings = re.findall(r"^ *```.*?^ *```", text, re.S | re.M)
    for listing in listings:
        text = text.replace(listing, "")
    found = [line for listing in listings for line in re.findall(r"^\w+(?:Error|Warning): (.+)$", listing, re.M)]
    if page == FAILURES:
        rows = re.findall(r"^\| (.+?) \|", text, re.M)
        found += [quote for row in rows for quote in codes(row)]
        text = re.sub(r"^\|.*$", "", text, flags=re.M)
    found += [quote for quote in re.findall(r"(?<!`)``(?!`)(.+?)``", text, re.S) if len(quote.split()) > 2]
    text = re.sub(r"(?<!`)(`+)(?!`).*?\1", "", text, flags=re.S)
    found += [quote for quote in re.findall(r'"([^"]+)"', text) if len(quote.split()) > 2 and not quote.endswith("?")]
    return tuple(dict.fromkeys(quote for quote in map(plain, found) if quote not in TITLES))


def codes(text: str) -> list[str]:
    """The code between backticks in a line of a page."""
    return [code.strip() for _, code in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", text)]


def alternatives(code: str) -> list[str]:
    """Return the names that `code` represents. Braces may hold alternatives: `{a,b}_c`."""
    if (braces := re.fullmatch(r"(.*)\{([^{}]*)\}(.*)", code)) is None:
        return [code]
    return [f"{braces[1]}{part.strip()}{braces[3]}" for part in braces[2].split(",")]


def parts_of(quote: str) -> list[str]:
    """Return the fixed parts of a quoted message: the text between the dots, and between the names of operators."""
    return re.sub(r"`\w+::[\w.]+`", "`...`", quote).split("...")


def is_part_of(quote: str, message: str) -> bool:
    """Return true if the parts of `quote` between its dots are in `message`, in this order."""
    start = 0
    for part in filter(None, (part.strip() for part in parts_of(quote))):
        found = message.find(part, start)
        if found < 0:
            return False
        start = found + len(part)
    return True


@functools.cache
def messages() -> tuple[str, ...]:
    """Return the texts in the sources, each with a placeholder for computed parts."""
    from_cpp = (text for path in CPP for text in texts_of_cpp(path.read_text()))
    from_python = (
        text for path in PYTHON if "torchext" in path.parts[len(ROOT.parts) :] for text in texts_of_python(path)
    )
    return tuple({*from_cpp, *from_python})


def texts_of_cpp(source: str) -> Iterator[str]:
    """The literals of each statement, joined."""
    token = re.compile(r"""//[^\n]*|\s+|"((?:[^"\\]|\\.)*)"|([;{}])|('(?:\\.|[^'])'|.)""", re.S)
    text, gap = "", True
    for match in token.finditer(re.sub(r"^#.*$", "", source, flags=re.M)):
        literal, end, other = match.groups()
        if literal is not None:
            text += (VALUE if gap and text else "") + literal.encode().decode("unicode_escape")
            gap = False
        elif end and text:
            yield text
            text, gap = "", True
        elif other:
            gap = True


def texts_of_python(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


# ---- Names.


def comments(path: Path) -> str:
    """Return the comments of a source, or the whole text of a page."""
    text = path.read_text()
    if path.suffix in (".cpp", ".h"):
        return "\n".join(re.findall(r"//+ ?(.*)", text))
    if path.suffix == ".py":
        docs = (ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED))
        return "\n".join([*re.findall(r"# ?(.*)", text), *filter(None, docs)])
    return text


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def notes() -> dict[str, str]:
    """Return the notes and the files that they are in. The heading of a note is followed by an empty line."""
    heading = re.compile(r"^(?:// |# )?NOTE \[([^\]]+)\]\n(?://|#)?\n", re.M)
    return {note: relative(path) for path in [*CPP, *PYTHON] for note in heading.findall(path.read_text())}


def paths_in_page(page: Path) -> Iterator[str]:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            yield target
    for code in codes(text.replace("\n", " ")):
        yield from (
            name for name in re.findall(r"(?:[\w.-]+/)*[\w.-]+\.(?:h|cpp|md|py|pyi)\b", code) if is_ours(name, page)
        )


def is_ours(name: str, where: Path) -> bool:
    """Return false for the name of a file of PyTorch, or of a user's program."""
    last = name.rpartition("/")[2]
    if where.name == "foreign_suites.md":
        return not re.fullmatch(r"test_\w+\.py|names_of_2_6\.py", last)
    if (where.name in ("route.md", "inspect.py")) and re.fullmatch(r"[A-Z]\w+\.cpp", last):
        return False  # the file that registers kernels
    return not name.startswith("torch/") and last not in PYTORCHS | USERS


@functools.cache
def exists(name: str, where: Path) -> bool:
    """Return true if `name` is a file, relative to a folder above `where`, or to one of the roots."""
    folders = [
        *where.parents,
        ROOT,
        *(ROOT / folder for folder in ("csrc", "csrc/core", "csrc/core/fake", "csrc/extensions", "test", "torchext")),
        ROOT / "torchext" / "include",
    ]
    if any((folder / name).exists() for folder in folders if folder.is_relative_to(ROOT)):
        return True
    return "/" not in name and any(path.name == name for path in [*CPP, *PYTHON])


@functools.cache
def headings(page: Path) -> set[str]:
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in lines}


def is_a_name(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        try:
            functools.reduce(getattr, parts[length:], found)
        except AttributeError:
            return False
        return True
    return False


def is_defined(name: str, folder: Path) -> bool:
    """Return true if `name` is a file below `folder`, or is defined or bound by a file there."""
    forms = (
        rf"^(?:class|struct) (?:\w+ )?{name}\b(?!;)",
        rf"^enum class .*\b{name}\b",
        rf"^\w[^=;\n]*[ *&]{name}\(",  # a C++ function
        rf"^\s*def {name}\b",
        rf" as {name}$",
        rf'"{name}"',  # bound, or listed in `__all__`
    )
    definition = re.compile("|".join(forms), re.M)
    files = [path for path in [*CPP, *PYTHON] if path.is_relative_to(folder)]
    return any(path.name == name or definition.search(path.read_text()) for path in files)
