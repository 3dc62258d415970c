"""Safetensors files that are written from recordings equal those of eager construction, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
import transformers
from checkpoint_programs import grow_while_saving, one_large_tensor, several_tensors
from processes import run_alone
from torch import nn

from torchext import CheckpointError
from torchext.checkpoint import plan_checkpoint, save_safetensors
from torchext.deferred_init import deferred_init, is_deferred

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 200,
}
HALVES = {"d_model": 32, "vocab_size": 200, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
HALVES |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# Class and configuration of each architecture. Some tie weights, some have other names in checkpoints.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bart": ("ForConditionalGeneration", HALVES),
    "Bert": ("ForMaskedLM", SMALL),
    "DebertaV2": ("ForMaskedLM", SMALL),
    "GPT2": ("LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 200}),
    "Llama": ("ForCausalLM", SMALL),
    "Mamba": ("ForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 200}),
    "Mixtral": ("ForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "OPT": ("ForCausalLM", {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "Qwen3": ("ForCausalLM", {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}),
    "T5": ("ForConditionalGeneration", {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 200}),
    "ViT": ("ForImageClassification", {**SMALL, "image_size": 16, "patch_size": 8}),
    "Whisper": ("ForConditionalGeneration", {**HALVES, **TOKENS}),
}
ARCHITECTURES["ViT"][1].pop("vocab_size")


class Varied(nn.Module):
    """A state dict with difficult cases of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(30, 20)))
        self.transposed = nn.Parameter(torch.randn(30, 40).t())
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(5)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        fused = torch.randn(20, 10)
        self.first, self.second = nn.Parameter(fused[:12]), nn.Parameter(fused[12:])
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("mask", torch.randn(5, 5) > 0)
        self.register_buffer("codes", torch.randn(7).to(torch.float8_e4m3fn))
        self.register_buffer("not_saved", torch.randn(4), persistent=False)


def varied() -> Varied:
    torch.manual_seed(0)
    return Varied()


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Embedding(50, 70), nn.Conv1d(4, 4, 3))


def of_transformers(name: str) -> Callable[[], Any]:
    kind, config = ARCHITECTURES[name]

    def construct() -> Any:
        torch.manual_seed(0)
        return getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**config))

    return construct


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "safetensors" in path.name}


@pytest.mark.cases(8)
@pytest.mark.parametrize("max_shard_size", ["5GB", "50KB"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folder_has_the_bytes_of_save_pretrained(name: str, max_shard_size: str, tmp_path: Path) -> None:
    construct = of_transformers(name)
    construct().save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    model = deferred_init(construct)
    save_safetensors(model, tmp_path / "ours", max_shard_size=max_shard_size, max_memory="4MiB")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert is_deferred(model)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_folder_has_the_bytes_of_huggingface_hub(dtype: Any, max_shard_size: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    model = plain().to(dtype)
    huggingface_hub.save_torch_model(model, tmp_path / "theirs", max_shard_size=max_shard_size)
    save_safetensors(deferred_init(plain), tmp_path / "ours", max_shard_size=max_shard_size, dtype=dtype)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_names_that_share_memory_are_noted_as_by_huggingface_hub(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        return model

    (tmp_path / "theirs").mkdir()
    huggingface_hub.save_torch_model(tied(), tmp_path / "theirs")
    save_safetensors(deferred_init(tied), tmp_path / "ours")
    theirs, ours = (header(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert ours == theirs
    assert ours["__metadata__"] == {"format": "pt", "2.weight": "0.weight"}


def test_expanded_view_does_not_replace_its_base(tmp_path: Path) -> None:
    def construct() -> dict[str, torch.Tensor]:
        weight = torch.arange(4.0)
        return {"expanded": weight[:2].expand(2, 2), "weight": weight}

    save_safetensors(deferred_init(construct), tmp_path / "model.safetensors")
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"weight"}
    assert torch.equal(found["weight"], torch.arange(4.0))


def header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return dict(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


def test_file_has_the_bytes_of_save_file(tmp_path: Path) -> None:
    safetensors.torch.save_file(plain().state_dict(), tmp_path / "theirs.safetensors")
    save_safetensors(deferred_init(plain), tmp_path / "ours.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["recorded", "float16"])
def test_varied_tensors_have_the_bytes_of_save_file(dtype: Any, tmp_path: Path) -> None:
    state = {name: tensor.contiguous().resolve_conj() for name, tensor in varied().state_dict().items()}
    if dtype is not None:
        floating = {name for name, tensor in state.items() if tensor.is_floating_point()}
        state = {name: tensor.to(dtype) if name in floating else tensor for name, tensor in state.items()}
        state.pop("conjugate")
    state.pop("head.weight")
    safetensors.torch.save_file(
        {name: tensor.clone() for name, tensor in state.items()},
        tmp_path / "theirs.safetensors",
        metadata={"head.weight": "embedding.weight"},
    )
    model = deferred_init(varied)
    if dtype is not None:
        del model.conjugate
    save_safetensors(model, tmp_path / "ours.safetensors", dtype=dtype, max_memory="4MiB")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_real_tensors_and_state_dicts_are_written_unchanged(tmp_path: Path) -> None:
    state = {"real": torch.randn(1500, 1000), "deferred": deferred_init(torch.ones, 500, 200)}
    save_safetensors(state, tmp_path / "ours.safetensors", max_memory="4MiB", metadata={"epoch": "3"})
    found = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert torch.equal(found["real"], state["real"])
    assert torch.equal(found["deferred"], torch.ones(500, 200))
    assert header(tmp_path / "ours.safetensors")["__metadata__"] == {"epoch": "3"}


@pytest.mark.ci
@pytest.mark.parametrize("construct", [one_large_tensor, several_tensors])
@pytest.mark.parametrize("max_memory", [8 << 20, 48 << 20], ids=["8 MiB", "48 MiB"])
def test_memory_is_bounded(construct: Callable[[], nn.Module], max_memory: int, tmp_path: Path) -> None:
    assert run_alone(grow_while_saving, construct, tmp_path, max_memory) <= max_memory


def test_insufficient_memory_is_reported_before_writing(tmp_path: Path) -> None:
    model = deferred_init(lambda: nn.ParameterDict({"w": nn.init.orthogonal_(torch.empty(800, 800))}))
    with pytest.raises(MemoryError, match=r"`w` of shape \(800, 800\) takes .* MiB, .*`max_memory` is 4.00 MiB"):
        save_safetensors(model, tmp_path / "out", max_memory="4MiB")
    assert not (tmp_path / "out").exists()
    save_safetensors(model, tmp_path / "out", max_memory="64MiB")


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a number": (lambda: 3, TypeError, "A module or a state dict was expected, but `source` is a int"),
    "another object": (lambda: {"step": 3}, TypeError, "`step` was expected to be a tensor, but it is a int"),
    "a name that is not a string": (lambda: {3: torch.ones(2)}, TypeError, "expected to be strings, but one is 3"),
    "a reserved name": (lambda: {"__metadata__": torch.ones(2)}, ValueError, "cannot be called `__metadata__`"),
    "a name that is not text": (lambda: {"\ud800": torch.ones(2)}, ValueError, "which is not valid UTF-8"),
    "a sparse tensor": (lambda: {"s": torch.ones(2).to_sparse()}, ValueError, "`s` has the layout torch.sparse_coo"),
    "a meta tensor": (lambda: {"m": torch.ones(2, device="meta")}, ValueError, "`m` is on the device `meta`"),
    "an unknown dtype": (lambda: {"c": torch.ones(2, dtype=torch.complex128)}, TypeError, "torch.complex128"),
    "overlapping parts": (
        lambda: dict(zip("ab", (lambda t: (t[:6], t[4:]))(torch.ones(10)), strict=True)),
        CheckpointError,
        "`a`, `b` share memory, and none of them shows all of it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_names_the_tensor_that_cannot_be_saved(name: str, tmp_path: Path) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        save_safetensors(make(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unit": ({"max_memory": "3 apples"}, ValueError, "`max_memory` expects a size such as '5GB' or '1GiB'"),
    "nothing": ({"max_shard_size": 0}, ValueError, "`max_shard_size` must be larger than 0"),
    "type": ({"max_shard_size": 1.5}, TypeError, "`max_shard_size` expects a number of bytes or a size .* got float"),
    "too little": ({"max_memory": "1KiB"}, ValueError, "`max_memory` was expected to be at least 4.00 MiB"),
    "name of a dtype": ({"dtype": "bfloat16"}, TypeError, r"got 'bfloat16'\. Did you mean torch\.bfloat16\?"),
    "dtype": ({"dtype": torch.int8}, TypeError, "`dtype` was expected to be floating point or complex"),
    "metadata": ({"metadata": {"step": 3}}, TypeError, "`metadata` was expected to have strings only, but .*'step': 3"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_out_of_range_are_refused(name: str, tmp_path: Path) -> None:
    options, error, message = ARGUMENTS[name]
    with pytest.raises(error, match=message):
        save_safetensors(deferred_init(plain), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensor"])
def test_files_of_other_kinds_are_refused(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`path` must be a folder, or a file that ends in `\.safetensors`, got '/.*a\."
    ):
        save_safetensors(deferred_init(plain), tmp_path / f"a{suffix}")
    assert not any(tmp_path.iterdir())


def test_fakes_without_a_recording_are_refused(tmp_path: Path) -> None:
    from torchext.fake import fake_mode

    with fake_mode():
        fake = torch.ones(3)
    with pytest.raises(ValueError, match="`f` is fake, so it has no values to save"):
        save_safetensors({"f": fake}, tmp_path / "out")


def test_plan_is_what_is_written(tmp_path: Path) -> None:
    model = deferred_init(nn.Linear, 64, 64)
    plan = plan_checkpoint(model, tmp_path / "model", max_shard_size="10KB")
    assert list(tmp_path.iterdir()) == []
    save_safetensors(model, tmp_path / "model", max_shard_size="10KB")
    written = {path.name: path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")}
    found = json.loads(json.dumps(plan.to_dict()))
    assert {file["name"]: file["nbytes"] for file in found["files"]} == written
    assert plan.nbytes == sum(written.values())
    assert plan.index == "model.safetensors.index.json"
    assert str(plan).splitlines()[0].split() == ["file", "tensors", "bytes"]
    assert "<td>model-00001-of-00002.safetensors</td>" in plan._repr_html_()


def test_progress_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="torchext.checkpoint"):
        save_safetensors(deferred_init(nn.Linear, 2, 2), tmp_path / "model")
    assert [message.partition(" ")[0] for message in caplog.messages] == ["Writing", "Wrote", "Wrote", "The"]
    assert {record.name for record in caplog.records} == {"torchext.checkpoint"}
