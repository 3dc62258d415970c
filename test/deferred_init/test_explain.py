"""Inspection of recordings: explanations, summaries, graphs, and source lines in errors."""

from __future__ import annotations

import gc
import inspect
import json
import math
import pickle
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from common import too_large_to_copy
from expecttest import TestCase
from torch import Tensor, nn

from torchext import MaterializationError
from torchext.deferred_init import (
    RecordedValue,
    deferred_init,
    explain,
    export_graph,
    materialize_module,
    materialize_tensor,
    summary,
    tracing,
)
from torchext.fake import fake_mode


def line_of(marker: str) -> str:
    """Return the position of the comment `# marker` in this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{__file__}:{number}"


class _Reader:
    """Reads a deferred tensor when it is collected as garbage, which turns its value into a constant."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.cycle = self

    def __del__(self) -> None:
        self.tensor[0].item()


def test_finalizers_that_run_meanwhile_may_read_the_tensor() -> None:
    def construct() -> Tensor:
        tensor = torch.zeros(4)
        for _ in range(500):
            tensor = tensor * 2 + 1
        gc.disable()
        _Reader(tensor)
        gc.set_threshold(500, 1000, 1000)
        gc.enable()
        assert len(explain(tensor)) == 1001
        gc.collect()
        assert torch.equal(tensor, torch.full((4,), math.inf))
        return tensor

    thresholds = gc.get_threshold()
    try:
        deferred_init(construct)
    finally:
        gc.set_threshold(*thresholds)


class TestExplain(TestCase):
    def explain(self, built: object) -> str:
        assert isinstance(built, Tensor)
        return str(explain(built))

    def test_random_operators_record_their_offsets(self) -> None:
        module = deferred_init(nn.Linear, 4, 4)
        self.assertExpectedInline(
            self.explain(module.bias),
            """\
%0: float32[4] = aten::empty.memory_format([4], device=cpu)
%1: float32[4] = aten::uniform_(%0, -0.5, 0.5)  # 4 draws from 16
return %1""",
        )

    def test_views_are_parts_of_values(self) -> None:
        def build() -> Tensor:
            whole = torch.zeros(2, 3)
            whole[1].fill_(5)
            return whole.t()[1:]

        self.assertExpectedInline(
            self.explain(deferred_init(build)),
            """\
%0: float32[2, 3] = aten::zeros([2, 3], device=cpu)
%1: float32[2, 3] = aten::fill_.Scalar(%0 as float32[3] at 3, 5)
return %1 as float32[2, 2] at 1""",
        )

    def test_operators_of_other_tensors_are_included(self) -> None:
        outside = torch.ones(2)

        def build() -> Tensor:
            table = torch.tensor([1, 2])
            values, _ = torch.stack([table + outside, torch.zeros_like(outside)]).sort(descending=True)
            return values.to(torch.complex64).mul(2j).contiguous(memory_format=torch.contiguous_format)

        self.assertExpectedInline(
            self.explain(deferred_init(build)),
            """\
%0: int64[2] = constant(16 bytes)
%1: float32[2] = aten::add.Tensor(%0, real float32[2])
%2: float32[2] = aten::zeros_like(like float32[2])
%3: float32[2, 2] = aten::stack([%1, %2])
%4: float32[2, 2], %5: int64[2, 2] = aten::sort(%3, descending=True)
%6: complex64[2, 2] = aten::_to_copy(%4, dtype=complex64)
%7: complex64[2, 2] = aten::mul.Tensor(%6, complex(0.0, 2.0))
return %7""",
        )

    def test_summary_counts_the_tensors_of_modules(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.BatchNorm1d(16))
                self.head = nn.Linear(16, 16, bias=False)
                self.head.weight = self.body[0].weight
                self.scale = torch.ones(512)

        module: nn.Module = deferred_init(Model)
        materialize_module(module.body[2], buffers_only=True)  # type: ignore[type-var]
        with fake_mode():
            module.register_buffer("unknown", torch.ones(1))
        self.assertExpectedInline(
            str(summary(module)),
            """\
module  class        parameters     bytes  state
------  -----------  ----------  --------  --------------------
(self)  Model                 0  2.00 KiB  deferred, fake
body.0  Linear              272  1.06 KiB  deferred
body.2  BatchNorm1d          32     264 B  deferred, real
head    Linear              256  1.00 KiB  deferred
total                       304  3.32 KiB  deferred, fake, real""",
        )

    def test_summary_of_a_module_without_tensors(self) -> None:
        self.assertExpectedInline(
            str(summary(nn.ReLU())),
            """\
module  class  parameters  bytes  state
------  -----  ----------  -----  -----
total                   0    0 B""",
        )

    def test_graph_leads_from_operations_to_tensors(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2) * 3)
                self.alias = self.weight
                self.register_buffer("table", torch.tensor([1.0]))

        with TemporaryDirectory() as folder:
            path = Path(folder) / "graph.dot"
            export_graph(deferred_init(Tied), path)
            written = path.read_text(encoding="utf-8")
        self.assertExpectedInline(
            written,
            """\
digraph recording {
  node [fontname=monospace];
  op0 [shape=box, label="aten::ones([2], device=cpu)"];
  op1 [shape=box, label="aten::mul.Tensor(%0, 3)"];
  op0 -> op1 [label="%0"];
  op2 [shape=box, label="constant(4 bytes)"];
  tensor1 [label="weight\\lalias\\l"];
  op1 -> tensor1 [label="%1"];
  tensor2 [label="table"];
  op2 -> tensor2 [label="%2"];
}
""",
        )


class TestRecords:
    def test_operations_have_fields(self) -> None:
        torch.manual_seed(0)
        explanation = explain(deferred_init(lambda: torch.rand(3).bernoulli_(0.5)))
        assert len(explanation) == 3
        empty, uniform, bernoulli = explanation
        assert empty.name == "aten::empty"
        assert uniform.name == "aten::uniform_"
        assert uniform.reads == (0,)
        assert uniform.writes == (RecordedValue(1, (3,), torch.float32),)
        assert (uniform.generator_offset, uniform.draws) == (0, 3)
        assert bernoulli.generator_offset == 3
        assert uniform.source is None
        assert explanation[-1] is bernoulli
        assert explanation[1:] == (uniform, bernoulli)
        assert repr(explanation) == str(explanation)

    def test_tensors_stay_deferred(self) -> None:
        tensor = deferred_init(torch.rand, 3)
        before = str(explain(tensor))
        assert str(explain(tensor)) == before
        torch.manual_seed(0)
        assert torch.equal(materialize_tensor(deferred_init(torch.rand, 3)), _rand_after_seed())

    @pytest.mark.parametrize("kind", ["real", "fake", "materialized"])
    def test_without_a_record_there_is_nothing_to_explain(self, kind: str) -> None:
        with fake_mode():
            fake = torch.ones(3)
        tensor = {
            "real": torch.ones(3),
            "fake": fake,
            "materialized": materialize_tensor(deferred_init(torch.ones, 3)),
        }[kind]
        with pytest.raises(ValueError, match=r"Cannot explain a tensor of shape \[3\]: it has no recording"):
            explain(tensor)

    def test_wrong_types_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match=r"explain\(\) takes a tensor, but `tensor` is a Linear"):
            explain(nn.Linear(1, 1))
        with pytest.raises(TypeError, match=r"summary\(\) takes a module, but `module` is a Tensor"):
            summary(torch.ones(1))
        with pytest.raises(TypeError, match=r"export_graph\(\) takes a module, but `module` is a Tensor"):
            export_graph(torch.ones(1), tmp_path / "graph.dot")

    def test_graph_quotes_special_characters_of_dot(self, tmp_path: Path) -> None:
        module = nn.Module()
        module.register_buffer('a"b\\c', deferred_init(torch.ones, 1))
        export_graph(module, tmp_path / "graph.dot")
        assert r'label="a\"b\\c"' in (tmp_path / "graph.dot").read_text()

    def test_summary_of_lazy_and_sparse_tensors(self) -> None:
        module = deferred_init(nn.LazyLinear, 2)
        module.register_buffer("sparse", torch.eye(2).to_sparse())
        assert "deferred, real" in str(summary(module))

    def test_summary_is_text_plain_values_and_html_tables(self) -> None:
        found = summary(deferred_init(nn.Linear, 2, 2), time="predicted")
        assert repr(found) == str(found)
        assert pickle.loads(pickle.dumps(found)) == found
        values = json.loads(json.dumps(found.to_dict()))
        row = {"module": "(self)", "class_name": "Linear", "parameters": 6, "nbytes": 24, "state": "deferred"}
        assert values["modules"][0].items() >= row.items()
        assert values["operators"][0]["operator"] == "aten::uniform_"
        assert isinstance(values["operators"][0]["predicted"], float)
        assert found._repr_html_().count("<table>") == 2


class TestTracing:
    def test_operations_record_the_users_line(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 2)  # in the model
                self.linear.weight.data.mul_(2)  # doubled

        with deferred_init(trace=True):
            module = Model()
        explanation = explain(module.linear.weight)
        assert [op.source for op in explanation] == [
            f"{line_of('in the model')} in __init__",
            f"{line_of('in the model')} in __init__",
            f"{line_of('doubled')} in __init__",
        ]
        assert str(explanation[0]).endswith(f"  # {line_of('in the model')} in __init__")

    def test_a_module_of_pytorchs_own_is_traced_to_its_construction(self) -> None:
        with deferred_init(trace=True):
            module = nn.Linear(2, 2)  # constructed
        assert explain(module.bias)[0].source == (
            f"{line_of('constructed')} in test_a_module_of_pytorchs_own_is_traced_to_its_construction"
        )

    def test_operators_after_construction_are_traced_in_the_block(self) -> None:
        tensor = deferred_init(torch.ones, 2)
        with tracing():
            tensor.add_(1)  # added
        tensor.mul_(2)
        sources = [op.source for op in explain(tensor)]
        assert sources[0] is None
        assert sources[1].startswith(line_of("added"))
        assert sources[2] is None

    def test_nests_and_ends_with_an_exception(self) -> None:
        with tracing(), pytest.raises(KeyError), deferred_init(trace=True):
            {}["missing"]
        with tracing():
            with tracing():
                pass
            inside = deferred_init(torch.ones, 1)
        assert explain(inside)[0].source is not None
        assert explain(deferred_init(torch.ones, 1))[0].source is None

    def test_keyword_of_the_function_is_its_own(self) -> None:
        def build(trace: object = None) -> tuple[Tensor, object]:
            return torch.ones(1), trace

        tensor, trace = deferred_init(build, trace="mine")
        assert trace == "mine"
        assert explain(tensor)[0].source is None

    def test_any_keyword_of_the_function_is_its_own(self) -> None:
        def build(**kwargs: object) -> tuple[Tensor, object]:
            return torch.ones(1), kwargs

        tensor, kwargs = deferred_init(build, trace=True)
        assert kwargs == {"trace": True}
        assert explain(tensor)[0].source is None

    def test_keywords_are_those_of_the_function(self) -> None:
        with pytest.raises(TypeError, match="trace"):
            deferred_init(torch.ones, 1, trace=True)

    def test_error_names_the_line(self) -> None:
        real = too_large_to_copy()
        with deferred_init(trace=True):
            deferred = torch.zeros(2) + real  # culprit
        real.add_(1)
        where = re.escape(line_of("culprit"))
        with pytest.raises(
            MaterializationError, match=rf"(?s)`aten::add.Tensor` was recorded with .* recorded at {where} in "
        ):
            materialize_tensor(deferred)

    def test_error_of_a_kernel_names_the_line(self) -> None:
        def build() -> Tensor:
            return torch.ones(2)[torch.tensor([7])]  # too far

        with deferred_init(trace=True):
            deferred = build()
        where = re.escape(line_of("too far"))
        with pytest.raises(IndexError, match=rf"(?s)out of bounds.*`aten::index.Tensor`, recorded at {where} in build"):
            materialize_tensor(deferred)

    def test_is_plain_values_and_a_table_too(self) -> None:
        explanation = explain(deferred_init(nn.Linear, 2, 2).weight)
        found = json.loads(json.dumps(explanation.to_dict()))
        assert [one["name"] for one in found["operations"]] == ["aten::empty", "aten::uniform_"]
        assert found["operations"][1]["writes"] == [{"number": 1, "shape": [2, 2], "dtype": "torch.float32"}]
        assert found["result"] == "%1"
        assert "<td>aten::uniform_(%0, " in explanation._repr_html_()

    def test_signature_stays_that_of_torchdistx(self) -> None:
        parameters = inspect.signature(deferred_init).parameters.values()
        assert [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY] == ["args", "kwargs"]


def _rand_after_seed() -> Tensor:
    torch.manual_seed(0)
    return torch.rand(3)


def test_explanations_of_equal_recordings_are_equal() -> None:
    weight = deferred_init(nn.Linear, 4, 4).weight
    found, again = explain(weight), explain(weight)
    assert found == again
    assert hash(found) == hash(again)
    assert found != list(again)
