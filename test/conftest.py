"""Options and skips of the whole suite."""

from __future__ import annotations

import hypothesis
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs", type=int, help="how many random programs to try, not those of every day (`make fuzz`)"
    )
    parser.addoption("--long", action="store_true", help="also run the long sweeps (`make sweep`)")


def pytest_configure(config: pytest.Config) -> None:
    programs = config.getoption("--programs")
    everyday = {"max_examples": 2000, "derandomize": True, "database": None}
    hypothesis.settings.register_profile(
        "programs",
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **(everyday if programs is None else {"max_examples": programs, "print_blob": True}),
    )
    hypothesis.settings.load_profile("programs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="part of a long sweep; run with --long"))
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
