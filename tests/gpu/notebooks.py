# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Notebooks whose cells print exact results.

On one device, a notebook prints the same text in each run. So a test can compare a run that is
suspended half-way with an undisturbed run. Every cell prints something.
"""

from __future__ import annotations

_TORCH_SETUP = """
import os
# cuBLAS is deterministic with a workspace of a fixed size; it is read at the first use.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
from tests.gpu.workloads import TORCH_DEVICE as device

torch.use_deterministic_algorithms(True)
torch.manual_seed(11)
print("deterministic:", torch.are_deterministic_algorithms_enabled())
"""

_TORCH_MODEL = """
from torch import nn

data = torch.randn(4096, 64, device=device)
target = torch.sin(data @ torch.randn(64, 8, device=device))
model = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(),
    nn.Linear(512, 8),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []

def train(steps):
    for _ in range(steps):
        rows = torch.randint(0, len(data), (512,), device=device)
        loss = nn.functional.mse_loss(model(data[rows]), target[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

print(sum(p.numel() for p in model.parameters()))
"""

#: These cells print the exact bits of the losses.
_TORCH_TRAIN = """
train(40)
print(*(loss.hex() for loss in losses[-40:]))
"""

_TORCH_END = """
assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), losses
print(len(losses), sum(p.detach().double().sum().item() for p in model.parameters()).hex())
"""

_PLAIN_SETUP = """
import hashlib
from tests.gpu import workloads

work = workloads.CudaCore()
work.put("state", 8 << 20, 3)
seen = []
print("ready")
"""

_PLAIN_STEPS = """
for step in range(10):
    work.work("state", 2 * len(seen) + 1)
    seen.append(hashlib.sha256(work.get("state")).hexdigest())
print(*seen[-10:])
"""

_PLAIN_END = """
assert len({*seen}) == len(seen)
print(len(seen))
"""

#: The cells of each workload. A test may suspend a notebook after half of the cells: the next cell
#: uses the state of the cells before it.
NOTEBOOKS = {
    "cuda-core": [_PLAIN_SETUP, _PLAIN_STEPS, _PLAIN_STEPS, _PLAIN_END],
    "torch": [
        *(_TORCH_SETUP, _TORCH_MODEL, _TORCH_TRAIN),
        *(_TORCH_TRAIN, _TORCH_TRAIN, _TORCH_END),
    ],
}
