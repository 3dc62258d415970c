"""Old names: they work, and warn with the new one."""

from __future__ import annotations

import importlib
import warnings

import pytest

import torchext
from torchext.internals.arguments import renamed_keywords


@renamed_keywords(old="new")
def double(new: int, *, other: int = 0) -> int:
    """Return twice `new`."""
    return 2 * new + other


def test_keyword_under_its_old_name_warns_with_the_new_one_at_the_caller() -> None:
    with pytest.warns(torchext.TorchextDeprecationWarning, match=r"`double\(old=\)` is deprecated: use `new=`") as w:
        assert double(old=4, other=1) == 9
    assert w[0].filename == __file__


def test_keyword_under_its_new_name_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(4) == double(new=4) == 8
    assert double.__doc__ == "Return twice `new`."


def test_keyword_under_both_names_raises() -> None:
    with pytest.raises(TypeError, match=r"double\(\) got both `new` and `old`, its deprecated name\."):
        double(old=4, new=4)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("torchext.amp", "float", "full_precision"),
        ("torchext.amp", "half", "lower_precision"),
        ("torchext.amp", "wrap", "to_amp"),
        ("torchext.amp", "unwrap", "to_normal"),
        ("torchext.fake", "carry_blocks", "inherit_blocks"),
        ("torchext.fake", "carry_blocks_to_threads", "threads_inherit_blocks"),
    ],
)
def test_function_under_its_old_name_warns_with_the_new_one_at_the_caller(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(
        torchext.TorchextDeprecationWarning, match=rf"`{module}.{old}` is deprecated: use `{module}.{new}`"
    ) as w:
        assert getattr(home, old) is getattr(home, new)
    assert w[0].filename == __file__
    assert old not in dir(home)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'absent'"):
        _ = home.absent
