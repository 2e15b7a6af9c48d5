# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Small trainings of common kinds, as the code of cells.

A notebook runs the cells on a device. For comparison, a program runs the same cells, in most cases
on the host. Each cell prints the exact bits of its losses. Random numbers come from the generator
of the host, because the generator of a device gives other numbers. The first cell defines
``DEVICE``.
"""

from __future__ import annotations

_BEGIN = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(7)
torch.set_num_threads(1)  # sums of several threads are in no fixed order
cuda = DEVICE == "cuda"

def say(losses):
    print(*(float(loss).hex() for loss in losses))
"""

_LOOP = """
def train(steps):
    losses = []
    for _ in range(steps):
        loss = step()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    say(losses)
"""

#: Training -> the code that sets it up. This code defines a function ``train(steps)``.
SETUPS = {
    "tabular": """
x = torch.randn(256, 12)
y = (x[:, :3].sum(1) > 0).long()
x, y = x.to(DEVICE), y.to(DEVICE)
model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 2)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

def step():
    rows = torch.randint(0, 256, (64,)).to(DEVICE)
    return F.cross_entropy(model(x[rows]), y[rows])
"""
    + _LOOP,
    "resnet": """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.last(self.two(F.relu(self.norm(self.one(x))))))

data = torch.utils.data.TensorDataset(torch.randn(48, 3, 12, 12), torch.randint(0, 4, (48,)))
loader = torch.utils.data.DataLoader(data, 16, num_workers=2, pin_memory=cuda)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

def train(steps):
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(DEVICE, non_blocking=True)), y.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    say(losses)
""",
    "transformer": """
tokens = torch.randint(0, 20, (16, 13)).to(DEVICE)
model = nn.Sequential(
    nn.Embedding(20, 16),
    nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    nn.Linear(16, 20),
).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler(DEVICE, init_scale=128.0)

def train(steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    say(losses)
""",
    "lstm": """
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.last = nn.LSTM(6, 24, 2, batch_first=True), nn.Linear(24, 6)

    def forward(self, x):
        return self.last(self.cells(x)[0])

waves = torch.sin(torch.arange(12.0)[None, :, None] * torch.rand(16, 1, 6)).to(DEVICE)
model = Reader().to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)

def step():
    return F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
"""
    + _LOOP,
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
x = torch.randn(64, 16).to(DEVICE)
parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)).to(DEVICE)
optimizer = torch.optim.RMSprop(parts.parameters(), 1e-3)

def step():
    value = x
    for part in parts:
        value = checkpoint(part, value, use_reentrant=False)
    return (value - x).square().mean()
"""
    + _LOOP,
    "captured": """
x, y = torch.randn(32, 8).to(DEVICE), torch.randn(32, 1).to(DEVICE)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), 0.05)

def once():
    optimizer.zero_grad(set_to_none=True)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

if cuda:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = once()
else:
    for _ in range(3):
        once()

def train(steps):
    losses = []
    for _ in range(steps):
        if cuda:
            graph.replay()
            losses.append(loss.item())
        else:
            losses.append(once().item())
    say(losses)
""",
    "diffusion": """
images = torch.randn(32, 1, 8, 8).to(DEVICE)
levels = torch.linspace(0.99, 0.1, 10).to(DEVICE)
model = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 1, 3, padding=1))
model.to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
average = [p.detach().clone() for p in model.parameters()]

def step():
    t, noise = torch.randint(0, 10, (32,)).to(DEVICE), torch.randn(32, 1, 8, 8).to(DEVICE)
    kept = levels[t].reshape(-1, 1, 1, 1)
    mixed = kept.sqrt() * images + (1 - kept).sqrt() * noise
    with torch.no_grad():
        torch._foreach_lerp_(average, list(model.parameters()), 0.1)
    return F.mse_loss(model(torch.cat((mixed, kept.expand(-1, 1, 8, 8)), 1)), noise)
"""
    + _LOOP,
    "compiled": """
import warnings
warnings.filterwarnings("ignore", "TensorFloat32")  # told only when no cache has the code
x, y = torch.randn(32, 10).to(DEVICE), torch.randint(0, 3, (32,)).to(DEVICE)
model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
compiled = torch.compile(model)

def step():
    return F.cross_entropy(compiled(x), y)
"""
    + _LOOP,
}

#: Trainings that give other numbers on a device than on the host. Two of them sum in another order
#: on a device: LSTM (fused cells) and Triton (sums in trees). In the third, autocast uses other
#: types. So the tests compare these trainings with an undisturbed run on a device.
OTHER = ("lstm", "transformer", "compiled")

#: Number of trainings in each notebook. The pool may suspend a kernel between two trainings.
ROUNDS = 4


def cells(name: str, device: str) -> list[str]:
    """Return the cells of a training on ``"cuda"`` or ``"cpu"``."""
    return [f"DEVICE = {device!r}" + _BEGIN + SETUPS[name], *["train(4)"] * ROUNDS]
