"""Megatron-core, following its own example: https://docs.nvidia.com/megatron-core/developer-guide/latest."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

parser = argparse.ArgumentParser()
parser.add_argument("--tensor", type=int, default=2)
parser.add_argument("--pipeline", type=int, default=1)
parser.add_argument("--distributed-optimizer", action="store_true")
arguments = parser.parse_args()

SEQUENCE, VOCABULARY, BATCH = 128, 4096, 2

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(arguments.tensor, arguments.pipeline)
model_parallel_cuda_manual_seed(123)

config = TransformerConfig(
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    tensor_model_parallel_size=arguments.tensor,
    pipeline_model_parallel_size=arguments.pipeline,
    use_cpu_initialization=True,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    finalize_model_grads_func=finalize_model_grads,
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=VOCABULARY,
    max_sequence_length=SEQUENCE,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
    share_embeddings_and_output_weights=False,
    position_embedding_type="rope",
).cuda()
model = DistributedDataParallel(
    config=config,
    ddp_config=DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=arguments.distributed_optimizer
    ),
    module=model.bfloat16(),
)
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=arguments.distributed_optimizer,
    ),
    [model],
)


def batches() -> Iterator[Tensor]:
    """Sentences of random words."""
    while True:
        yield torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), device="cuda")


def loss_of(labels: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of the loss of each word."""
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}


def forward_step(data: Iterator[Tensor], model: torch.nn.Module) -> tuple[Tensor, object]:
    """One forward pass of a stage."""
    words = next(data)
    tokens, labels = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").tril() < 0.5
    return model(tokens, positions, mask, labels=labels), partial(loss_of, labels)


data = batches()
for iteration in range(8):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=4,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    successful, norm, zeros = optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"iteration {iteration}: successful {successful}, norm {norm}")
Path("checkpoints").mkdir(exist_ok=True)
dist_checkpointing.save(model.module.sharded_state_dict(prefix=""), "checkpoints")
