"""More programs for compare.py: shared keys, depthwise and dilated convolutions, video, scans, detection and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from oracle.training import Optimize, Step, adamw, sgd, tokens, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["VARIED_PROGRAMS"]


def train_on(model: nn.Module, x: Tensor, loss_of: Callable[[Any], Tensor], optimize: Optimize, **options: Any) -> Step:
    """Return a function that trains `model` on `x` for a step."""
    return trainer(model.cuda(), lambda model: loss_of(model(x)), optimize, **options)


def images(*sizes: int) -> Tensor:
    return torch.zeros(sizes, device="cuda")


# ---- Sequences.


class SharedKeys(nn.Module):
    """Attention whose heads share keys and values in groups."""

    def __init__(self, width: int, heads: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.dropout = heads, groups, width // heads, dropout
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * groups * self.size)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, self.groups, self.size)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def shared_keys(groups: int, sizes: tuple[int, int], optimize: Optimize, **options: Any) -> Step:
    layers = [SharedKeys(320, 10, groups, options.pop("dropout", 0.0)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(3001, 320, padding_idx=0), *layers, nn.Linear(320, 3001))
    x = tokens(*sizes)
    return train_on(model, x, lambda y: F.cross_entropy(y.flatten(0, 1), x.flatten()), optimize, **options)


class Scan(nn.Module):
    """A state space model: a depthwise convolution, and a scan of the state."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, groups=2 * width, padding=3)
        self.parameters_of_step = nn.Linear(2 * width, 2 * states + 1)
        self.decay, self.norm = nn.Parameter(torch.zeros(2 * width, states)), nn.RMSNorm(width)
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.enter(self.norm(x)).chunk(2, -1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.parameters_of_step(y).split([1, self.states, self.states], -1)
        step = F.softplus(step)
        log = (step[..., None] * -self.decay.exp()).cumsum(1)
        update = (step * y)[..., None] * b[:, :, None, :]
        state = log.exp() * (update * (-log).exp()).cumsum(1)
        y = torch.einsum("bldn,bln->bld", state, c)
        return x + self.leave(y * F.silu(gate))


def scans() -> Step:
    x = tokens(3, 150)
    model = nn.Sequential(nn.Embedding(2000, 96), Scan(96, 8), Scan(96, 8), nn.Linear(96, 2000))
    return train_on(model, x, lambda y: F.cross_entropy(y.flatten(0, 1), x.flatten()), adamw(), clip=1.0)


def recurrent_layers(layer: nn.Module, **options: Any) -> Step:
    return train_on(layer, images(40, 12, 60), lambda y: y[0].square().mean(), adamw(), **options)


class Bags(nn.Module):
    """Bags of words, a decoder, and products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(5000, 128, mode="mean")
        layer = nn.TransformerDecoderLayer(128, 4, 300, 0.2, "gelu", batch_first=True, norm_first=True)
        self.decoder, self.head = nn.TransformerDecoder(layer, 2), nn.Bilinear(128, 128, 40)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.words(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device="cuda")
        y = self.decoder(memory, 2 * memory, tgt_mask=mask)
        return self.head(y, y.flip(1))


# ---- Images and videos.


def depthwise(inputs: int, outputs: int, stride: int, expansion: int = 4) -> nn.Module:
    inner = expansion * inputs
    return nn.Sequential(
        nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(inplace=True),
        nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.Hardswish(),
        nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
    )  # fmt: skip


def mobile(*, channels_last: bool = False, **options: Any) -> Step:
    x = images(12, 3, 96, 96)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), depthwise(16, 24, 2), depthwise(24, 24, 1), depthwise(24, 40, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(40, 100),
    )  # fmt: skip
    if channels_last:
        x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    target = tokens(12)
    return train_on(model, x, lambda y: F.cross_entropy(y, target, label_smoothing=0.1), sgd(momentum=0.9), **options)


def video() -> Step:
    model = nn.Sequential(
        nn.Conv3d(3, 16, 3, (1, 2, 2), 1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(16, 32, 3, padding=1, groups=2), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Conv3d(32, 32, (3, 1, 1), padding=(2, 0, 0), dilation=(2, 1, 1)), nn.AvgPool3d((1, 2, 2)),
        nn.ConvTranspose3d(32, 16, 2, 2), nn.AdaptiveAvgPool3d((2, 3, 3)), nn.Flatten(), nn.Linear(16 * 18, 20),
    )  # fmt: skip
    return train_on(model, images(4, 3, 8, 44, 44), lambda y: y.square().mean(), adamw())


class Dilated(nn.Module):
    """Pyramids of dilated convolutions, whose result is upsampled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(8, 32), nn.GELU(), nn.AvgPool2d(2))
        self.parts = nn.ModuleList(nn.Conv2d(32, 16, 3, padding=rate, dilation=rate) for rate in (1, 2, 5))
        self.up = nn.ConvTranspose2d(48, 24, 4, 2, 1, groups=2)
        self.head = nn.Conv2d(24, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = torch.cat([F.leaky_relu(part(y)) for part in self.parts], 1)
        y = F.interpolate(self.head(self.up(y)), x.shape[2:], mode="bilinear", align_corners=False)
        return F.pad(y, (1, 1, 1, 1), mode="reflect")


def segmentation(**options: Any) -> Step:
    target = tokens(5, 67, 73)
    loss_of = lambda y: F.cross_entropy(y, target, ignore_index=255)  # noqa: E731
    return train_on(Dilated(), images(5, 3, 65, 71), loss_of, adamw(amsgrad=True), **options)


class Windows(nn.Module):
    """Attention within shifted windows, with a bias by distance."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))

    def bias(self) -> Tensor:
        at = torch.stack(
            torch.meshgrid(*[torch.arange(self.window, device=self.table.device)] * 2, indexing="ij")
        ).flatten(1)
        rows, columns = at[:, :, None] - at[:, None] + self.window - 1
        return self.table[rows * (2 * self.window - 1) + columns].permute(2, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        y = self.norm(x).roll((-self.shift, -self.shift), (1, 2)) if self.shift else self.norm(x)
        y = y.unflatten(1, (h // self.window, self.window)).unflatten(3, (w // self.window, self.window))
        y = y.transpose(2, 3).reshape(-1, self.window**2, c)
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.bias()
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = (
            y.reshape(n, h // self.window, w // self.window, self.window, self.window, c)
            .transpose(2, 3)
            .reshape(x.shape)
        )
        return x + (y.roll((self.shift, self.shift), (1, 2)) if self.shift else y)


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 16, 96)
        self.layers = nn.ModuleList(Windows(96, 3, 7, shift) for shift in (0, 3))
        self.head = nn.Linear(96, 50)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(F.unfold(x, 4, stride=4).transpose(1, 2)).unflatten(1, (x.shape[2] // 4, -1))
        for layer in self.layers:
            y = checkpoint(layer, y, use_reentrant=False)
        return self.head(y.mean((1, 2)))


class Detector(nn.Module):
    """Selects the best boxes, and refines them by features that are sampled there."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.scores, self.boxes = nn.Conv2d(32, 3, 1), nn.Conv2d(32, 12, 1)
        self.refine = nn.Sequential(nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(x)
        scores = self.scores(features).permute(0, 2, 3, 1).flatten(1)
        boxes = self.boxes(features).permute(0, 2, 3, 1).reshape(len(x), -1, 4)
        _, best = scores.topk(30, 1)
        chosen = boxes.gather(1, best[..., None].expand(-1, -1, 4))
        grid = chosen[:, :, None, :2].tanh().expand(-1, -1, 9, -1)
        samples = F.grid_sample(features, grid, align_corners=False).permute(0, 2, 1, 3)
        return scores, chosen, self.refine(samples.flatten(0, 1)).unflatten(0, chosen.shape[:2])


def detection() -> Step:
    target = torch.zeros(6, 30, 4, device="cuda")

    def loss_of(results: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        scores, boxes, refined = results
        p = scores.sigmoid()
        focal = F.binary_cross_entropy_with_logits(scores, torch.zeros_like(p), reduction="none") * p.pow(2)
        smallest, largest = (
            torch.maximum(boxes[..., :2], target[..., :2]),
            torch.minimum(boxes[..., 2:], target[..., 2:]),
        )
        width, height = (largest - smallest).clamp(min=0).unbind(-1)
        distances = torch.cdist(refined.flatten(0, 1), target.flatten(0, 1), p=1)
        return (
            focal.sum() + F.smooth_l1_loss(refined, target) - (width * height).mean() + distances.min(1).values.mean()
        )

    return train_on(Detector(), images(6, 3, 90, 110), loss_of, sgd(momentum=0.9, weight_decay=1e-4), clip=10.0)


def penalty() -> Step:
    """Return a penalty on the gradient norm of a critic, which is differentiated twice."""
    x = images(64, 300).requires_grad_()

    def loss_of(model: nn.Module) -> Tensor:
        score = model(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (gradient.norm(2, dim=1) - 1).square().mean()

    model = nn.Sequential(
        nn.Linear(300, 700), nn.Softplus(), nn.LayerNorm(700), nn.Linear(700, 500), nn.Tanh(), nn.Linear(500, 1)
    )
    return trainer(model.cuda(), loss_of, lambda p: torch.optim.RMSprop(p, centered=True))


# ---- Losses and optimizers.


class Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(700, 700)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        largest, where = y.topk(33, 1)
        sums = torch.sigmoid(y).cumsum(1)
        spread = torch.zeros_like(y).scatter_add(1, where, largest)
        products = torch.einsum("ij,kj->ik", y, sums).tanh().mean()
        return sums.logsumexp(1).mean() + y.sort(0).values.var(0).sum() + spread.gather(1, where).mean() + products


def losses() -> Step:
    target, other = tokens(300), images(300, 3000)

    def loss_of(y: Tensor) -> Tensor:
        return (
            F.cross_entropy(y, target, label_smoothing=0.1, ignore_index=5)
            + F.kl_div(y.log_softmax(-1), other.softmax(-1), reduction="batchmean")
            + F.binary_cross_entropy_with_logits(y[:, :9], other[:, :9], pos_weight=other[0, :9])
            + F.huber_loss(y, other.flip(0))
            + F.triplet_margin_loss(y, other, y.roll(1, 0))
            - F.logsigmoid(y[:150] - y[150:]).mean()
            + F.cosine_embedding_loss(y, other, other[:, 0])
        )

    model = nn.Sequential(nn.Linear(256, 512), nn.PReLU(512), nn.BatchNorm1d(512), nn.Linear(512, 3000))
    return train_on(model, images(300, 256), loss_of, lambda p: torch.optim.RMSprop(p, momentum=0.9), clip=0.5)


def perceptron(optimize: Optimize, **options: Any) -> Step:
    layers = [nn.Linear(333, 777, bias=False), nn.SELU(), nn.Linear(777, 555, bias=False)]
    return train_on(nn.Sequential(*layers), images(500, 333), lambda y: y.logsumexp(-1).mean(), optimize, **options)


VARIED_PROGRAMS: dict[str, Callable[[], Step]] = {
    "shared_keys_dropout": lambda: shared_keys(5, (6, 130), adamw(amsgrad=True), dropout=0.1),
    "shared_keys": lambda: shared_keys(2, (5, 200), adamw()),
    "one_key_autocast": lambda: shared_keys(1, (5, 111), adamw(fused=True), autocast=torch.bfloat16),
    "scans": scans,
    "lstm": lambda: recurrent_layers(nn.LSTM(60, 80, 2, dropout=0.1)),
    "gru_both_ways": lambda: recurrent_layers(nn.GRU(60, 80, bidirectional=True, batch_first=True), clip=1.0),
    "bags": lambda: train_on(
        Bags(), tokens(7, 19, 5), lambda y: y.logsumexp(-1).mean(), lambda p: torch.optim.NAdam(p), microbatches=2
    ),
    "mobile": mobile,
    "mobile_channels_last_fp16": lambda: mobile(channels_last=True, autocast=torch.float16, scaler=True),
    "video": video,
    "segmentation": segmentation,
    "segmentation_bf16": lambda: segmentation(autocast=torch.bfloat16),
    "swin": lambda: train_on(Swin(), images(6, 3, 112, 112), lambda y: y.square().mean(), adamw()),
    "detection": detection,
    "penalty": penalty,
    "sorts": lambda: train_on(Sorts(), images(501, 700), lambda y: y, lambda p: torch.optim.Adagrad(p)),
    "losses": losses,
    "muon": lambda: perceptron(lambda p: torch.optim.Muon(p)),
    "rprop": lambda: perceptron(lambda p: torch.optim.Rprop(p)),
    "adadelta_capturable": lambda: perceptron(lambda p: torch.optim.Adadelta(p, capturable=True)),
    "adam_capturable": lambda: perceptron(lambda p: torch.optim.Adam(p, capturable=True, amsgrad=True)),
    "radam": lambda: perceptron(lambda p: torch.optim.RAdam(p)),
}
