"""Quotations and names in docs and comments exist: messages, files, notes, Python names, make targets.

Messages are quoted in these forms, in which `...` stands for varying parts:

- in docs/how_to/troubleshooting.md, the code in the first column of the table;
- elsewhere in a page, ``code`` between two backticks, and a sentence between double quotes;
- a line of a listing that begins with the name of an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from documents import (
    CPP,
    FAILURES,
    PAGES,
    PYTHON,
    ROOT,
    alternatives,
    codes,
    comments,
    exists,
    headings,
    is_a_name,
    is_defined,
    is_ours,
    is_part_of,
    messages,
    notes,
    paths_in_page,
    plain,
    quotes,
    relative,
)
from torch._subclasses import FakeTensorMode

from torchext import amp
from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import fake_mode
from torchext.inference import inference_mode


def fake_empty(*sizes: int) -> torch.Tensor:
    with fake_mode():
        return torch.empty(sizes)


def fake_ones(*shape: int) -> torch.Tensor:
    with fake_mode():
        return torch.ones(*shape)


def inference_ones(*shape: int) -> torch.Tensor:
    with inference_mode():
        return torch.ones(*shape)


def read_of_external(change: Callable[[torch.Tensor], object]) -> None:
    real = torch.ones(2**19)  # 2 MiB, too large to be copied
    deferred = deferred_init(lambda: torch.zeros(2**19).add_(real))
    change(real)
    materialize_tensor(deferred)


def write_fake_into_deferred() -> None:
    fake = fake_ones(2)
    materialize_tensor(deferred_init(lambda: torch.zeros(2).add_(fake)))


def call_custom_op_without_fake() -> None:
    with torch.library._scoped_library("torchext_test_docs", "FRAGMENT"):
        op = torch.library.custom_op(
            "torchext_test_docs::g", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op(fake_ones(2))


def leave_blocks_in_turns() -> None:
    first, second = inference_mode(), inference_mode()
    first.__enter__()
    second.__enter__()
    try:
        first.__exit__(None, None, None)
    finally:
        second.__exit__(None, None, None)


def run_backward_in_region() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with amp.autocast("cpu"):
        (weight @ weight).sum().backward()


def multiply_dtypes() -> None:
    with amp.autocast("cpu"):
        low = torch.ones(2, 2) @ torch.ones(2, 2)
    low @ torch.ones(2, 2)


def call_without_meta_kernel() -> None:
    with torch.library._scoped_library("torchext_test_docs", "DEF") as library:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", torch.clone, "CPU")
        torch.ops.torchext_test_docs.f(fake_ones(2))


def coalesce_fake() -> None:
    with fake_mode():
        indices = torch.zeros(1, 3, dtype=torch.int64)
        torch.sparse_coo_tensor(indices, torch.ones(3), (4,), check_invariants=False).coalesce()


def save_for_backward() -> None:
    inference_ones(2) * torch.ones(2, requires_grad=True)


def call_under_pytorchs_mode() -> None:
    fake = fake_ones(2)
    with FakeTensorMode():
        fake + 1


def add_across_devices() -> None:
    with fake_mode(gpu=1):
        torch.ones(2) + torch.ones(2, device="cuda")


def use_device_beyond_the_last() -> None:
    with fake_mode(gpu=1):
        torch.ones(2, device="cuda:1")


# PyTorch's messages, which have to be raised for the comparison.
OF_PYTORCH: dict[str, Callable[[], object]] = {
    "Inference tensors cannot be saved for backward": save_for_backward,
    "Inference tensors cannot be saved for backward. Please do not use Tensors created in inference mode in ...": (
        save_for_backward
    ),
    "Inference tensors do not track version counter": lambda: inference_ones(2)._version,
    "Inplace update to inference tensor": lambda: inference_ones(2).add_(1),
    "expected m1 and m2 to have the same dtype": multiply_dtypes,
    "`...` cannot be run on fake tensors: ... there was no fake impl or Meta kernel registered": (
        call_without_meta_kernel
    ),
    "There was no fake impl registered for": call_custom_op_without_fake,
    "Please convert all Tensors to FakeTensors first": call_under_pytorchs_mode,
}
RAISED: dict[str, Callable[[], object]] = {
    **OF_PYTORCH,
    "`aten::...` needs the values of its arguments, but at least one is a fake tensor": lambda: fake_empty(2).nonzero(),
    "This tensor is fake: ... no data to read, write, share or save": lambda: fake_ones(2).data_ptr(),
    "needs the data of a tensor of shape ..., but this tensor is fake": lambda: fake_empty(2).numpy(),
    "is that of fake tensors and has no data": lambda: fake_ones(2).untyped_storage()[0],
    "`aten::...` was recorded with a real tensor of shape ... that has been changed in place since": (
        lambda: read_of_external(lambda real: real.add_(1))
    ),
    "while replaying `aten::...`": lambda: read_of_external(lambda real: real.add_(1)),
    "`aten::...` was recorded with a real tensor of shape ... whose memory has been freed since": (
        lambda: read_of_external(lambda real: real.untyped_storage().resize_(0))
    ),
    "`aten::...` was recorded with a fake tensor ... not constructed by deferred_init": write_fake_into_deferred,
    "A fake tensor ... cannot be materialized": lambda: materialize_tensor(fake_ones(2)),
    "would write the result of fake tensors into the real tensor": lambda: torch.ones(2).copy_(fake_ones(2)),
    "Fake tensors are strided or sparse, but ...": lambda: torch.quantize_per_tensor(fake_ones(2), 1, 0, torch.qint8),
    "... how many elements the result has depends on them": coalesce_fake,
    "A block of inference_mode() ... was left": leave_blocks_in_turns,
    "runs backward() inside an autocast region": run_backward_in_region,
    "Expected all tensors to be on the same device": add_across_devices,
    "invalid device ordinal": use_device_beyond_the_last,
}


class TestQuotedMessages:
    def test_are_found(self) -> None:
        assert len(quotes(FAILURES)) > 15
        assert sum(len(quotes(page)) for page in PAGES) > 25

    @pytest.mark.cases(19)
    @pytest.mark.parametrize(
        ("page", "quote"), [pytest.param(page, quote, id=quote) for page in PAGES for quote in quotes(page)]
    )
    def test_are_messages_of_the_sources_or_of_pytorch(self, page: Path, quote: str) -> None:
        if quote in OF_PYTORCH:
            return  # raised below
        assert any(is_part_of(quote, message) for message in messages()), f"no code prints what {page.name} quotes"

    def test_that_no_code_prints_are_detected(self) -> None:
        assert not any(is_part_of("This tensor is fake: ... no data to read or write", text) for text in messages())

    @pytest.mark.parametrize("quote", RAISED)
    def test_are_raised(self, quote: str) -> None:
        pattern = ".*".join(re.escape(part) for part in quote.split("..."))
        with pytest.raises((RuntimeError, ValueError, AssertionError, Warning), match=f"(?s){pattern}"):
            RAISED[quote]()

    def test_that_are_raised_here_are_quoted_somewhere(self) -> None:
        assert RAISED.keys() <= {quote for page in PAGES for quote in quotes(page)}


class TestNames:
    @pytest.mark.parametrize("page", PAGES, ids=relative)
    def test_files_that_pages_name_exist(self, page: Path) -> None:
        missing = [name for name in paths_in_page(page) if not exists(name, page)]
        assert not missing

    @pytest.mark.parametrize("page", PAGES, ids=relative)
    def test_headings_that_links_name_exist(self, page: Path) -> None:
        for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert heading in headings(linked), f"{page.name} links to #{heading} of {linked.name}"

    def test_files_that_comments_name_exist(self) -> None:
        missing = [
            f"{relative(path)}: {name}"
            for path in [*CPP, *PYTHON]
            for name in re.findall(r"[\w/.-]*\w\.(?:h|cpp|md|py)\b", comments(path))
            if is_ours(name, path) and not exists(name, path)
        ]
        assert not missing

    def test_notes_that_are_cited_are_written(self) -> None:
        missing = [
            f"{relative(path)}: [{note}]"
            for path in [*CPP, *PYTHON, *PAGES]
            for note in re.findall(r"NOTE\s\[([^\]]+)\]", plain(comments(path)))
            if note not in notes()
        ]
        assert not missing

    def test_notes_are_listed_with_their_files(self) -> None:
        table = (ROOT / "csrc" / "FILES.md").read_text()
        listed = re.findall(r"^\| (.+?) \| `([\w/]+\.\w+)` \|$", table, re.M)
        places = [(note, file if file.startswith("torchext/") else f"csrc/{file}") for note, file in listed]
        assert sorted(places) == sorted(notes().items())

    @pytest.mark.parametrize("page", PAGES, ids=relative)
    def test_names_of_python_that_pages_name_exist(self, page: Path) -> None:
        for name in set(re.findall(r"(?<!/)\btorchext(?:\.\w+)+", page.read_text())):
            assert is_a_name(name), f"{page.name} names {name}"

    def test_names_that_the_glossary_gives_are_defined_in_its_folders(self) -> None:
        rows = re.findall(r"^\| .+ \| (.+) \|$", (ROOT / "docs" / "reference" / "glossary.md").read_text(), re.M)
        places = [place for row in rows if row.startswith(("`", "csrc", "torchext")) for place in row.split("; ")]
        assert len(places) > 40
        folders = {place: ROOT / place.rpartition(", ")[2] for place in places}
        assert not [place for place, folder in folders.items() if not folder.is_dir()]
        assert not [place for place in places for name in codes(place) if not is_defined(name, folders[place])]

    def test_names_that_a_folder_only_uses_are_detected(self) -> None:
        assert is_defined("kToBeCleaned", ROOT / "csrc" / "extensions" / "marks")
        assert not is_defined("kToBeCleaned", ROOT / "csrc" / "core" / "amp")

    @pytest.mark.parametrize("page", PAGES, ids=relative)
    def test_targets_of_make_that_pages_name_exist(self, page: Path) -> None:
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        assert set(re.findall(r"(?:`|^    )make ([\w-]+)", page.read_text(), re.M)) <= targets

    def test_table_of_tests_lists_each_file_once(self) -> None:
        rows = re.findall(r"^\| (`.+?`) \|", (ROOT / "test" / "README.md").read_text(), re.M)
        listed = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]
        tests = [str(path.relative_to(ROOT / "test")) for path in (ROOT / "test").rglob("test_*.py")]
        assert sorted(name for name in listed if "test_" in name) == sorted(tests)

    def test_table_of_the_c_sources_lists_each_file(self) -> None:
        text = (ROOT / "csrc" / "FILES.md").read_text()
        named = {name.rpartition("/")[2].removesuffix(".h") for code in codes(text) for name in alternatives(code)}
        missing = [path for path in (ROOT / "csrc").rglob("*.h") if path.stem not in named]
        assert not [relative(path) for path in missing if path.parent.name != "python"]


@pytest.mark.ci  # starts Python anew
@pytest.mark.parametrize("page", ["cuda_names", "operator_traits"])
def test_page_is_printed_from_the_tables(page: str) -> None:
    command = [sys.executable, ROOT / "docs" / "reference" / f"{page}.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
