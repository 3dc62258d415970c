"""Every operator of `op_db` has the properties that the files in `checks` describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiers
import torch
from sweeps.checks import fakes, outputs
from sweeps.operators import CHECKS, Check, Counts, Visit, concerning, failures, full_name
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo

from torchext.fake import fake_mode
from torchext.internals.patching import TORCH_RELEASE

DTYPES = fakes.DTYPES


class some_dtypes(ops):  # noqa: N801 - named like PyTorch's
    """Parametrizes like `ops`, every day half of the operators with float32, and the others with one other dtype."""

    def _parametrize_test(self, test: Any, generic_cls: Any, device_cls: Any) -> Iterator[Any]:
        others: dict[str, list[torch.dtype]] = {}
        for *_, named, _ in super()._parametrize_test(test, generic_cls, device_cls):
            if named["dtype"] is not torch.float32:
                others.setdefault(full_name(named["op"]), []).append(named["dtype"])
        with_float32 = {*tiers.chosen(others, len(others) // 2)}
        everyday = {
            name: [torch.float32] if name in with_float32 else tiers.chosen(sorted(dtypes, key=str), 1, name)
            for name, dtypes in others.items()
        }
        for case in super()._parametrize_test(test, generic_cls, device_cls):
            op, dtype = case[2]["op"], case[2]["dtype"]
            if tiers.amount(dtype in everyday.get(full_name(op), DTYPES), True):
                yield case


class TestOperators(TestCase):
    @pytest.mark.scaled
    @some_dtypes(op_db, allowed_dtypes=DTYPES)
    def test_checks_hold(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        for check, sample, error in failures(op, dtype, torch.device(device).type):
            with self.subTest(check=check, sample=sample):
                raise error
        for one in concerning(op, dtype, torch.device(device).type):
            if one.release not in (None, TORCH_RELEASE):
                with self.subTest(check=one.name):
                    self.skipTest(f"the check is for the Meta kernels of PyTorch {one.release}")


instantiate_device_type_tests(TestOperators, globals(), only_for=("cpu", "cuda"))
if "TestOperatorsCUDA" in globals():
    globals()["TestOperatorsCUDA"].pytestmark = pytest.mark.cuda


def test_failure_names_the_check_and_the_sample() -> None:
    def is_first(visit: Visit) -> None:
        assert visit.sample.input.dim() == 0

    [op] = [op for op in op_db if full_name(op) == "sin"]
    one = Check(is_first, (torch.float32,), Counts(2, 2, 2), ("cpu",), lambda op: True)
    [failure] = failures(op, torch.float32, "cpu", [one])
    assert (failure.check, failure.sample[:2]) == ("is_first", "0:")
    assert failures(op, torch.float64, "cpu", [one]) == []


# Exceptions of checks. The others are of calls whose values are random or uninitialized, or of the long sweeps.
TABLES: list[tuple[Any, str, Callable[[Visit], None]]] = [
    (fakes, "GRADIENT_NEEDS_VALUES", fakes.results_and_gradients_have_the_metadata_of_real_ones),
    (fakes, "GRADIENT_LAYOUT_DIFFERS", fakes.results_and_gradients_have_the_metadata_of_real_ones),
    (outputs, "OTHER_STRIDES", outputs.out_ends_like_the_eager_one),
]


@pytest.mark.skipif(TORCH_RELEASE != (2, 13), reason="the exceptions are those of one release of PyTorch")
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("module", "table", "check", "name"),
    [(module, table, check, name) for module, table, check in TABLES for name in sorted(getattr(module, table))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_check_fails_without_the_entry_of_its_table(
    module: Any, table: str, check: Callable[[Visit], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, table, getattr(module, table) - {name})
    [registered] = [one for one in CHECKS if one.function is check]
    every = dataclasses.replace(registered, samples=Counts(None, None, None))
    [op] = [op for op in op_db if full_name(op) == name]
    dtypes = [dtype for dtype in registered.dtypes if dtype in op.supported_dtypes("cpu")]
    assert any(failures(op, dtype, "cpu", [every]) for dtype in dtypes)


@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize(
    ("name", "error"),
    [(name, error) for names, error in fakes.EXPECTED_ERRORS for name in sorted(names)],
    ids=str,
)
def test_entry_of_the_table_is_needed(name: str, error: type[Exception]) -> None:
    def is_needed(visit: Visit) -> bool:
        """Return true if the fake call raises."""
        try:
            with fake_mode():
                visit.arguments(fakes.fake_without_values).call(visit.op)
        except error:
            return True
        return False

    assert any(
        is_needed(Visit(op, dtype, "cpu", sample))
        for op in op_db
        if full_name(op) == name
        for dtype in DTYPES
        if dtype in op.supported_dtypes("cpu")
        for sample in op.sample_inputs("cpu", dtype)
    )
