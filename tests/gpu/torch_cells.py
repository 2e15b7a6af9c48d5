# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pairs of PyTorch cells: one cell runs before a suspend, and one checks the results after it.

Some pairs can also run without a GPU (``GPUPOOL_TEST_TORCH_DEVICE=cpu``).
"""

from __future__ import annotations

_DEVICE = "import torch\nfrom tests.gpu.workloads import TORCH_DEVICE as device\n"

#: cuBLAS, cuDNN, cuFFT and cuSOLVER keep handles, plans and workspaces on the device.
LIBRARIES = (
    _DEVICE
    + """
import torch.nn.functional as F
torch.manual_seed(1)
torch.backends.cudnn.benchmark = False
torch.backends.cudnn.deterministic = True
matrix = torch.randn(1024, 1024, device=device)
image = torch.randn(8, 16, 64, 64, device=device)
kernel = torch.randn(32, 16, 3, 3, device=device)

def results():
    return {
        "matmul": matrix @ matrix,
        "half": (matrix.half() @ matrix.half()).float(),
        "conv": F.conv2d(image, kernel, padding=1),
        "fft": torch.view_as_real(torch.fft.fft2(image)),
        "solve": torch.linalg.solve(matrix[:256, :256], matrix[:256, :8]),
    }

found = {name: value.cpu() for name, value in results().items()}
again = {name: value.cpu() for name, value in results().items()}
# Only what is the same twice in a row can be asked to be the same later.
exact = [name for name in found if torch.equal(found[name], again[name])]
print("the same twice:", *exact)
""",
    """
for name, value in results().items():
    value = value.cpu()
    assert torch.allclose(value, found[name], rtol=1e-3, atol=1e-2), name
    if name in exact:
        assert torch.equal(value, found[name]), name
assert {"matmul", "conv"} <= set(exact), exact
""",
)

#: The random generator's state is in the process, but the device computes the random numbers.
RANDOM = (
    _DEVICE
    + """
def draw(generator):
    return torch.rand(1 << 20, device=device, generator=generator).cpu()

generator = torch.Generator(device=device)
generator.manual_seed(5)
first, second = draw(generator), draw(generator)
generator.manual_seed(5)
assert torch.equal(draw(generator), first)
""",
    """
assert torch.equal(draw(generator), second)
generator.manual_seed(5)
assert torch.equal(draw(generator), first)
""",
)

#: The driver registers pinned host memory, and must register it again on a resume.
PINNED = (
    _DEVICE
    + """
number = 16 << 20
pinned = torch.arange(number, dtype=torch.int32).pin_memory()
back = torch.empty(number, dtype=torch.int32).pin_memory()
there = torch.empty(number, dtype=torch.int32, device=device)
stream = torch.cuda.Stream()

def round_trip():
    with torch.cuda.stream(stream):
        there.copy_(pinned, non_blocking=True)
        there.add_(1)
        back.copy_(there, non_blocking=True)
    stream.synchronize()
    return bool((back == pinned + 1).all())

assert round_trip()
""",
    """
assert pinned.is_pinned()
assert torch.equal(there.cpu(), pinned + 1)
for turn in range(3):
    pinned.mul_(3)
    back.zero_()
    assert round_trip(), turn
late = torch.arange(number, dtype=torch.int32).pin_memory()
there.copy_(late, non_blocking=True)
torch.cuda.synchronize()
assert torch.equal(there.cpu(), late)
""",
)

#: The stream is made before the suspend. After the suspend, it records old and new events, and
#: another stream waits for an old event.
EVENTS = (
    _DEVICE
    + """
stream = torch.cuda.Stream()
matrix = torch.randn(2048, 2048, device=device)
done = torch.cuda.Event()

def pair():
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]

def timed(begin, end):
    with torch.cuda.stream(stream):
        begin.record()
        for _ in range(20):
            matrix @ matrix
        end.record()
        done.record()
    end.synchronize()
    return begin.elapsed_time(end)

torch.cuda.synchronize()
used, kept = pair(), pair()
before = min(timed(*used) for _ in range(3))
took = timed(*kept)
print(before)
""",
    """
assert done.query() and used[1].query()
after = min(timed(*used) for _ in range(3))
new = timed(*pair())
print(after, new)
assert 0 < after < 20 * before + 50, (before, after)
torch.cuda.current_stream().wait_event(done)
torch.cuda.synchronize()
# What was measured before and not recorded anew is what it was.
assert kept[0].elapsed_time(kept[1]) == took
""",
)

#: A data loader forks worker processes, and its thread copies their batches to pinned memory. The
#: suspend comes when a part of the data is loaded.
LOADER = (
    _DEVICE
    + """
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, place):
        return torch.full((1 << 16,), place, dtype=torch.int64)

kept = torch.zeros(1 << 16, dtype=torch.int64, device=device)
loader = DataLoader(
    Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork",
    pin_memory=torch.cuda.is_available(), persistent_workers=True, prefetch_factor=2,
)
batches = iter(loader)

def load(number):
    for _ in range(number):
        kept.add_(next(batches).to(device, non_blocking=True).sum(0))

load(6)
assert int(kept[0]) == sum(range(24))
""",
    """
load(10)
assert int(kept[-1]) == sum(range(64)) and bool((kept == kept[0]).all())
batches = iter(loader)
load(16)
assert int(kept[-1]) == 2 * sum(range(64)) and bool((kept == kept[0]).all())
del batches, loader
""",
)

#: A CUDA graph of PyTorch has its own memory pool. The cells replay a captured graph.
GRAPH = (
    _DEVICE
    + """
torch.manual_seed(2)
layer = torch.nn.Linear(512, 512).to(device)
held = torch.randn(64, 512, device=device)

def step():
    return torch.relu(layer(held)).sum(1)

with torch.no_grad():
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
graph.replay()
first = result.cpu()
""",
    """
# Replayed at once: the very first use of the device is the graph's launch.
graph.replay()
assert torch.equal(result.cpu(), first)
held.mul_(0.5)
graph.replay()
with torch.no_grad():
    assert torch.allclose(result, step(), rtol=1e-4, atol=1e-4)
""",
)

#: Autograd has a thread for each device. This thread makes the backward pass's CUDA calls.
AUTOGRAD = (
    _DEVICE
    + """
torch.manual_seed(3)
weight = torch.randn(512, 512, device=device, requires_grad=True)
value = torch.randn(64, 512, device=device)

def gradient():
    weight.grad = None
    torch.tanh(value @ weight).pow(2).sum().backward()
    return weight.grad.clone()

first = gradient()
pending = torch.tanh(value @ weight).pow(2).sum()
""",
    """
# The graph of this one was made before the suspend.
weight.grad = None
pending.backward()
assert torch.allclose(weight.grad, first, rtol=1e-4, atol=1e-4)
assert torch.allclose(gradient(), first, rtol=1e-4, atol=1e-4)
""",
)

#: For each test's name: (before, after).
CELLS = {
    "libraries": LIBRARIES,
    "random numbers": RANDOM,
    "pinned memory": PINNED,
    "events": EVENTS,
    "loader": LOADER,
    "graph": GRAPH,
    "autograd": AUTOGRAD,
}
