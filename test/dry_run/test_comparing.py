"""Reports loaded from JSON, and the differences between two of them: `torchext report`, `dry-run --compare`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from torchext.commands import main
from torchext.dry_run import Difference, Limit, Report, compare, load_report

MIB = 2**20


def device(reserved: int, lines: dict[str, int], **more: Any) -> dict[str, Any]:
    allocated = sum(lines.values())
    return {
        "device": "cuda:0",
        "peak_allocated": allocated,
        "peak_reserved": reserved,
        "total": 2**36,
        "headroom": 2**36 - reserved,
        "fragmentation": 0,
        "categories": {"activations": allocated},
        "modules": {"": allocated},
        "lines": lines,
        "line_peaks": lines,
        "largest": [],
        **more,
    }


def rank(*devices: dict[str, Any], number: int = 0, **more: Any) -> dict[str, Any]:
    lists = ("collectives", "peers", "values", "files", "remarks", "mismatches")
    empty: dict[str, list[Any]] = {key: [] for key in lists}
    return {
        "rank": number,
        "outcome": "fits",
        "unit": "step",
        "requested": 2,
        "completed": 2,
        "forward_passes": 2,
        "backward_passes": 2,
        "seconds": 1.0,
        "program_exit_code": 0,
        "error": "",
        "error_summary": "",
        "out_of_memory": "",
        "devices": list(devices),
        "flops": None,
        "flops_error": "",
        "code": {},
        **empty,
        **more,
    }


def report(*ranks: dict[str, Any], **more: Any) -> Report:
    content = {"program": ["train.py"], "world_size": 8, "exit_code": 0, "other_mismatches": [], "ranks": list(ranks)}
    return Report({"schema": 1, "command": "dry-run", **content, **more})


def of_lines(lines: dict[str, int], code: dict[str, str] | None = None, **more: Any) -> Report:
    return report(rank(device(sum(lines.values()), lines), code=code or {}), **more)


def changes(old: Report, new: Report) -> list[tuple[str, str, int]]:
    """Return the changes of lines."""
    [one] = compare(old, new).ranks
    return [(line.change, line.name, line.growth) for line in one.devices[0].lines]


class TestReport:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", r"r\.json: The file is not JSON\.$"),
            ("[]", r"r\.json: Expected a report with `command` 'dry-run', got \[\]\.$"),
            ('{"command": "env", "schema": 1}', r"Expected a report with `command` 'dry-run', got 'env'"),
            ('{"command": "dry-run", "schema": 2}', r"Expected a report with `schema` 1, got 2"),
            ('{"command": "dry-run", "schema": 1, "program": [], "world_size": 1, "exit_code": 0}', "no `ranks`"),
        ],
    )
    def test_other_files_are_refused(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_report(tmp_path / "r.json")

    def test_cannot_be_changed(self) -> None:
        found = of_lines({"a.py:1 in f": 1})
        found.to_dict()["ranks"].clear()
        assert found.ranks == (0,)
        with pytest.raises(AttributeError, match="immutable"):
            found._content = {}

    def test_prints_and_shows_the_report(self) -> None:
        found = of_lines({"a.py:1 in f": 3 * MIB})
        assert repr(found) == "<Report: ranks 0 of 8, exit code 0>"
        assert str(found).startswith("rank 0 of 8: fits, 2 of 2 steps in 1.0 s\n")
        assert "activations" in found._repr_html_()
        assert found.to_html().startswith("<!doctype html>")


class TestLines:
    def test_equal_lines_are_left_out(self) -> None:
        lines = {"a.py:1 in f": 5, "a.py:2 in f": 6}
        assert changes(of_lines(lines), of_lines(lines)) == []

    def test_lines_below_an_inserted_line_are_not_new(self) -> None:
        old = of_lines({"a.py:1 in f": 5, "a.py:2 in f": 6, "a.py:9 in g": 5})
        new = of_lines({"a.py:1 in f": 5, "a.py:2 in f": 70, "a.py:3 in f": 6, "a.py:10 in g": 5})
        assert changes(old, new) == [("added", "a.py:2 in f", 70)]

    def test_moved_line_with_other_bytes_has_grown(self) -> None:
        old = of_lines({"a.py:1 in f": 5, "a.py:2 in f": 6})
        new = of_lines({"a.py:2 in f": 5, "a.py:3 in f": 9})
        assert changes(old, new) == [("grown", "a.py:3 in f", 3)]

    def test_code_identifies_a_moved_line(self) -> None:
        old = of_lines({"a.py:1 in f": 5}, {"a.py:1 in f": "x = y"})
        new = of_lines({"a.py:1 in f": 70, "a.py:2 in f": 8}, {"a.py:1 in f": "z = x.float()", "a.py:2 in f": "x = y"})
        assert changes(old, new) == [("added", "a.py:1 in f", 70), ("grown", "a.py:2 in f", 3)]

    def test_edited_line_has_changed(self) -> None:
        old = of_lines({"a.py:1 in f": 5}, {"a.py:1 in f": "x = y"})
        new = of_lines({"a.py:1 in f": 7}, {"a.py:1 in f": "x = y.float()"})
        assert changes(old, new) == [("grown", "a.py:1 in f", 2)]

    def test_edited_line_that_has_grown_is_first(self) -> None:
        old = of_lines({"a.py:1 in f": 5, "a.py:2 in f": 5}, {"a.py:1 in f": "x = y", "a.py:2 in f": "return x"})
        new = of_lines({"a.py:1 in f": 7, "a.py:2 in f": 90}, {"a.py:1 in f": "x = 2 * y", "a.py:2 in f": "return x"})
        assert changes(old, new) == [("grown", "a.py:1 in f", 2), ("grown", "a.py:2 in f", 85)]
        assert "edited   5 B   7 B    +2 B  a.py:1 in f  x = 2 * y" in str(compare(old, new))

    def test_line_that_allocated_at_another_moment_is_not_edited(self) -> None:
        code, peaks = {"a.py:1 in f": "x = y", "a.py:2 in f": "return x"}, {"a.py:1 in f": 5, "a.py:2 in f": 9}
        old = report(rank(device(5, {"a.py:1 in f": 5}, line_peaks=peaks), code=code))
        new = report(rank(device(9, {"a.py:2 in f": 9}, line_peaks=peaks), code=code))
        [found] = compare(old, new).ranks[0].devices
        assert [(one.change, one.is_edited) for one in found.lines] == [("added", False), ("removed", False)]
        assert found.line_peaks == ()

    @pytest.mark.parametrize("missing", ["base", "new report"])
    def test_report_without_peaks_of_lines_has_no_false_changes(self, missing: str) -> None:
        with_peaks = report(
            rank(
                device(9, {"a.py:2 in f": 9}, line_peaks={"a.py:1 in f": 5, "a.py:2 in f": 9}),
                code={"a.py:1 in f": "x = y", "a.py:2 in f": "return x"},
            )
        )
        content = report(rank(device(5, {"a.py:1 in f": 5}), code={"a.py:1 in f": "x = z"})).to_dict()
        del content["ranks"][0]["devices"][0]["line_peaks"]
        pair = [Report(content), with_peaks]
        found = compare(*(pair if missing == "base" else pair[::-1]))
        [one] = found.ranks[0].devices
        assert one.line_peaks == ()
        assert one.lines
        assert not any(line.is_edited for line in one.lines)
        assert found.notes == (f"The {missing} has no peaks of lines; make it again.",)

    def test_device_of_one_report_only_has_peaks_of_lines(self) -> None:
        found = compare(report(rank()), of_lines({"a.py:1 in f": 5}))
        assert [line.change for line in found.ranks[0].devices[0].line_peaks] == ["added"]
        assert not found.notes

    def test_paths_are_relative_to_the_folder_of_the_report(self) -> None:
        old = of_lines({"/base/a.py:1 in f": 5}, folder="/base")
        new = of_lines({"/head/a.py:1 in f": 5}, folder="/head")
        assert changes(old, new) == []

    def test_function_of_another_name_is_another_line(self) -> None:
        old, new = of_lines({"a.py:1 in f": 5}), of_lines({"a.py:1 in g": 5})
        assert changes(old, new) == [("removed", "a.py:1 in f", -5), ("added", "a.py:1 in g", 5)]


class TestComparison:
    def test_largest_change_is_first(self) -> None:
        old = of_lines({"a.py:1 in f": 50, "a.py:2 in g": 6, "b.py:1 in h": 1})
        new = of_lines({"a.py:1 in f": 10, "a.py:2 in g": 9, "c.py:1 in h": 90})
        assert [change for change, _, _ in changes(old, new)] == ["added", "shrunk", "grown", "removed"]

    def test_collectives_and_operations_are_compared(self) -> None:
        def of(nbytes: int, flops: int | None) -> Report:
            row = {"phase": "step 1", "group": "world", "group_size": 8, "operator": "allreduce", "calls": 1}
            return report(rank(collectives=[{**row, "bytes_sent": nbytes, "bytes_received": nbytes}], flops=flops))

        [one] = compare(of(4, 100), of(6, 300)).ranks
        assert one.collectives == (Difference("step 1: allreduce in world", 8, 12),)
        assert one.flops == (Difference("step", 100, 300),)
        assert compare(of(4, None), of(4, 300)).ranks[0].flops == ()

    def test_ranks_and_settings_that_differ_are_noted(self) -> None:
        old = report(rank(number=0), rank(number=1), values="raise")
        new = report(rank(number=1, outcome="failed"), rank(number=2), values="assume")
        found = compare(old, new)
        assert [one.rank for one in found.ranks] == [1]
        assert found.notes == (
            "The reports differ in values: raise before, assume now.",
            "Rank 1 did not reach its goal in the new report, so its peaks may be too small.",
            "Rank 2 is not in the base.",
            "Rank 0 is only in the base.",
        )

    def test_reports_without_a_common_rank_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"no rank in common: the base has \(0,\), the new one \(1,\)"):
            compare(report(rank(number=0)), report(rank(number=1)))

    def test_is_json_text_markdown_and_html(self) -> None:
        found = compare(of_lines({"a.py:1 in f|g": MIB}), of_lines({"a.py:1 in f|g": 3 * MIB}))
        [line] = json.loads(json.dumps(found.to_dict()))["ranks"][0]["devices"][0]["lines"]
        name = "a.py:1 in f|g"
        assert line == {
            "name": name,
            "base": MIB,
            "head": 3 * MIB,
            "growth": 2 * MIB,
            "change": "grown",
            "code": "",
            "is_edited": False,
        }
        row = r"| 0 | cuda:0 | reserved | 1.00 MiB | 3.00 MiB | +2.00 MiB | +200.0 % |"
        assert row in found.to_markdown()
        assert r"| grown | 1.00 MiB | 3.00 MiB | +2.00 MiB | `a.py:1 in f\|g` |" in found.to_markdown()
        assert "grown   1.00 MiB  3.00 MiB  +2.00 MiB  a.py:1 in f|g" in str(found)
        assert "<table>" in found._repr_html_()

    def test_ranks_that_changed_alike_share_tables(self) -> None:
        def ranks(*nbytes: int) -> Report:
            return report(*(rank(device(n, {"a.py:1 in f": n}), number=i) for i, n in enumerate(nbytes)))

        titles = [line for line in str(compare(ranks(1, 1, 1, 5), ranks(9, 9, 9, 7))).splitlines() if "By line" in line]
        assert titles == [
            f"By line {moment} of cuda:0 on {which}"
            for which in ("ranks 0, 1, 2", "rank 3")
            for moment in ("at the peak", "at any moment")
        ]

    def test_equal_reports_have_no_tables(self) -> None:
        same = of_lines({"a.py:1 in f": MIB})
        assert str(compare(same, same)) == "No peak has changed."


class TestLimit:
    @pytest.mark.parametrize(
        ("text", "base", "head", "exceeded"),
        [
            ("1%", 1000, 1010, False),
            ("1%", 1000, 1011, True),
            ("0%", 1000, 1001, True),
            ("0%", 1000, 900, False),
            ("50%", 0, 1, True),
            ("1KiB", 1000, 2024, False),
            ("1KiB", 1000, 2025, True),
        ],
    )
    def test_is_exceeded_by_more_growth(self, text: str, base: int, head: int, exceeded: bool) -> None:
        assert Limit.parse(text).is_exceeded_by(Difference("peak", base, head)) is exceeded

    @pytest.mark.parametrize("text", ["", "%", "-1%", "1 %%", "MiB", "1 parsec"])
    def test_other_texts_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected a percentage such as 1%, or a size such as 100MiB"):
            Limit.parse(text)

    def test_of_memory_of_the_host_applies_without_gpus_only(self) -> None:
        def with_host(nbytes: int, *others: dict[str, Any]) -> Report:
            return report(rank(*others, device(nbytes, {}, device="cpu", total=0)))

        gpu, limit = device(5, {}), Limit.parse("1%")
        assert not compare(with_host(1, gpu), with_host(9, gpu)).exceeds(limit)
        assert compare(with_host(1), with_host(9)).exceeds(limit)


# A small language model, and the edits that seed regressions.
TRAIN = """
    import torch
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 64)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(8))
            self.head = torch.nn.Linear(64, 4096)

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    model = Model().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(100):
        x = torch.randn(2048, 64, device="cuda", dtype=torch.bfloat16)
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(2048, dtype=torch.long, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
UPCAST = ("    loss =", "    # The loss is more exact in float32.\n    logits = logits.float()\n    loss =")


@pytest.fixture
def train(forked_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the program, for which `base.json` has a report."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(dedent(TRAIN))
    assert main(["dry-run", "--json", "base.json", "--quiet", "--", "train.py"]) == 0
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.ci
def test_regression_is_located_in_every_format(train: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line, code = "train.py:30 in <module>", "logits = logits.float()"
    edit(train, *UPCAST)
    flags = ["--compare", "base.json", "--fail-above", "1%", "--markdown", "comment.md", "--json", "head.json"]
    assert main(["dry-run", *flags, "--quiet", "--", "train.py"]) == 5
    found = json.loads(Path("head.json").read_text())
    lines = found["comparison"]["ranks"][0]["devices"][0]["lines"]
    assert (found["exit_code"], lines[0]["name"], lines[0]["code"]) == (5, line, code), lines
    assert f"`{line}` | `{code}` |" in Path("comment.md").read_text()
    assert Path("comment.md").read_text().endswith("**A peak grew by more than 1 %.**\n")

    capfd.readouterr()
    assert main(["report", "head.json", "--compare", "base.json"]) == 0
    assert code in capfd.readouterr().out
    assert main(["report", "head.json", "--compare", "base.json", "--fail-above", "1%", "--json", "-"]) == 5
    assert json.loads(capfd.readouterr().out)["comparison"] == found["comparison"]


@pytest.mark.ci
def test_equal_runs_have_equal_peaks(train: Path) -> None:
    flags = ["--compare", "base.json", "--fail-above", "0%", "--markdown", "comment.md", "--report", "head.html"]
    assert main(["dry-run", *flags, "--json", "head.json", "--quiet", "--", "train.py"]) == 0
    assert Path("comment.md").read_text() == "### Peak memory\n\nNo peak has changed.\n"
    assert load_report("head.json").to_dict()["comparison"]["ranks"][0]["devices"][0]["lines"] == []
    assert main(["report", "head.json", "--html", "later.html", "--quiet"]) == 0
    assert Path("later.html").read_text() == Path("head.html").read_text()


@pytest.mark.ci
def test_failed_rank_keeps_its_code(train: Path) -> None:
    train.write_text("import torch\ntorch.empty(1 << 30, device='cuda')\nraise ValueError")
    assert main(["dry-run", "--compare", "base.json", "--fail-above", "1%", "--", "train.py"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fail-above", "1%"], "--fail-above needs --compare BASE.json"),
        (["--compare", "no.json"], "No such file or directory: 'no.json'"),
        (["--compare", "train.py"], "train.py: The file is not JSON."),
        (["--compare", "base.json", "--fail-above", "much"], "expected a percentage such as 1%, or a size"),
        (["--compare", "base.json", "--markdown", "-", "--json", "-"], "cannot both write to stdout"),
        (["--compare", "base.json", "--world-size", "2", "--rank", "1"], "the base has none of these ranks; it has 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("base.json").write_text(json.dumps(report(rank()).to_dict()))
    with pytest.raises(SystemExit, match="2"):
        main(["dry-run", *arguments, "--", "train.py"])
    assert message in capsys.readouterr().err


@pytest.mark.ci
def test_recipe_compares_two_commits(tmp_path: Path) -> None:
    """The recipe for CI, on two commits of a repository: the second one has a regression."""
    root, repository, out = Path(__file__).parents[2], tmp_path / "repository", tmp_path / "out"
    recipe = root / "examples" / "ci" / "watch_the_peak.sh"
    repository.mkdir()
    out.mkdir()
    paths = {"OUT": str(out), "TORCHEXT": f"{sys.executable} -m torchext", "PYTHONPATH": str(root)}
    people = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def run(*command: str) -> int:
        return subprocess.run(command, cwd=repository, env=os.environ | paths | people, check=False).returncode

    train = repository / "train.py"
    train.write_text(dedent(TRAIN))
    assert run("git", "init", "-q") == run("git", "add", "train.py") == run("git", "commit", "-qm", "Train") == 0
    edit(train, *UPCAST)
    assert run("git", "commit", "-qam", "Compute the loss in float32") == 0
    assert run(str(recipe), "HEAD~1", "HEAD", "--", "train.py") == 5
    assert (
        "| added | 0 B | 32.00 MiB | +32.00 MiB | `train.py:30 in <module>`" in (out / "comment.markdown").read_text()
    )
    assert load_report(out / "head.json").exit_code == 5
    assert {path.name for path in out.iterdir()} == {"base.json", "head.json", "comment.markdown"}


def test_reports_of_earlier_versions_load() -> None:
    """They have the times of the machine in place, and may have no timeline."""
    old = report(rank(device(4, {})), rank(device(4, {}), number=1, timeline={"points": [[0, 4, 4]], "seconds": [0.5]}))
    content = old.to_dict()
    assert content["measured"] == [{"seconds": 1.0, "timeline": []}, {"seconds": 1.0, "timeline": [0.5]}]
    assert all("seconds" not in rank for rank in content["ranks"])
    assert "seconds" not in content["ranks"][1]["timeline"]
    again = Report(json.loads(json.dumps(content)))
    assert again == old
    assert str(again) == str(old)
    assert again.to_dict() == content
    first, second = content["measured"]
    for damaged in ([], [first], [first, {}], [first, None], [first, second, second], 5, {"0": first, "1": second}):
        with pytest.raises(ValueError, match="The report has no `seconds` for each of its ranks"):
            Report({**content, "measured": damaged})
