"""Construct a Llama as if it fitted into one process, and let each process compute only its shards.

    python examples/sharded_llama.py                              # 4 processes on this machine, a small model
    python examples/sharded_llama.py --processes 2 --tensor 2     # tensor parallelism alone
    python examples/sharded_llama.py --world 512 --rank 300 --tensor 8 --hidden 4096 --layers 32 --vocabulary 128256

The first two start real processes on gloo. The model is sharded by tensor parallelism and by `fully_shard`, and each
process materializes its shards. They check that all shards together are bit for bit the model that one process
constructs with the same seed. Then they train a step.

The last one is a single rank of 512; the others do not exist. It prints the time and memory that this rank needs to
construct its shards of a model of 8 billion parameters.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn

from torchext.deferred_init import deferred_init, materialize_module


class Block(nn.Module):
    """A decoder layer. The heads are those of this process after tensor parallelism."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.norm_mlp = nn.RMSNorm(hidden)
        self.gate, self.up = (nn.Linear(hidden, 7 * hidden // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(7 * hidden // 2, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`: (batch, sequence, hidden)."""
        normed = self.norm_attention(x)
        query, key, value = (
            part(normed).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attention = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        normed = self.norm_mlp(x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return result


class Llama(nn.Module):
    """A language model, without any code for parallelism."""

    def __init__(self, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, sequence, vocabulary) for `tokens` of shape (batch, sequence)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def construct(options: argparse.Namespace) -> Llama:
    """Return the whole model, the same in each process."""
    torch.manual_seed(options.seed)
    return Llama(options.hidden, options.layers, options.vocabulary)


def shard(model: Llama, mesh: DeviceMesh) -> None:
    """Shard the model over both dimensions of the mesh, without communication or computation."""
    if mesh["tensor"].size() > 1:
        plan: dict[str, ParallelStyle] = {}
        for i in range(len(model.blocks)):
            plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
            plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("out", "down")}
        parallelize_module(model, mesh["tensor"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def peak_mib() -> float:
    """Return the peak of this process's memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def construct_shards(options: argparse.Namespace, world: int) -> Llama:
    """Return this process's shards of the model."""
    mesh = init_device_mesh("cpu", (world // options.tensor, options.tensor), mesh_dim_names=("data", "tensor"))
    before, start = peak_mib(), time.perf_counter()
    model = deferred_init(construct, options)
    shard(model, mesh)
    materialize_module(model, check_ranks=True)
    seconds = time.perf_counter() - start
    if dist.get_rank() in (0, options.rank):
        parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
        held = sum(p.to_local().nbytes for p in parameters) / 2**20
        whole = sum(p.nbytes for p in parameters) / 2**20
        print(
            f"rank {dist.get_rank()} of {world} holds {held:.1f} of {whole:,.1f} MiB: "
            f"{seconds:.2f} s, memory grew by {peak_mib() - before:.0f} MiB at most"
        )
    return model


def run_process(rank: int, meeting_point: str, options: argparse.Namespace) -> None:
    """Construct, compare with one process, and train, as one of several processes."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=options.processes)
    model = construct_shards(options, options.processes)
    whole = construct(options)
    for (name, part), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(part, DTensor)
        shard = distribute_tensor(expected.detach(), part.device_mesh, part.placements, src_data_rank=None)
        assert torch.equal(part.to_local(), shard.to_local()), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(64).view(4, 16) % options.vocabulary
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"all shards together are the model of one process, bit for bit; loss of a step: {loss.item():.4f}")
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, or run a single rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--world", type=int, help="run a single rank of a world of this size")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.world:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=options.rank, world_size=options.world)
        construct_shards(options, options.world)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_process, (str(Path(folder) / "meeting_point"), options), nprocs=options.processes)


if __name__ == "__main__":
    main()
