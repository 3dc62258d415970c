"""Documents show the same content as text, HTML and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from torchext.internals.document import Code, Column, Part, Picture, Table, Title, as_html, as_markdown, as_text
from torchext.internals.text import in_units

TABLE = Table(
    ("name", Column("bytes", in_units), Column("unused", is_optional=True), Column("line", is_code=True)),
    [("a|b", 2048, None, "x < `y`"), ("c", None, None, "z")],
)
PARTS: dict[str, tuple[Part, str, str, str]] = {
    "paragraph": ("one\n<two>", "one\n<two>", "<p>one<br>&lt;two&gt;</p>", "one\n<two>"),
    "title": (
        Title("top", ["below"], "fails"),
        "top\nbelow",
        "<h2 class=fails>top</h2><p>below</p>",
        "### top\n\nbelow",
    ),
    "code": (Code("a\n  b"), "    a\n      b", "<pre>a\n  b</pre>", "```\na\n  b\n```"),
    "picture": (Picture("shown", lambda: '"'), "", '<h3>shown</h3><iframe srcdoc="&quot;"></iframe>', ""),
    "table": (
        TABLE,
        "name     bytes  line\n----  --------  -------\na|b   2.00 KiB  x < `y`\nc               z",
        (
            "<table><thead><tr><th>name</th><th>bytes</th><th>line</th></tr></thead><tbody>"
            '<tr><td>a|b</td><td style="text-align: right">2.00 KiB</td><td>x &lt; `y`</td></tr>'
            '<tr><td>c</td><td style="text-align: right"></td><td>z</td></tr></tbody></table>'
        ),
        "| name | bytes | line |\n| --- | ---: | --- |\n| a\\|b | 2.00 KiB | `` x < `y` `` |\n| c |  | `z` |",
    ),
    "table with a title": (
        Table(("n",), [(1,)], "t"),
        "t\nn\n-\n1",
        (
            "<h3>t</h3><table><thead><tr><th>n</th></tr></thead>"
            '<tbody><tr><td style="text-align: right">1</td></tr></tbody></table>'
        ),
        "<details><summary>t</summary>\n\n| n |\n| ---: |\n| 1 |\n\n</details>",
    ),
    "table with a title and no rows": (Table(("n",), [], "t"), "", "", ""),
}


@pytest.mark.parametrize(("part", "text", "html", "markdown"), PARTS.values(), ids=PARTS)
def test_part_has_three_forms(part: Part, text: str, html: str, markdown: str) -> None:
    assert (as_text([part]), as_html([part]), as_markdown([part])) == (text, html, f"{markdown}\n")


@pytest.mark.parametrize(
    ("render", "separator"), [(as_text, "\n\n"), (as_html, "\n"), (lambda parts: as_markdown(parts)[:-1], "\n\n")]
)
def test_parts_without_content_leave_no_gap(render: Callable[[Iterable[Part]], str], separator: str) -> None:
    assert render(["a", "", Table(("n",), [], "t"), Code("b")]) == separator.join([render(["a"]), render([Code("b")])])


def test_table_without_title_shows_its_columns_even_if_empty() -> None:
    assert as_text([Table(("a", "b"), [])]) == "a  b\n-  -"
    assert as_html([Table(("a", "b"), [])]).count("<th>") == 2


def test_table_has_its_values_by_column() -> None:
    assert TABLE.to_dict()[0] == {"name": "a|b", "bytes": 2048, "line": "x < `y`"}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (-1536, "-1.50 KiB"), (3 << 30, "3.00 GiB"), (1 << 50, "1024.00 TiB")],
)
def test_size_has_two_decimals(nbytes: int, text: str) -> None:
    assert in_units(nbytes) == text
