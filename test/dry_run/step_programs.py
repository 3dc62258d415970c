"""Programs with different notions of a step, for `test_steps.py`.

Each is a loop over a given `count`. `OF_STEPS` holds the number of iterations for two steps.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PREAMBLE", "PROGRAMS", "Program"]

PREAMBLE = """
import torch, torch.distributed as dist
from torch import nn

hooks = []

def net(*widths):
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:]))).cuda()

def batch(width=256):
    return torch.randn(8, width, device="cuda")

def adam(module):
    return torch.optim.Adam(module.parameters() if isinstance(module, nn.Module) else module)
"""


class Program(NamedTuple):
    """A program.

    Attributes:
        setup: The code before the loop.
        loop: The body of the loop. `i` is the number of the iteration.
        of_steps: The number of iterations for two steps.
        calls: The number of optimizer calls in these.
    """

    setup: str
    loop: str
    of_steps: int
    calls: int


PLAIN = "model = net(256, 512); optimizer = adam(model)\n"
TRAIN = "model(batch()).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
TWO = "one, two = net(256, 2048), net(256, 512); optimizer_1, optimizer_2 = adam(one), adam(two)\n"
TRAIN_1 = "one(batch()).sum().backward(); optimizer_1.step(); optimizer_1.zero_grad()\n"
TRAIN_2 = "two(batch()).sum().backward(); optimizer_2.step(); optimizer_2.zero_grad()\n"

PROGRAMS = {
    "plain": Program(PLAIN, TRAIN, 2, 2),
    "scheduler": Program(PLAIN + "rates = torch.optim.lr_scheduler.StepLR(optimizer, 1)", TRAIN + "rates.step()", 2, 2),
    "accumulation": Program(
        PLAIN,
        """
model(batch()).sum().backward()
if i % 4 == 3:
    optimizer.step(); optimizer.zero_grad()
""",
        8,
        2,
    ),
    "gan, discriminator first": Program(TWO, TRAIN_2 + "if i % 5 == 4: " + TRAIN_1, 10, 12),
    "gan, discriminators before": Program(TWO, "for _ in range(5): " + TRAIN_2 + TRAIN_1, 2, 12),
    "gan, generator every 16": Program(TWO, TRAIN_2 + "if i % 16 == 15: " + TRAIN_1, 32, 34),
    "gan, networks switched off in turns": Program(
        TWO,
        """
one.requires_grad_(False); two.requires_grad_(True)
"""
        + TRAIN_2
        + """
if i % 3 == 2:
    two.requires_grad_(False); one.requires_grad_(True)
    """
        + TRAIN_1,
        6,
        8,
    ),
    "two optimizers in each iteration": Program(TWO, TRAIN_1 + TRAIN_2, 2, 4),
    "two optimizers after one backward pass": Program(
        TWO, "(one(batch()).sum() + two(batch()).sum()).backward(); optimizer_1.step(); optimizer_2.step()", 2, 4
    ),
    "two optimizers in turns": Program(TWO, f"if i % 2: {TRAIN_1}\nelse: {TRAIN_2}", 4, 4),
    "optimizer that begins later": Program(TWO, TRAIN_2 + "if i >= 2: " + TRAIN_1, 4, 6),
    "optimizer of frozen parameters": Program(
        PLAIN + "frozen = net(256, 512).requires_grad_(False); other = adam(frozen)", TRAIN, 2, 2
    ),
    "optimizer that is deleted": Program(TWO + "del optimizer_1", TRAIN_2, 2, 2),
    "optimizer within another": Program(
        """
class Outer(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.Adam(self.param_groups)
    def step(self, closure=None):
        self.inner.step()
model = net(256, 512); optimizer = Outer(list(model.parameters()))
""",
        TRAIN,
        2,
        4,
    ),
    "sharpness-aware": Program(
        """
class SAM(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.Adam(self.param_groups)
    def second_step(self):
        self.inner.step()
model = net(256, 512); optimizer = SAM(list(model.parameters()))
""",
        "for _ in range(2): model(batch()).sum().backward()\noptimizer.second_step(); optimizer.zero_grad()",
        2,
        2,
    ),
    "engine that swaps groups": Program(
        """
model = net(256, 512, 256, 512)
optimizer = adam(model)
groups = list(model.parameters())
optimizer.param_groups[0]["params"] = []
""",
        """
model(batch()).sum().backward()
for group in groups:
    optimizer.param_groups[0]["params"] = [group]
    optimizer.step()
    optimizer.param_groups[0]["params"] = []
model.zero_grad()
""",
        2,
        6,
    ),
    "engine with an optimizer for each group": Program(
        "model = net(256, 512, 256, 512); optimizers = [adam([p]) for p in model.parameters()]",
        "model(batch()).sum().backward()\nfor optimizer in optimizers: optimizer.step(); optimizer.zero_grad()",
        2,
        6,
    ),
    "optimizers in the backward pass": Program(
        """
model = net(256, 512, 256, 512)
optimizers = {p: adam([p]) for p in model.parameters()}
def update(parameter):
    optimizers[parameter].step(); optimizers[parameter].zero_grad()
hooks += [p.register_post_accumulate_grad_hook(update) for p in optimizers]
""",
        "model(batch()).sum().backward()",
        2,
        6,
    ),
    "optimizers in a backward pass with checkpoints": Program(
        """
from torch.utils.checkpoint import checkpoint
layers = [net(256, 512, 256) for _ in range(3)]
optimizers = {p: adam([p]) for layer in layers for p in layer.parameters()}
def update(parameter):
    optimizers[parameter].step(); optimizers[parameter].zero_grad()
hooks += [p.register_post_accumulate_grad_hook(update) for p in optimizers]
""",
        """
out = batch().requires_grad_()
for layer in layers: out = checkpoint(layer, out, use_reentrant=bool(i % 2))
out.sum().backward()
""",
        2,
        12,
    ),
    "closure that runs the model": Program(
        PLAIN
        + """
def closure():
    optimizer.zero_grad(); loss = model(batch()).sum(); loss.backward(); return loss
""",
        "optimizer.step(closure)",
        2,
        2,
    ),
    "closures of two optimizers": Program(
        TWO
        + """
def closure(model, optimizer):
    optimizer.zero_grad(); loss = model(batch()).sum(); loss.backward(); return loss
""",
        "optimizer_1.step(lambda: closure(one, optimizer_1)); optimizer_2.step(lambda: closure(two, optimizer_2))",
        2,
        4,
    ),
    "L-BFGS": Program(
        """
model = net(256, 512)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=-1, tolerance_change=-1)
def closure():
    optimizer.zero_grad(); loss = model(batch()).sum(); loss.backward(); return loss
""",
        "optimizer.step(closure)",
        2,
        2,
    ),
    "scaled gradients": Program(
        PLAIN + "scaler = torch.amp.GradScaler('cuda')",
        """
scaler.scale(model(batch()).sum()).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
""",
        2,
        2,
    ),
    "validation between steps": Program(
        PLAIN, TRAIN + "with torch.no_grad():\n    for _ in range(3): model(batch()).sum()\n", 2, 2
    ),
    "metrics and losses that are modules": Program(
        PLAIN + "loss, metric = nn.MSELoss(), nn.ReLU()",
        """
out = model(batch()); loss(out, torch.zeros_like(out)).backward(); optimizer.step(); metric(out.detach())
del out; optimizer.zero_grad()
""",
        2,
        2,
    ),
    "generations before each step": Program(
        PLAIN, "with torch.no_grad():\n    for _ in range(8): model(batch()).sum()\n" + TRAIN, 2, 2
    ),
    "microbatches": Program(
        PLAIN,
        """
losses = [model(batch()).sum() for _ in range(4)]
while losses: losses.pop().backward()
optimizer.step(); optimizer.zero_grad()
""",
        2,
        2,
    ),
    "gradient penalty": Program(
        PLAIN,
        """
x = batch().requires_grad_()
penalty, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
penalty.square().sum().backward(); optimizer.step(); optimizer.zero_grad(); del penalty, x
""",
        2,
        2,
    ),
    "without modules": Program(
        "weight = torch.randn(512, 256, device='cuda', requires_grad=True); optimizer = adam([weight])",
        "(batch() @ weight.T).sum().backward(); optimizer.step(); optimizer.zero_grad()",
        2,
        2,
    ),
    "without passes": Program(
        "weight = torch.randn(512, 256, device='cuda', requires_grad=True); optimizer = adam([weight])",
        "weight.grad = torch.randn_like(weight); optimizer.step(); optimizer.zero_grad()",
        2,
        2,
    ),
    "evolution strategy": Program(
        PLAIN,
        """
with torch.no_grad():
    model(batch())
for p in model.parameters(): p.grad = torch.randn_like(p)
optimizer.step(); optimizer.zero_grad()
""",
        2,
        2,
    ),
    "state that is made before training": Program(
        PLAIN
        + """
for p in model.parameters(): p.grad = torch.zeros_like(p)
optimizer.step(); optimizer.zero_grad()
""",
        TRAIN,
        2,
        3,
    ),
    "step that raises and is tried again": Program(
        PLAIN
        + """
failed = []
def fail(*_):
    if not failed:
        failed.append(True); raise RuntimeError("once")
optimizer.register_step_pre_hook(fail)
""",
        """
model(batch()).sum().backward()
try: optimizer.step()
except RuntimeError: pass
optimizer.zero_grad()
""",
        3,
        2,
    ),
    "exceptions within modules": Program(
        PLAIN
        + """
class Stops(nn.Module):
    def __init__(self):
        super().__init__(); self.model = model
    def forward(self, x):
        self.model(x); raise StopIteration
stops = Stops()
""",
        "try: stops(batch())\nexcept StopIteration: pass\n" + TRAIN,
        2,
        2,
    ),
}
