"""Training programs whose memory is compared with a CUDA build: functions that make a step, by name.

They run on "cuda" and read no values, so that they also run with kernels that compute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from oracle.training import Optimize, Step, adamw, sgd, tokens, trainer
from oracle.varied_programs import VARIED_PROGRAMS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["PROGRAMS", "Step"]

# ---- Perceptrons.


def mlp(optimize: Optimize, batch: int = 4096, width: int = 1024, **options: Any) -> Step:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    x = torch.zeros(batch, width, device="cuda")
    return trainer(nn.Sequential(*layers).cuda(), lambda model: model(x).square().mean(), optimize, **options)


class Mixer(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


def mixer() -> Step:
    model = nn.Sequential(nn.Conv2d(3, 192, 16, stride=16), nn.Flatten(2), *[Mixer(192, 196) for _ in range(4)]).cuda()
    images = torch.zeros(16, 3, 224, 224, device="cuda")
    return trainer(model, lambda model: model(images).mean(), sgd(momentum=0.9))


# ---- Transformers.


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups or heads, width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * self.groups * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        rotate = options.pop("rotate", None)
        context = x if context is None else context
        q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(context).unflatten(-1, (2, self.groups, self.size)).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        if self.groups != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, **options)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), **options))
        return x + self.dropout(self.feed(self.norm2(x)))


class Transformer(nn.Module):
    def __init__(self, words: int, length: int, width: int, layers: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.saves = options.pop("saves", False)
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, **options) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        y = self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            y = checkpoint(layer, y, use_reentrant=False, **options) if self.saves else layer(y, **options)
        return self.head(self.norm(y))


def gpt(optimize: Optimize, sizes: tuple[int, int] = (4, 512), **options: Any) -> Step:
    inner = {name: options.pop(name) for name in ("dropout", "saves") if name in options}
    model = Transformer(50257, 1024, 384, 4, 6, **inner).cuda()
    x, target = tokens(*sizes), tokens(*sizes)

    def loss_of(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x, is_causal=True).flatten(0, 1), target.flatten())

    return trainer(model, loss_of, optimize, **options)


def bert(optimize: Optimize, **options: Any) -> Step:
    model = Transformer(30522, 512, 512, 3, 8, dropout=0.1).cuda()
    x, target = tokens(8, 384), tokens(8, 384)
    mask = torch.ones(8, 384, dtype=torch.bool, device="cuda")[:, None, None, :].expand(8, 1, 384, 384)

    def loss_of(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x, attn_mask=mask).flatten(0, 1), target.flatten(), ignore_index=-100)

    return trainer(model, loss_of, optimize, **options)


class ViT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.cls.expand(len(y), -1, -1), y], 1) + self.positions
        return self.head(self.norm(self.layers(y))[:, 0])


def vit(batch: int, **options: Any) -> Step:
    images, target = torch.zeros(batch, 3, 224, 224, device="cuda"), tokens(batch)

    def loss_of(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), target, label_smoothing=0.1)

    return trainer(ViT(384, 4, 6).cuda(), loss_of, adamw(), **options)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, groups, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), rotate=rotate, is_causal=True)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, words: int, width: int, layers: int, heads: int, groups: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, groups, 11 * width // 4) for _ in range(layers))
        self.norm, self.size = nn.RMSNorm(width), width // heads

    def forward(self, x: Tensor) -> Tensor:
        frequencies = 1 / 10000 ** (torch.arange(0, self.size, 2, device=x.device).float() / self.size)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), frequencies).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()

        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return ((t * cos) + (torch.cat([-b, a], -1) * sin)).to(t.dtype)

        y = self.words(x)
        for layer in self.layers:
            y = layer(y, rotate)
        return self.head(self.norm(y))


def llama(optimize: Optimize, dtype: torch.dtype = torch.float32, **options: Any) -> Step:
    model = Llama(32000, 512, 4, 8, 4).to("cuda", dtype)
    x = tokens(2, 1024)

    def loss_of(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x)[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())

    return trainer(model, loss_of, optimize, **options)


class T5(nn.Module):
    def __init__(self, words: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(words, width), nn.Embedding(32, heads)
        self.encoder, self.decoder, self.cross = (Attention(width, heads, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, words, bias=False)

    def positions(self, length: int) -> Tensor:
        at = torch.arange(length, device=self.head.weight.device)
        distance = (at[None] - at[:, None]).abs()
        far = 16 + (torch.log(distance.clamp(min=1).float() / 16) * (16 / math.log(8))).long().clamp(max=15)
        return self.bias(torch.where(distance < 16, distance, far.clamp(min=0))).permute(2, 0, 1)[None]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        source, target = self.words(x), self.words(y)
        source = source + self.encoder(self.norms[0](source), attn_mask=self.positions(x.shape[1]))
        causal = torch.full((y.shape[1],) * 2, float("-inf"), device=y.device).triu(1)
        target = target + self.decoder(self.norms[1](target), attn_mask=self.positions(y.shape[1]) + causal)
        target = target + self.cross(self.norms[2](target), source)
        return self.head(target + self.feed(target))


def t5() -> Step:
    x, y = tokens(4, 256), tokens(4, 128)

    def loss_of(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x, y).flatten(0, 1), y.flatten(), ignore_index=0)

    return trainer(T5(32128, 512, 8).cuda(), loss_of, lambda p: torch.optim.Adafactor(p), clip=1.0)


class Experts(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.zeros(count, width, 2 * width))
        self.down = nn.Parameter(torch.zeros(count, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        count = self.router.out_features
        gates, chosen = F.softmax(self.router(flat), -1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        batches = flat[order // 2].reshape(count, -1, x.shape[-1])
        outputs = torch.bmm(F.gelu(torch.bmm(batches, self.up)), self.down).flatten(0, 1)
        weighted = outputs * gates.flatten()[order][:, None]
        load = F.one_hot(chosen, count).float().mean((0, 1))
        mixed = torch.zeros_like(flat).index_add(0, order // 2, weighted).reshape(x.shape)
        return mixed + (load * load.cumsum(0)).sum() * 0


def moe() -> Step:
    model = nn.Sequential(
        nn.Embedding(1000, 256), Experts(256, 8), nn.LayerNorm(256), Experts(256, 8), nn.Linear(256, 10)
    )
    x = tokens(16, 256)
    return trainer(model.cuda(), lambda model: model(x).logsumexp(-1).mean(), adamw(foreach=False))


def encoder_layers() -> Step:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    x = torch.zeros(12, 100, 256, device="cuda")
    padding = torch.zeros(12, 100, dtype=torch.bool, device="cuda")

    def loss_of(model: nn.Module) -> Tensor:
        return F.mse_loss(model(x, src_key_padding_mask=padding), x)

    return trainer(model, loss_of, lambda p: torch.optim.NAdam(p))


def sampling() -> Step:
    model = Transformer(50257, 256, 384, 2, 6).cuda().eval()

    @torch.no_grad()
    def step() -> Tensor:
        x = tokens(4, 16)
        for _ in range(8):
            logits = model(x, is_causal=True)[:, -1]
            best, _ = logits.topk(50)
            logits = logits.masked_fill(logits < best[:, -1:], float("-inf"))
            x = torch.cat([x, torch.multinomial(logits.softmax(-1), 1)], 1)
        return x

    return step


# ---- Convolutions by PyTorch's kernels: libraries choose their workspaces by measured speed.


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


def resnet(batch: int, optimize: Optimize, **options: Any) -> Step:
    stem = [nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    body = [Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2)]
    model = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100)).cuda()
    images, target = torch.zeros(batch, 3, 160, 160, device="cuda"), tokens(batch)
    return trainer(model, lambda model: F.cross_entropy(model(images), target), optimize, **options)


def double(inputs: int, outputs: int) -> nn.Module:
    parts = [
        part
        for n in (inputs, outputs)
        for part in (nn.Conv2d(n, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())
    ]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = double(3, 32), double(32, 64), double(64, 128)
        self.up2, self.up1, self.out = double(192, 64), double(96, 32), nn.Conv2d(32, 3, 1)
        self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
        self.attention, self.norm = Attention(128, 4), nn.GroupNorm(8, 128)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2)) + self.time(at)[:, :, None, None]
        c = c + self.attention(self.norm(c).flatten(2).transpose(1, 2)).transpose(1, 2).reshape(c.shape)
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2, mode="nearest"), b], 1))
        return self.out(self.up1(torch.cat([F.interpolate(b, scale_factor=2, mode="bilinear"), a], 1)))


def unet() -> Step:
    images, at = torch.zeros(8, 3, 64, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
    model = UNet().cuda()
    average = [p.detach().clone() for p in model.parameters()]

    def loss_of(model: nn.Module) -> Tensor:
        noise = torch.randn_like(images)
        return F.mse_loss(model(images + noise, at), noise)

    train = trainer(model, loss_of, lambda p: torch.optim.Adam(p, amsgrad=True))

    def step() -> None:
        train()
        torch._foreach_lerp_(average, list(model.parameters()), 0.01)

    return step


def audio() -> Step:
    model = nn.Sequential(
        nn.Conv1d(1, 64, 10, 5), nn.GELU(), nn.Conv1d(64, 128, 3, 2), nn.BatchNorm1d(128), nn.Conv1d(128, 256, 3, 2),
        nn.GLU(1), nn.AdaptiveAvgPool1d(50), nn.Flatten(1), nn.Linear(6400, 20),
    ).cuda()  # fmt: skip
    waves, target = torch.zeros(6, 1, 16000, device="cuda"), torch.zeros(6, 20, device="cuda")
    return trainer(model, lambda model: F.smooth_l1_loss(model(waves), target), adamw(foreach=False), clip=0.5)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU())
        self.code, self.start = nn.Linear(64 * 49, 64), nn.Linear(32, 64 * 49)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.code(self.encode(x).flatten(1)).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return self.decode(self.start(sample).unflatten(1, (64, 7, 7))), mean, log


def vae() -> Step:
    images = torch.zeros(64, 1, 28, 28, device="cuda")

    def loss_of(model: nn.Module) -> Tensor:
        output, mean, log = model(images)
        divergence = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum()
        return F.binary_cross_entropy(output, images, reduction="sum") + divergence

    return trainer(Vae().cuda(), loss_of, lambda p: torch.optim.Adamax(p))


# ---- Others.


def recurrent(cell: type[nn.Module]) -> Step:
    model = nn.ModuleDict(
        {"cell": cell(128, 256), "words": nn.Embedding(5000, 128), "head": nn.Linear(256, 5000)}
    ).cuda()
    x = tokens(32, 20)

    def loss_of(model: nn.Module) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        hidden: Any = torch.zeros(32, 256, device="cuda")
        state = (hidden, hidden) if cell is nn.LSTMCell else hidden
        outputs = []
        for at in range(20):
            state = model["cell"](model["words"](x[:, at]), state)
            outputs.append(state[0] if cell is nn.LSTMCell else state)
        return F.nll_loss(F.log_softmax(model["head"](torch.stack(outputs, 1)), -1).flatten(0, 1), x.flatten())

    return trainer(model, loss_of, lambda p: torch.optim.RMSprop(p, momentum=0.9))


class Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 64, mode="sum") for rows in (100000, 5000, 333))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(64 + 6, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: Tensor, bags: list[tuple[Tensor, Tensor]]) -> Tensor:
        low = self.bottom(dense)
        all_features = torch.stack([low, *(bag(*at) for bag, at in zip(self.bags, bags, strict=True))], 1)
        products = torch.bmm(all_features, all_features.transpose(1, 2))
        rows, columns = torch.triu_indices(4, 4, 1, device="cuda")
        return self.top(torch.cat([low, products[:, rows, columns]], 1)).squeeze(1)


def dlrm() -> Step:
    dense, labels = torch.zeros(2048, 13, device="cuda"), torch.zeros(2048, device="cuda")
    bags = [(tokens(2048 * 4), torch.arange(0, 2048 * 4, 4, device="cuda")) for _ in range(3)]

    def loss_of(model: nn.Module) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(dense, bags), labels)

    return trainer(Dlrm().cuda(), loss_of, lambda p: torch.optim.Adagrad(p))


def graph() -> Step:
    nodes, edges = torch.zeros(10000, 64, device="cuda"), tokens(2, 80000)
    model = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 16)]).cuda()

    def loss_of(model: nn.Module) -> Tensor:
        assert isinstance(model, nn.ModuleList)
        x = nodes
        for layer in model:
            messages = layer(x)[edges[0]]
            count = torch.zeros(10000, device="cuda").scatter_add(0, edges[1], torch.ones(80000, device="cuda"))
            sums = torch.zeros(10000, messages.shape[1], device="cuda").index_add(0, edges[1], messages)
            x = F.elu(sums / count.clamp(min=1)[:, None])
        return x.norm(dim=-1).mean()

    return trainer(model, loss_of, sgd(foreach=False))


def contrastive() -> Step:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.images, self.words = ViT(192, 2, 3), Transformer(10000, 77, 192, 2, 3)
            self.scale = nn.Parameter(torch.ones([]))

        def forward(self, images: Tensor, words: Tensor) -> Tensor:
            a = F.normalize(self.images(images), dim=-1)
            b = F.normalize(self.words(words).amax(1)[:, :1000], dim=-1)
            return self.scale.exp() * a @ b.t()

    images, words, target = torch.zeros(24, 3, 224, 224, device="cuda"), tokens(24, 77), tokens(24)

    def loss_of(model: nn.Module) -> Tensor:
        logits = model(images, words)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    return trainer(Towers().cuda(), loss_of, adamw(fused=True), autocast=torch.bfloat16)


PROGRAMS: dict[str, Callable[[], Step]] = {
    "mlp_adam_foreach": lambda: mlp(lambda p: torch.optim.Adam(p)),
    "mlp_adam_loop": lambda: mlp(lambda p: torch.optim.Adam(p, foreach=False)),
    "mlp_adam_fused": lambda: mlp(lambda p: torch.optim.Adam(p, fused=True)),
    "mlp_sgd": lambda: mlp(sgd(), batch=1000, width=999),
    "mlp_sgd_momentum": lambda: mlp(sgd(momentum=0.9, nesterov=True), clip=1.0),
    "mlp_autocast_bf16": lambda: mlp(adamw(), autocast=torch.bfloat16),
    "mixer": mixer,
    "gpt": lambda: gpt(adamw()),
    "gpt_fused_clip_dropout": lambda: gpt(adamw(fused=True), clip=1.0, dropout=0.1),
    "gpt_accumulate_odd": lambda: gpt(adamw(foreach=False), (3, 77), microbatches=4),
    "gpt_checkpoint": lambda: gpt(adamw(), (8, 512), saves=True),
    "gpt_autocast_bf16": lambda: gpt(adamw(), autocast=torch.bfloat16, clip=1.0),
    "gpt_autocast_fp16_scaler": lambda: gpt(adamw(fused=True), autocast=torch.float16, scaler=True),
    "gpt_checkpoint_autocast": lambda: gpt(adamw(), (5, 300), saves=True, autocast=torch.bfloat16),
    "bert_masks": lambda: bert(sgd(momentum=0.9)),
    "bert_masks_autocast": lambda: bert(adamw(), autocast=torch.bfloat16),
    "vit": lambda: vit(32),
    "vit_autocast_odd": lambda: vit(7, autocast=torch.bfloat16),
    "llama": lambda: llama(adamw()),
    "llama_autocast": lambda: llama(adamw(fused=True), autocast=torch.bfloat16),
    "llama_bf16": lambda: llama(adamw(), torch.bfloat16, clip=1.0),
    "t5_adafactor": t5,
    "moe": moe,
    "encoder_layers": encoder_layers,
    "sampling": sampling,
    "resnet": lambda: resnet(32, sgd(momentum=0.9)),
    "resnet_odd_loop": lambda: resnet(5, sgd(momentum=0.9, foreach=False)),
    "resnet_autocast": lambda: resnet(16, adamw(), autocast=torch.bfloat16),
    "unet_average": unet,
    "audio": audio,
    "vae": vae,
    "lstm_cell": lambda: recurrent(nn.LSTMCell),
    "gru_cell": lambda: recurrent(nn.GRUCell),
    "dlrm": dlrm,
    "graph": graph,
    "contrastive": contrastive,
    **VARIED_PROGRAMS,
}
