"""PyTorch functions are replaced only while it is needed; before and after that they are PyTorch's own."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from paused_imports import paused_import
from torch._subclasses.fake_tensor import FakeTensorMode

from torchext import _C, amp, inference
from torchext.deferred_init import defer_again, deferred_init, is_deferred, materialize_module
from torchext.errors import PatchError
from torchext.fake import fake_like, fake_mode, is_fake
from torchext.inspect import patches
from torchext.internals.leases import Lease, leases, settle, while_fakes_live

pytestmark = pytest.mark.usefixtures("frozen_past")

REPR = torch.Tensor.__repr__.__code__


def is_replaced() -> bool:
    return torch.Tensor.__repr__.__code__ is not REPR


@pytest.fixture(autouse=True)
def _begin_without_fakes() -> Iterator[None]:
    gc.collect()
    assert not is_replaced(), "a test before this one has left fakes behind"
    yield
    gc.collect()
    assert not is_replaced()


@pytest.fixture
def lease() -> Iterator[Lease]:
    made = Lease("a test holds it")
    yield made
    leases.remove(made)


def definition(name: str) -> object:
    """Return the definition to which CPython's object of a C method or property points."""
    words = ctypes.cast(id(vars(torch._C.TensorBase)[name]), ctypes.POINTER(ctypes.c_void_p))
    return words[5]  # `d_method` or `d_getset`


class Owner:
    """The object that these tests patch."""

    def method(self) -> str:
        return "original"


def saying(what: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    return lambda original: lambda self: f"{what} {original(self)}"


def test_replaced_in_a_block_and_while_a_fake_of_it_is_alive() -> None:
    with fake_mode():
        assert is_replaced()
        fake = torch.ones(2)
    assert is_replaced()
    assert "fake=True" in repr(fake)
    view = fake[0]
    del fake
    gc.collect()
    assert is_replaced(), "the storage is alive"
    del view
    gc.collect()
    assert not is_replaced()


def test_given_back_when_the_last_deferred_tensor_is_real() -> None:
    module = deferred_init(torch.nn.Linear, 2, 2)
    assert is_replaced()
    materialize_module(module, retain_graph=True)
    gc.collect()
    assert not is_replaced()
    defer_again(module)
    assert is_replaced()
    assert is_deferred(module)
    materialize_module(module)


def test_given_back_when_the_last_fake_dies_on_another_thread() -> None:
    held = [fake_like(torch.ones(2))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert not is_replaced()


def test_given_back_after_an_error_in_a_block() -> None:
    with pytest.raises(ZeroDivisionError), fake_mode():
        torch.ones(1 // 0)
    gc.collect()
    assert not is_replaced()


def test_given_back_if_a_block_cannot_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "enter_deferred_init", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        deferred_init(torch.ones, 2)
    assert not is_replaced()


def test_blocks_on_many_threads_share_a_lease() -> None:
    errors = []

    def work() -> None:
        for _ in range(50):
            with fake_mode():
                fake = torch.ones(2)
                if not is_fake(fake) or "fake=True" not in repr(fake):
                    errors.append(fake)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    gc.collect()


def test_patches_are_listed_with_reasons_before_they_are_needed() -> None:
    assert [patch for patch in patches() if patch.is_installed and "fake" in patch.needed_while] == []
    of_fakes = [patch for patch in patches() if "fake" in patch.needed_while]
    (found,) = [patch for patch in of_fakes if patch.target == "torch.Tensor.tolist"]
    assert found.reason == "reads memory without calling an operator"
    fake = fake_like(torch.ones(2))
    assert any(patch.is_installed for patch in patches() if patch.target == "torch.Tensor.tolist")
    del fake


def test_a_method_taken_from_a_tensor_before_is_that_of_pytorch_afterwards() -> None:
    x = torch.ones(2)
    fake = fake_like(x)
    data_ptr, to_list = x.data_ptr, x.tolist
    del fake
    gc.collect()
    assert data_ptr() == x.data_ptr()
    assert to_list() == [1.0, 1.0]


def test_functions_wrapped_by_others_stay_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_like(torch.ones(2))
    original = torch.Tensor.__repr__

    @functools.wraps(original)
    def theirs(self: torch.Tensor, **kwargs: Any) -> str:
        return "theirs: " + original(self, **kwargs)

    monkeypatch.setattr(torch.Tensor, "__repr__", theirs)
    assert "fake=True" in repr(fake)
    del fake
    gc.collect()
    assert torch.Tensor.__repr__ is theirs
    assert repr(torch.ones(1)) == "theirs: tensor([1.])"


def test_replaced_attribute_that_others_replace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_like(torch.ones(2))
    ours = torch.UntypedStorage.__setitem__

    def theirs(self: torch.UntypedStorage, index: int, value: int) -> None:
        ours(self, index, value)

    monkeypatch.setattr(torch.UntypedStorage, "__setitem__", theirs)
    del fake
    gc.collect()
    assert torch.UntypedStorage.__setitem__ is theirs  # type: ignore[comparison-overlap]
    storage = torch.UntypedStorage([1, 2])
    storage[0] = 7
    assert storage.tolist() == [7, 2]
    monkeypatch.undo()
    del torch.UntypedStorage.__setitem__  # replaced by `theirs`


def test_code_replaced_by_others_is_kept(lease: Lease) -> None:
    lease.patch(Owner, "method", saying("ours"), "a test")

    def theirs(self: Owner) -> str:
        return "theirs"

    before = Owner.method.__code__
    with lease.hold():
        assert Owner().method() == "ours original"
        Owner.method.__code__ = theirs.__code__
    assert Owner().method() == "theirs"
    Owner.method.__code__ = before


def test_two_leases_share_a_patched_function(lease: Lease) -> None:
    other = Lease("another test holds it")
    lease.patch(Owner, "method", saying("first"), "a test")
    other.patch(Owner, "method", saying("second"), "a test")
    code = Owner.method.__code__
    for _ in range(2):  # from the second time on, the core installs and removes the patches of a lease that is alone
        with lease.hold():
            assert Owner().method() == "first original"
            with other.hold():
                assert Owner().method() == "second first original"
            assert Owner().method() == "first original"
        with other.hold():
            assert Owner().method() == "second original"
            with lease.hold():
                assert sorted(Owner().method().split()) == ["first", "original", "second"]
            assert Owner().method() == "second original"
        assert Owner.method.__code__ is code
    leases.remove(other)


def test_late_declarations_are_installed_by_the_next_holder(lease: Lease) -> None:
    lease.patch(Owner, "method", saying("first"), "a test")
    for _ in range(2):
        with lease.hold():
            assert Owner().method() == "first original"
    lease.declare(lambda: lease.patch(Owner, "method", saying("late"), "a test"))
    with lease.hold():
        assert Owner().method() == "late first original"


def test_nothing_stays_replaced_when_a_declaration_fails(lease: Lease) -> None:
    code = Owner.method.__code__
    is_broken = True

    def declare() -> None:
        lease.patch(Owner, "method", saying("ours"), "a test")
        if is_broken:
            raise ValueError("cannot be declared")

    lease.declare(declare)
    with pytest.raises(ValueError, match="cannot be declared"):
        lease.acquire()
    assert Owner.method.__code__ is code
    assert not lease.is_active
    is_broken = False
    with lease.hold():
        assert Owner().method() == "ours original"
    assert Owner.method.__code__ is code


def test_a_replacement_that_cannot_be_made_does_not_affect_other_leases(lease: Lease) -> None:
    def make(_original: Any) -> Any:
        raise ZeroDivisionError("cannot be made")

    lease.patch(Owner, "method", make, "a test")
    with fake_mode():
        assert is_fake(torch.ones(2))
    with pytest.raises(ZeroDivisionError, match="cannot be made"), lease.hold():
        pass
    assert Owner().method() == "original"
    other = Lease("a later one")
    try:
        other.patch(Owner, "__repr__", lambda _: lambda _: "replaced", "a test")
        for one in (lease, other):
            one._count.hold()
        with pytest.raises(ZeroDivisionError, match="cannot be made"):
            settle(True)
        assert repr(Owner()) == "replaced"
    finally:
        for one in (lease, other):
            one._count.release()
        other.settle()
        leases.remove(other)


def test_patch_of_a_missing_function_is_an_error(lease: Lease) -> None:
    with pytest.raises(PatchError, match=r"torchext replaces .*\.Owner\.missing, which PyTorch .* does not have"):
        lease.patch(Owner, "missing", saying("first"), "a test")
    assert lease.patches == []


# ---- Declarations by decorators


def replaced(original: Callable[..., str], *args: object) -> str:
    return f"replaced {original(*args)}"


class OtherOwner:
    def method(self) -> str:
        return "other"

    @staticmethod
    def static(text: str) -> str:
        return text


def test_one_function_may_replace_several_attributes(lease: Lease) -> None:
    declared = lease.replaces(OtherOwner, "method", "static", reason="a test")(replaced)
    assert lease.replaces(Owner, "method", reason="a test")(declared) is replaced
    for _ in range(2):
        with lease.hold():
            found = Owner().method(), OtherOwner().method(), OtherOwner.static("text")
            assert found == ("replaced original", "replaced other", "replaced text")
        assert (Owner().method(), OtherOwner().method(), OtherOwner.static("text")) == ("original", "other", "text")


def test_decorators_may_be_stacked(lease: Lease) -> None:
    @lease.replaces(OtherOwner, "method", reason="the second")
    @lease.replaces(Owner, "method", reason="the first", releases="since 2.13")
    def method(original: Callable[..., str], self: object) -> str:
        return f"{type(self).__name__} {original(self)}"

    with lease.hold():
        assert (Owner().method(), OtherOwner().method()) == ("Owner original", "OtherOwner other")
    assert [(patch.reason, patch.releases) for patch in lease.declared()] == [
        ("the first", "since 2.13"),
        ("the second", "all"),
    ]


def test_replacements_of_one_attribute_receive_the_previous_one(lease: Lease) -> None:
    for word in ("first", "second"):
        lease.replaces(Owner, "method", reason="a test")(
            functools.partial(lambda original, self, word: f"{word} {original(self)}", word=word)
        )
    with lease.hold():
        assert Owner().method() == "second first original"


def test_attributes_are_replaced_only_if_the_owner_has_what_they_need(lease: Lease) -> None:
    lease.replaces(Owner, "missing", needs="missing", reason="a test")(replaced)
    lease.replaces(Owner, "method", needs="missing", reason="a test")(replaced)
    lease.replaces(OtherOwner, "method", needs="static", reason="a test")(replaced)
    with lease.hold():
        assert (Owner().method(), OtherOwner().method()) == ("original", "replaced other")
    lease.replaces(Owner, "missing", reason="a test")(replaced)
    with pytest.raises(PatchError, match="does not have"):
        lease.acquire()


LATE = "torchext_late_module_of_a_test"


@pytest.fixture
def late_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a file that can be imported as LATE, with a function and a nested class."""
    path = tmp_path / f"{LATE}.py"
    path.write_text("""
def function():
    return "original"

class Outer:
    class Inner:
        def method(self):
            return "nested"
""")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop(LATE, None)


def call_late_functions() -> tuple[str, str]:
    module: Any = importlib.import_module(LATE)
    return module.function(), module.Outer.Inner().method()


@pytest.mark.parametrize("when", ["before the first block", "in a block", "between blocks"])
def test_modules_and_classes_may_be_imported_later(lease: Lease, late_module: Path, when: str) -> None:
    lease.replaces(LATE, "function", reason="a test")(replaced)
    lease.replaces(f"{LATE}:Outer.Inner", "method", reason="a test")(replaced)
    if when == "before the first block":
        assert call_late_functions() == ("original", "nested")
    with lease.hold():
        assert (LATE in sys.modules) == (when == "before the first block")
        if when != "between blocks":
            assert call_late_functions() == ("replaced original", "replaced nested")
    assert call_late_functions() == ("original", "nested")
    for _ in range(2):
        with lease.hold():
            assert call_late_functions() == ("replaced original", "replaced nested")
        assert call_late_functions() == ("original", "nested")


def test_declarations_wait_for_an_import_on_another_thread(lease: Lease, late_module: Path) -> None:
    lease.replaces(LATE, "function", reason="a test")(replaced)
    lease.replaces(f"{LATE}:Outer.Inner", "method", reason="a test")(replaced)
    lease.replaces(Owner, "method", reason="a test")(replaced)
    with paused_import(late_module) as running, lease.hold():  # neither waits nor looks for the missing function
        assert Owner().method() == "replaced original"
        running.finish()
        assert call_late_functions() == ("replaced original", "replaced nested")
    for _ in range(2):
        with lease.hold():
            assert call_late_functions() == ("replaced original", "replaced nested")
        assert call_late_functions() == ("original", "nested")


def test_a_patch_that_a_late_module_lacks_is_an_error_of_the_next_holder(
    lease: Lease, late_module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lease.replaces(LATE, "function", "missing", reason="a test")(replaced)
    with lease.hold():
        assert call_late_functions() == ("original", "nested"), "nothing is installed halfway"
    assert "PatchError" in capsys.readouterr().err
    with pytest.raises(PatchError, match=rf"torchext replaces {LATE}\.missing"):
        lease.acquire()


def test_a_token_holds_a_lease_as_long_as_it_lives(lease: Lease) -> None:
    lease.patch(Owner, "method", saying("ours"), "a test")
    token = lease.token()
    assert Owner().method() == "ours original"
    del token
    gc.collect()
    assert Owner().method() == "original"


def test_regions_and_marks_hold_separate_leases() -> None:
    code = torch.autograd.graph._engine_run_backward.__code__
    factory = definition("new_tensor")
    for _ in range(3):
        with amp.autocast("cpu"):
            assert torch.autograd.graph._engine_run_backward.__code__ is not code
            assert definition("new_tensor") == factory
        assert torch.autograd.graph._engine_run_backward.__code__ is code
        wrapped = amp.to_amp(torch.ones(2))
        assert definition("new_tensor") != factory
        del wrapped
        gc.collect()
        assert definition("new_tensor") == factory
        assert torch.autograd.graph._engine_run_backward.__code__ is code


def test_a_region_that_ends_while_fakes_are_alive_leaves_their_patches() -> None:
    with fake_mode(gpu=True):
        with amp.autocast("cuda"):
            layer = torch.nn.Linear(2, 2, device="cuda")
            loss = layer(torch.ones(1, 2, device="cuda")).sum()
        loss.backward()
        assert is_fake(layer.weight.grad)
    on_cpu = fake_like(torch.ones(2))
    replaced = torch.autograd.graph._engine_run_backward.__code__
    with amp.autocast("cpu"), amp.autocast("cpu", self_cleaning=True):
        assert "fake=True" in repr(on_cpu.new(on_cpu))
    assert torch.autograd.graph._engine_run_backward.__code__ is replaced
    assert "fake=True" in repr(on_cpu.new(on_cpu))
    (layer.weight * 2).sum().backward()
    del layer, loss, on_cpu


def test_a_traced_inference_tensor_holds_a_lease() -> None:
    version = definition("_version")
    with inference.inference_mode(trace=True):
        tensor = torch.ones(2)
    assert definition("_version") != version
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        assert tensor._version
    del tensor
    gc.collect()
    assert definition("_version") == version


def test_tracing_all_blocks_is_given_back() -> None:
    code = torch.inference_mode.__enter__.__code__
    inference.trace_origins()
    try:
        with torch.inference_mode():
            tensor = torch.ones(2)
        assert inference.origin(tensor) is not None
        assert torch.inference_mode.__enter__.__code__ is not code
    finally:
        inference.trace_origins(False)
    del tensor
    gc.collect()
    assert torch.inference_mode.__enter__.__code__ is code
    assert [patch for patch in patches() if patch.is_installed] == []


def test_a_fake_tensor_mode_may_outlive_the_fakes() -> None:
    fake = fake_like(torch.ones(2))
    with FakeTensorMode():
        del fake
        gc.collect()
        assert is_replaced(), "the end of the block must be seen"
        assert not is_fake(torch.ones(2))
    gc.collect()
    with fake_mode():
        assert is_fake(torch.ones(2))


def test_only_calls_about_fakes_reach_the_replacement_of_a_c_function() -> None:
    called: list[torch.Tensor] = []

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def dim(self: torch.Tensor) -> Any:
            called.append(self)
            return original(self)

        return dim

    function = vars(torch._C.TensorBase)["dim"]
    x, fake = torch.ones(2), fake_like(torch.ones(2))
    _C.exchange(([], [(function, make(_C.original_of(function)), _C.CONCERNS_FAKES)], []))
    try:
        assert (x.dim(), fake.dim()) == (1, 1)
    finally:
        _C.exchange(([], [(function, None, 0)], []))
    assert len(called) == 1
    assert is_fake(called.pop())


def files_of_functions_called_by(call: Callable[[], object]) -> set[str]:
    files = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return files


@pytest.mark.parametrize(
    "call",
    [
        lambda real: copy.deepcopy(real),
        lambda real: copy.deepcopy(torch.nn.Parameter(real)),
        lambda real: real.untyped_storage().clone(),
        lambda real: torch.UntypedStorage(8),
        lambda real: real.data_ptr(),
        lambda real: real.numpy(),
        lambda real: real.tolist(),
        lambda real: real.new_tensor([1.0]),
        lambda real: repr(real),
        lambda real: real.untyped_storage().__setitem__(0, 1),
    ],
    ids=[
        *("deepcopy", "parameter", "clone", "constructor", "data_ptr", "numpy", "tolist", "new_tensor", "repr"),
        "setitem",
    ],
)
def test_calls_about_real_tensors_reach_no_replacement_while_fakes_are_alive(
    call: Callable[[torch.Tensor], object],
) -> None:
    fake, real = fake_like(torch.ones(2)), torch.ones(2)
    assert is_fake(fake)
    called = files_of_functions_called_by(lambda: call(real))
    assert not [file for file in called if f"{os.sep}fake{os.sep}patches{os.sep}" in file]


def test_constructors_of_storages_accept_fakes_in_any_class() -> None:
    class Before(torch.UntypedStorage):
        pass

    class WithNew(torch.UntypedStorage):
        def __new__(cls, *args: Any) -> Any:
            return super().__new__(cls, *args)

    storage = fake_like(torch.ones(2)).untyped_storage()

    class During(torch.UntypedStorage):
        pass

    for cls in (torch.UntypedStorage, Before, WithNew, During):
        for construct in (cls, functools.partial(torch.UntypedStorage.__new__, cls)):
            with pytest.raises(RuntimeError, match="of fake tensors and has no data"):
                construct(storage)
            assert construct([1, 2]).tolist() == [1, 2]
    del storage
    assert not is_replaced()
    assert torch.UntypedStorage.__new__(During, [1, 2]).tolist() == [1, 2]
    with pytest.raises(TypeError, match="is not a subtype"):
        torch.UntypedStorage.__new__(int, [1, 2])  # type: ignore[type-var]


def test_constructor_replaced_by_others_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_like(torch.ones(2))
    original, called = torch.UntypedStorage.__new__, []

    def theirs(cls: type[torch.UntypedStorage], *args: Any) -> torch.UntypedStorage:
        called.append(args)
        return original(cls, *args)

    with monkeypatch.context() as patching:
        patching.setattr(torch.UntypedStorage, "__new__", theirs)
        del fake
        gc.collect()
        assert not is_replaced()
        fake = fake_like(torch.ones(2))
        torch.UntypedStorage(8)
        with pytest.raises(RuntimeError, match="of fake tensors and has no data"):
            torch.UntypedStorage(fake.untyped_storage())
    assert called == [(8,), (fake.untyped_storage(),)]
    with pytest.raises(RuntimeError, match="of fake tensors and has no data"):
        torch.UntypedStorage(fake.untyped_storage())


def test_arguments_with_a_wrong_or_raising_class_are_errors_as_before() -> None:
    class Raising:
        @property
        def __class__(self) -> Any:
            raise ValueError("no class")

    calls: tuple[Callable[[Any], object], ...] = (
        torch.UntypedStorage,
        torch.ones(2).new_tensor,
        torch.ones(2).is_set_to,
        torch.ones(2).__deepcopy__,
        torch.ones(2).data_ptr,
    )

    lying = mock.Mock(spec=torch.Tensor)  # it ends the process where PyTorch expects a tensor

    def errors() -> list[str]:
        found = []
        for call, argument in [*((call, Raising()) for call in calls), (torch.ones(2).__deepcopy__, lying)]:
            with pytest.raises((TypeError, ValueError)) as raised:
                call(argument)
            found.append(str(raised.value))
        return found

    before = errors()
    fake = fake_like(torch.ones(2))
    assert errors() == before
    assert is_fake(fake)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # since Python 3.12
def test_a_fork_may_happen_at_any_time() -> None:
    with while_fakes_live.hold():
        child = os.fork()
        if child == 0:
            with fake_mode():
                os._exit(0 if is_fake(torch.ones(2)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.ci
def test_a_process_may_end_while_everything_is_held() -> None:
    """Threads and open blocks end after Python."""
    program = """
import sys, torch
from torchext import amp, inference
from torchext.deferred_init import deferred_init
from torchext.fake import fake_mode

held = [deferred_init(torch.nn.Linear, 2, 2), amp.to_amp(torch.ones(2))]
held.append(held)
sys.held = held
for block in (amp.autocast("cpu", self_cleaning=True), inference.inference_mode(trace=True), fake_mode()):
    block.__enter__()
    held += [torch.ones(2), block]
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
