"""A `Trainer` of lightning, by strategy: https://lightning.ai/docs/pytorch/stable/starter/introduction.html."""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", choices=["ddp", "fsdp", "fsdp2", "deepspeed_stage_2"], default="ddp")
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--devices", type=int, default=8)
arguments = parser.parse_args()

WIDTH, LAYERS = 512, 4


class Language(nn.Module):
    """A transformer for next-word prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 4096, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next word."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Training(lightning.LightningModule):
    """The training module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Language()

    def configure_model(self) -> None:
        """With `ModelParallelStrategy` the module is sharded here."""
        if arguments.strategy == "fsdp2":
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def loss(self, tokens: Tensor) -> Tensor:
        """The loss of a batch."""
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        """A batch of training."""
        loss = self.loss(tokens)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, tokens: Tensor, _: int) -> None:
        """Compute the loss of a held-out batch."""
        self.log("val_loss", self.loss(tokens), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW for everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


strategy = {
    "fsdp": FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}),
    "fsdp2": ModelParallelStrategy(data_parallel_size=arguments.devices * arguments.nodes, tensor_parallel_size=1),
}.get(arguments.strategy, arguments.strategy)
rows = [torch.randint(4096, (128,)) for _ in range(8192)]
trainer = lightning.Trainer(
    accelerator="gpu",
    devices=arguments.devices,
    num_nodes=arguments.nodes,
    strategy=strategy,
    precision="bf16-true" if arguments.strategy == "deepspeed_stage_2" else "bf16-mixed",
    max_epochs=1,
    log_every_n_steps=1,
    limit_val_batches=2,
)
trainer.fit(Training(), DataLoader(rows, batch_size=2, shuffle=True), DataLoader(rows[:2048], batch_size=2))
