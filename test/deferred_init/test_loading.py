"""Libraries that load and save models: deferred modules take the loaded values, and saving needs values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_module
from torchext.fake import fake_like

REMEDY = r"materialize_(tensor|module)\(\)"


class Tied(nn.Module):
    """A tie, a buffer, and a view of a part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(x)))


@pytest.fixture
def saved() -> Tied:
    torch.manual_seed(3)
    return Tied()


def deferred() -> Tied:
    torch.manual_seed(4)
    return deferred_init(Tied)


def assert_loaded(module: nn.Module, saved: nn.Module) -> None:
    materialize_module(module)
    wanted = saved.state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def safetensors() -> Any:
    return pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def test_safetensors_loads_into_a_deferred_module(saved: Tied, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors().save_model(saved, str(file))
    module = deferred()
    assert safetensors().load_model(module, file) == (set(), [])
    assert is_deferred(module)
    assert_loaded(module, saved)
    assert module.head.weight is module.table.weight


def test_safetensors_loads_in_a_constructor(saved: Tied, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors().save_model(saved, str(file))

    def construct() -> Tied:
        module = Tied()
        safetensors().load_model(module, file)
        return module

    assert_loaded(deferred_init(construct), saved)


def test_safetensors_checks_a_fake_module(saved: Tied, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors().save_model(saved, str(file))
    assert safetensors().load_model(fake_like(saved), file) == (set(), [])
    with pytest.raises(RuntimeError, match="Missing key"):
        safetensors().load_model(fake_like(nn.Sequential(saved)), file)


@pytest.mark.parametrize(
    "save",
    [
        lambda module, file: safetensors().save_model(module, file),
        lambda module, file: safetensors().save_file({"a": module.table.weight}, file),
        lambda module, file: safetensors().save({"a": module.table.weight}),
        lambda module, file: torch.save(module.state_dict(), file),
    ],
    ids=["save_model", "save_file", "save", "torch"],
)
def test_saving_a_deferred_module_names_the_remedy(save: Callable[[nn.Module, str], object], tmp_path: Path) -> None:
    module = deferred()
    with pytest.raises(RuntimeError, match=REMEDY):
        save(module, str(tmp_path / "file"))
    assert not list(tmp_path.iterdir())
    assert is_deferred(module)
    materialize_module(module)
    save(module, str(tmp_path / "file"))


def test_sharing_the_memory_of_a_deferred_module_names_the_remedy() -> None:
    module = deferred()
    with pytest.raises(RuntimeError, match=REMEDY):
        module.share_memory()
    materialize_module(module)
    assert all(parameter.is_shared() for parameter in module.share_memory().parameters())


def llama(seed: int) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, tie_word_embeddings=True, **sizes))


def test_transformers_saves_after_the_remedy_that_its_error_names(tmp_path: Path) -> None:
    model = deferred_init(llama, 0)
    with pytest.raises(RuntimeError, match=REMEDY):
        model.save_pretrained(tmp_path / "early")
    materialize_module(model)
    model.save_pretrained(tmp_path / "late")
    again = deferred_init(type(model).from_pretrained, tmp_path / "late")
    assert_loaded(again, model)


def accelerate() -> Any:
    return pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["as_it_is", "cpu"])
def test_accelerate_loads_a_checkpoint_into_a_deferred_module(
    saved: Tied, device_map: dict[str, str] | None, tmp_path: Path
) -> None:
    safetensors().save_model(saved, str(tmp_path / "model.safetensors"), {"format": "pt"})
    module = accelerate().load_checkpoint_and_dispatch(deferred(), str(tmp_path), device_map=device_map)
    assert_loaded(module, saved)


def test_accelerate_leaves_a_part_of_a_deferred_module_on_the_disk(tmp_path: Path) -> None:
    torch.manual_seed(3)
    saved = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    safetensors().save_model(saved, str(tmp_path / "model.safetensors"), {"format": "pt"})
    module = deferred_init(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    module = accelerate().load_checkpoint_and_dispatch(
        module, str(tmp_path), device_map={"0": "cpu", "1": "disk"}, offload_folder=str(tmp_path / "offload")
    )
    materialize_module(module)
    x = torch.ones(2, 4)
    assert torch.equal(module(x), saved(x))


LATE_IMPORTS = (
    *("torch.ao.quantization", "torch.ao.nn.quantized", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.optim", "torch.distributed.pipelining", "torch.distributed.rpc", "torch.distributed.tensor"),
    *("torch.distributed.tensor.parallel", "torch.fx.experimental.optimization", "torch.nn.quantized"),
    *("torch.nn.utils.prune", "torch.onnx", "torch.quantization", "torch.sparse", "torch.testing", "functorch"),
    *("torch.nn.qat", "torch.nn.intrinsic", "torch.utils.benchmark", "torch.utils.mobile_optimizer"),
)

IMPORTING = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
if {used}:
    import torch
    from torchext.deferred_init import deferred_init
    from torchext.fake import fake_mode
    with fake_mode(gpu=True):
        torch.ones(2)
    deferred_init(torch.nn.Linear, 2, 2)
for name in {names}:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(name, type(error).__name__, str(error)[:200])
"""


def failed_imports(used: bool) -> str:
    code = IMPORTING.format(used=used, names=LATE_IMPORTS)
    result = forked.run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.ci
def test_later_imports_are_unaffected() -> None:
    assert failed_imports(used=True) == failed_imports(used=False)
