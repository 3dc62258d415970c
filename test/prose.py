"""Check the mechanical part of the writing rules in CONTRIBUTING.md.

    python test/prose.py [--count] [PATH ...]

reads Markdown pages, Python docstrings, comments and messages, and C++ comments and messages. It reports banned
words, constructions that personify code, and, in pages, sentences that are too long. A test runs it on the
whole project.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LONGEST_SENTENCE = 32  # words, in pages

# What is banned, and what to write instead.
BANNED: dict[str, str] = {
    r"\bsooner\b": "faster, earlier",
    r"\bto be had\b": "available",
    r"\bkin\b": "related",
    r"\bas ever\b": "as before",
    r"\bmeanwhile\b": "while ..., in the meantime",
    r"\bbe it\b": "whether ... or ...",
    r"\bin so far\b": "as far as",
    r"\bof which\b": "two sentences",
    r"\bfor which (?:it|he|they|we|there)\b": "two sentences",
    r"\bto the like\b": "and similar ones",
    r"\band the like\b": "and similar ones",
    r",? too[.;:]": "also, before the verb",
    r"\bthere (?:is|are|was|were) none\b": "say what is missing",
    r"\b(?:is|are) no (?:more|longer) than\b": "at most",
    r"\bas (?:it is|they are)\b(?! (?:not|already|in|on|at))": "unmodified, unchanged",
    r"\bfor good\b": "permanently",
    r"\bcom(?:e|es|ing) along\b": "follow, accompany",
    r"\btak(?:e|es) its time\b": "is slow",
    r"\b(?:nobody|somebody|anybody|no one|whoever|whatever)\b": "name the subject",
    r"(?:^|[.;:] )(?:What|Who|Which) (?![^.]*\?)": "name the subject",
    r"\bwhat (?:is|are|was|were|has|have|had|does|do|can|cannot|could|needs|takes|makes) ": "name the subject",
    r"\b(?:who|those who) (?:is|are|has|have|asks?|wants?|needs?|calls?|reads?|writes?)\b": "name the subject",
    r"\b(?:tells?|told|says|asks|asked for|wants|knows|sees|thinks|believes|forgets|forgot|notices)\b": (
        "returns, reports, records, checks"
    ),
    r"\bknows? (?:of|nothing)\b": "handles, has an entry for",
    r"\bnot there\b": "fake, missing, absent",
    r"\bof PyTorch's(?: own)?(?=[.,;:)]|$| (?:and|or|is|are|that|which|has|have|for|in|on|with|to|from|at|by)\b)": (
        "PyTorch's X, a PyTorch X"
    ),
    r"\bof (?:ours|theirs|its own|their own|his own)\b": "our X, its own X",
    r"\bby itself\b(?= (?:it|they|he))": "alone",
    r"\bwhich is to be\b|\bis to be\b|\bare to be\b": "must be, will be",
    r"\b(?:hence|thus|thereby|therein|thereof|whereby|wherein|hereby|herein)\b": "so, therefore",
    r"\bone of many\b": "a rank, a process",
    r"\bbeside(?= (?:that|this|it|them)\b)": "besides, next to",
    r"\bgoes? on (?=\w+ing)": "continues to",
    r"\b(?:shall|ought)\b": "must, will",
}
BRITISH = re.compile(
    r"\b\w*(?:behaviour|colour|favour|honour|neighbour|centre|metre\b|initialis|materialis|serialis|normalis|optimis|"
    r"recognis|organis|synchronis|generalis|specialis|quantis|vectoris|labell|modell|cancell(?!ation)|travell|licence|"
    r"catalogue|grey|whilst|amongst|learnt|spelt|analys(?:e|ed|ing)\b)\w*",
    re.I,
)
# Quotations and terms, with the reason why they stay: (path, the words that are found).
ALLOWED: dict[tuple[str, str], str] = {
    ("test/fake/test_fake_gpus.py", "of which"): "PyTorch's message",
}


class Text(NamedTuple):
    """A paragraph, a comment, a docstring or a literal."""

    path: Path
    line: int
    words: str
    is_page: bool


class Finding(NamedTuple):
    path: str
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r}: {self.instead}"


def findings(path: Path) -> Iterator[Finding]:
    """Yield what breaks the rules in one file."""
    name = str(path.resolve().relative_to(ROOT))
    for text in texts(path):
        words = without_code(text.words)
        found = [(match[0], instead) for ban, instead in _BANS for match in ban.finditer(words)]
        found += [(match[0], "US spelling") for match in BRITISH.finditer(words)]
        if text.is_page:
            found += [
                (f"{' '.join(sentence[:6])} ...", f"a sentence of {len(sentence)} words")
                for sentence in ([word for word in one.split() if word.strip(",.") != "X"] for one in sentences(words))
                if len(sentence) > LONGEST_SENTENCE
            ]
        for what, instead in found:
            if (name, what.strip(" .,;:")) not in ALLOWED:
                yield Finding(name, text.line, what, instead)


_BANS = [(re.compile(ban, re.I if ban.islower() else 0), instead) for ban, instead in BANNED.items()]


def without_code(words: str) -> str:
    """Return `words` with X for code, quotations and addresses."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", words)
    words = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "X", words)
    words = re.sub(r'"[^"]*"|\bhttps?://\S+|\S+_\S+', "X", words)
    return " ".join(words.replace("*", "").split())


def sentences(words: str) -> list[str]:
    """Split a paragraph into sentences."""
    return re.split(r"(?<=[.?!:;])\s+(?=[A-Z`(\[X])", words)


def texts(path: Path) -> Iterator[Text]:
    """Yield the texts of a file."""
    source = path.read_text()
    if path.suffix == ".md":
        yield from _texts_of_page(path, source)
    elif path.suffix == ".py":
        yield from _texts_of_python(path, source)
    elif path.suffix in (".cpp", ".h"):
        yield from _texts_of_cpp(path, source)


def _texts_of_page(path: Path, source: str) -> Iterator[Text]:
    source = re.sub(r"^( *)(```|:::)(?!\{(?:note|tip|warning)\}).*?^ *\2 *$", _blank, source, flags=re.M | re.S)
    source = re.sub(r"<!--.*?-->|<[a-z/][^>]*>", _blank, source, flags=re.S)
    source = re.sub(r"(?<=\n\n)(?:    (?![-*+] ).*\n+)+", _blank, source)
    line, block = 1, list[str]()
    for number, text in enumerate([*source.splitlines(), ""], 1):
        begins = re.match(r"\s*(?:$|[-*+] |\d+\. |#|\||>)", text)
        if begins and block:
            yield Text(path, line, " ".join(block), True)
            block = []
        if text.lstrip().startswith("|"):
            yield from (Text(path, number, cell, True) for cell in re.split(r"(?<!\\)\|", text) if cell.strip(" -:"))
        elif text.strip():
            line = line if block else number
            block.append(re.sub(r"^\s*(?:[-*+] |\d+\. |#+ |> ?)", "", text).strip())


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _texts_of_python(path: Path, source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_prose(node.value):
            prose = re.sub(r"^ *(?:>>>|\.\.\.).*$|^    +[\w.-]+ .*\.py\b.*$", _blank, node.value, flags=re.M)
            yield from (Text(path, node.lineno, part, False) for part in re.split(r"\n\s*\n", prose))
    block, first, last = list[str](), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# type:", "# noqa", "#!")):
            continue
        if block and token.start[0] != last + 1:
            yield Text(path, first, " ".join(block), False)
            block = []
        first, last = first if block else token.start[0], token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield Text(path, first, " ".join(block), False)


def _is_prose(text: str) -> bool:
    return len(re.findall(r"\b[a-z]+\b", text)) > 3 and "\n    def " not in text and "import torch" not in text


def _texts_of_cpp(path: Path, source: str) -> Iterator[Text]:
    block, first, last = list[str](), 0, 0
    for number, text in enumerate([*source.splitlines(), ""], 1):
        comment = re.search(r'(?:^|\s)//+ ?((?:[^"]|"[^"]*")*)$', text)
        if block and (comment is None or number != last + 1 or not comment[1].strip()):
            yield Text(path, first, " ".join(block), False)
            block = []
        if comment is not None:
            first, last = first if block else number, number
            block.append(comment[1])
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', text[: comment.start()] if comment else text)
        yield from (Text(path, number, literal, False) for literal in literals if _is_prose(literal))


def files(paths: list[Path]) -> list[Path]:
    """Return the tracked files in `paths`, or all that the rules apply to."""
    tracked = subprocess.run(
        ["git", "ls-files", *map(str, paths)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [ROOT / name for name in tracked if Path(name).suffix in (".md", ".py", ".cpp", ".h")]


def main() -> None:
    """Print the findings, or their number in each file."""
    arguments = sys.argv[1:]
    paths = [Path(argument).resolve() for argument in arguments if argument != "--count"]
    found = [finding for path in files(paths) if path != Path(__file__).resolve() for finding in findings(path)]
    if "--count" in arguments:
        for name, count in collections.Counter(finding.path for finding in found).most_common():
            print(f"{count:5}  {name}")
    else:
        print(*found, sep="\n")
    print(f"{len(found)} findings", file=sys.stderr)


if __name__ == "__main__":
    main()
