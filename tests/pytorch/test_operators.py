# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Operators on an emulated device give the results of PyTorch's CPU operators.

The import of PyTorch takes most of the time of these tests, so each program checks many things.
"""

from __future__ import annotations

#: Runs each computation on the device and on the host, and compares every bit of the results.
ALIKE = r"""
import torch, torch.nn.functional as F
from torch import nn

def inputs():
    g = torch.Generator().manual_seed(1)
    def make(*size): return torch.randn(*size, generator=g)
    return make

def cases(device):
    make = inputs()
    def on(*size): return make(*size).to(device)
    a, b = on(24, 16), on(16, 24)
    image, weight = on(2, 3, 12, 12), on(4, 3, 3, 3)
    index = torch.tensor([3, 1, 3, 0]).to(device)
    yield "matmul", a @ b
    yield "half", (a.half() @ b.half()).float()
    yield "conv", F.conv2d(image, weight, padding=1)
    yield "pool", F.max_pool2d(image, 2, return_indices=True)
    yield "fft", torch.view_as_real(torch.fft.fft2(image))
    yield "solve", torch.linalg.solve(a[:16] + 9 * torch.eye(16).to(device), b[:, :3])
    yield "svd", torch.linalg.svdvals(a)
    yield "sort", torch.sort(a, dim=0)
    yield "topk", torch.topk(a, 3)
    yield "unique", torch.unique(index, return_counts=True)
    yield "nonzero", torch.nonzero(a > 1)
    yield "masked", a[a > 1]
    yield "index", a[index, index]
    yield "put", a.clone().index_put_((index,), a[0, :16], accumulate=True)
    yield "scatter", torch.zeros(4, device=device).scatter_add_(0, index, a[0, :4])
    yield "where", torch.where(a > 0, a, -a)
    yield "cat", torch.cat((a, b.T), 1)
    yield "transposed", a.T.contiguous()
    yield "strided", a[::2, ::3] + 1
    yield "cast", a.to(torch.int32), a.double().float()
    yield "sum", a.sum(), a.mean(0), a.std(), a.cumsum(1), a.argmax()
    yield "softmax", F.softmax(a, 1), F.log_softmax(a, 0)
    yield "norms", F.layer_norm(a, (16,)), F.group_norm(image, 3)
    yield "embedding", F.embedding(index, a)
    yield "attention", F.scaled_dot_product_attention(*on(3, 2, 2, 6, 8))
    yield "interpolate", F.interpolate(image, scale_factor=2, mode="bilinear")
    yield "complex", torch.view_as_real(torch.complex(a, a).conj() * 2)
    yield "out", torch.mul(a, 2, out=torch.empty(0, device=device))
    yield "expanded", a[:1].expand(4, 16) * 1, a[:1].expand(4, 16).sum()
    yield "lists", torch._foreach_mul([a, b], 3.0)
    yield "scalar", torch.tensor(a.flatten()[3].item() + float(a.max()))

def training(device):
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 16, 32), nn.GELU(), nn.Linear(32, 5),
    )
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield "loss", loss.detach()
    yield "weights", [p.detach() for p in model.parameters()]

def flat(value):
    return [t for v in value for t in flat(v)] if isinstance(value, (list, tuple)) else [value]

for make in (cases, training):
    for (name, *there), (_, *here) in zip(make("cuda"), make("cpu"), strict=True):
        for one, other in zip(flat(there), flat(here), strict=True):
            assert one.is_cuda or name == "scalar", name
            assert torch.equal(one.cpu(), other), (name, (one.cpu() - other).abs().max())
print("alike")
"""


def test_operators_and_training_compute_the_same_as_the_host(run):
    done = run(ALIKE)
    assert (done.stdout, done.stderr) == ("alike\n", "")


#: A program that uses features of PyTorch that exist only on GPUs, not on the CPU.
DEVICE = r"""
import os, torch
from torch import nn
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
assert torch.cuda.get_device_name(0).startswith("EMULATED")
assert not torch.backends.cudnn.enabled

# Recurrent networks use fused cells there: their sums are in another order.
for kind in (nn.LSTM, nn.GRU):
    torch.manual_seed(0)
    net, x = kind(5, 7, 2, batch_first=True), torch.randn(2, 3, 5)
    results = []
    for device in ("cpu", "cuda"):
        net.to(device).zero_grad()
        out = net(x.to(device))[0]
        out.square().sum().backward()
        results.append([out.detach().cpu(), *(p.grad.cpu().clone() for p in net.parameters())])
    for one, other in zip(*results):
        assert torch.allclose(one, other, atol=1e-6), kind

# Random numbers are a function of the seed, and their state can be kept.
torch.manual_seed(3)
first = torch.rand(4, device="cuda")
state = torch.cuda.get_rng_state()
second = torch.rand(4, device="cuda")
assert not torch.equal(first, second)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(4, device="cuda"), second)
torch.manual_seed(3)
assert torch.equal(torch.rand(4, device="cuda"), first)

# A captured graph runs at its replays, and not before.
x, count = torch.zeros(4, device="cuda"), torch.zeros((), device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = (x + 1) * 2
    count += 1
    noise = torch.rand(3, device="cuda")
assert count.item() == 0
x.fill_(3)
seen = []
for _ in range(3):
    graph.replay()
    seen.append(noise.tolist())
assert y.tolist() == [8.0] * 4 and count.item() == 3
assert seen[0] != seen[1] != seen[2]

# A capture may have several streams.
side, forked = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.graph(forked):
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        twice = x * 2
    main.wait_stream(side)
    both = twice + x
forked.replay()
assert both.tolist() == [9.0] * 4

# Mixed precision, a second device, pinned memory, events and streams.
scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
weight = torch.ones(8, 8, device="cuda", requires_grad=True)
with torch.autocast("cuda", dtype=torch.float16):
    made = weight @ weight
    assert made.dtype is torch.float16
    scaler.scale(made.float().sum()).backward()
optimizer = torch.optim.SGD([weight], 0.1)
scaler.step(optimizer)
scaler.update()
assert abs(weight[0, 0].item() - (1 - 0.1 * 16)) < 1e-6
other = weight.detach().to("cuda:1")
assert other.device.index == 1 and torch.equal(other.T.to("cuda:0"), weight.detach().T)
stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(stream):
    late = torch.arange(8).pin_memory().to("cuda", non_blocking=True) + 1
    event.record()
event.synchronize()
assert late.tolist() == list(range(1, 9))

# What cannot be computed is an error that names it, and never bytes that look like a result.
try:
    torch.batch_norm_stats(weight, 1e-5)
except NotImplementedError as error:
    assert "aten::batch_norm_stats is not computed on an emulated device" in str(error), error
else:
    raise AssertionError("no error")
try:
    torch.empty(1 << 40, device="cuda")
except torch.OutOfMemoryError as error:
    assert "CUDA out of memory" in str(error)
assert torch.cuda.memory_allocated() > 0
print("done")
"""


def test_devices_streams_graphs_and_errors_behave_like_cuda(run):
    done = run(DEVICE)
    # The test ignores a warning that PyTorch 2.14 and later print when an allocation fails.
    told = [line for line in done.stderr.splitlines() if not line.startswith("[W")]
    assert (done.stdout, told) == ("done\n", [])


def test_each_memory_backend_computes_and_loads_data_correctly(run):
    code = """
import torch
x = [torch.full((1 << 18,), float(i), device="cuda") for i in range(20)]
del x[::2]
x += [torch.full((1 << 19,), 1.0, device="cuda") for _ in range(10)]
assert sum(t.mean().item() for t in x) == sum(range(1, 20, 2)) + 10
data = torch.utils.data.TensorDataset(torch.arange(64.).reshape(16, 4))
loader = torch.utils.data.DataLoader(data, 4, num_workers=2, pin_memory=True)
assert sum(b.cuda(non_blocking=True).sum().item() for b, in loader) == 63 * 32
torch.cuda.empty_cache()
print("done")
"""
    for backend in ("", "expandable_segments:True", "backend:cudaMallocAsync"):
        assert run(code, PYTORCH_CUDA_ALLOC_CONF=backend).stdout == "done\n"


def test_profiler_lists_operators_although_cupti_is_missing(run):
    """NVIDIA's profiling library is not emulated, so the profile has no times of the device."""
    code = """
import torch
with torch.profiler.profile() as profile:
    torch.ones(3, device="cuda") + 1
names = {event.key for event in profile.key_averages()}
assert "aten::add" in names, names
print("done")
"""
    done = run(code)
    assert done.stdout == "done\n"
    assert "cuptiSubscribe is of a library that is not emulated" in done.stderr


def test_operators_without_a_host_kernel_use_other_operators(run):
    code = """
import torch
from torch import nn
from torch.nn import functional as F

def same(function):
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        found.append([t.detach().cpu() for t in function(device)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)

def normalised(device):
    norm = nn.RMSNorm([3, 16]).to(device)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(3, 16))
    x = torch.randn(4, 3, 16).to(device).requires_grad_()
    y = norm(x)
    (y * torch.arange(16., device=device)).sum().backward()
    return y, x.grad, norm.weight.grad

def aligned(device):
    x = torch.randn(5, 1, 4).log_softmax(2).to(device).requires_grad_()
    loss = F.ctc_loss(x, torch.tensor([[1, 2]]).to(device), torch.tensor([5]), torch.tensor([2]))
    loss.backward()
    return loss, x.grad

same(normalised)
same(aligned)
a, b = torch.randn(4, 4), torch.randn(4, 4)
c, d = a.cuda().bfloat16(), b.cuda().bfloat16()
if hasattr(torch.ops.aten.mm, "dtype"):  # from PyTorch 2.8
    wide = torch.mm(c, d, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.cpu(), a.bfloat16().float() @ b.bfloat16().float())
    torch.testing.assert_close(torch.addmm(c.float(), c, d, out_dtype=torch.float32), wide + c)
print("done")
"""
    assert run(code).stdout == "done\n"


SPARSE = """
import torch, warnings
from torch import nn
warnings.simplefilter("ignore")

def some(seed, rows=6, columns=5):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).relu()

def coo(d, seed=2):
    return some(seed).to_sparse().to(d)

def csr(d, seed=2):
    return some(seed).to_sparse_csr().to(d)

def dense(d, *size):
    return some(7, *size).to(d)

def grads(d):
    a, b = coo(d).requires_grad_(), dense(d, 5, 3).requires_grad_()
    torch.sparse.mm(a, b).sum().backward()
    return a.grad, b.grad

def trained(d):
    torch.manual_seed(3)
    one, two = nn.Embedding(5, 3, sparse=True), nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
    one, two = one.to(d), two.to(d)
    optimizers = torch.optim.SparseAdam(one.parameters()), torch.optim.SGD(two.parameters(), 0.1)
    for _ in range(3):
        ids = torch.tensor([[1, 2, 1]]).to(d)
        (one(ids).square().sum() + two(ids).square().sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return one.weight, two.weight

at = torch.tensor([[0, 0, 1], [1, 1, 2]])
CASES = {
    "made": lambda d: (torch.sparse_coo_tensor(at.to(d), torch.arange(3.).to(d)).coalesce(),),
    "to": lambda d: (dense(d, 4, 4).to_sparse(), dense(d, 4, 4).to_sparse_csr()),
    "from": lambda d: (coo(d).to_dense(), csr(d).to_dense(), coo(d).t(), csr(d).to_sparse_coo()),
    "mm": lambda d: (torch.sparse.mm(coo(d), dense(d, 5, 3)), csr(d) @ dense(d, 5, 3)),
    "vectors": lambda d: (torch.mv(coo(d), dense(d, 5, 1)[:, 0]), csr(d) @ dense(d, 5, 1)[:, 0]),
    "both": lambda d: (torch.sparse.mm(coo(d), coo(d, 3).t().coalesce()),),
    "addmm": lambda d: (torch.sparse.addmm(dense(d, 6, 3), coo(d), dense(d, 5, 3)),
                        dense(d, 6, 3).addmm_(coo(d), dense(d, 5, 3))),
    "bmm": lambda d: (torch.bmm(torch.stack([some(1), some(2)]).to_sparse().to(d),
                                torch.stack([some(3, 5, 2), some(4, 5, 2)]).to(d)),),
    "sums": lambda d: (coo(d) + coo(d, 3), dense(d, 6, 5) + coo(d), csr(d) + csr(d, 3),
                       coo(d).add_(coo(d, 3)), dense(d, 6, 5).add_(coo(d)), coo(d) - coo(d, 3)),
    "products": lambda d: (coo(d) * coo(d, 3), coo(d) * dense(d, 6, 5), csr(d) * 2, coo(d) / 2),
    "reduced": lambda d: (torch.sparse.sum(coo(d)), torch.sparse.sum(coo(d), 0), coo(d).norm()),
    "values": lambda d: (coo(d).sin(), coo(d).sqrt(), csr(d).abs(), coo(d).clone().zero_()),
    "softmax": lambda d: (torch.sparse.softmax(coo(d), 1), torch.sparse.log_softmax(coo(d), 1)),
    "chosen": lambda d: (dense(d, 6, 5).sparse_mask(coo(d)), torch.cat([coo(d), coo(d, 3)]),
                         coo(d).index_select(0, torch.tensor([1, 3]).to(d))),
    "sampled": lambda d: (torch.sparse.sampled_addmm(csr(d), dense(d, 6, 4), dense(d, 4, 5)),),
    "gradients": grads,
    "trained": trained,
}
for name, case in CASES.items():
    for one, other in zip(case("cpu"), case("cuda"), strict=True):
        assert other.is_cuda and other.layout == one.layout, name
        assert torch.equal(one.to_dense(), other.cpu().to_dense()), name
graph, a, b = torch.cuda.CUDAGraph(), coo("cuda"), dense("cuda", 5, 3)
try:
    with torch.cuda.graph(graph):
        torch.sparse.mm(a, b)
except NotImplementedError as error:
    assert "cannot be captured" in str(error)
else:
    raise AssertionError("no error")
print("done")
"""


def test_tensors_of_two_devices_are_refused_as_on_a_gpu(run):
    code = """
import torch
here, there, other = torch.ones(2, 2).cuda(), torch.ones(2, 2), torch.ones(2, 2).cuda(1)
for call in (
    lambda: here + there, lambda: here @ there, lambda: here + other,
    lambda: here.add_(other[0, 0]),
    lambda: torch.nn.Linear(2, 2).cuda()(there), lambda: torch.cat([here, there]),
    lambda: here.to_sparse() @ there,
    lambda: torch.nn.functional.cross_entropy(here, torch.tensor([0, 1])),
):
    try:
        call()
    except RuntimeError as error:
        assert "Expected all tensors to be on the same device" in str(error), error
    else:
        raise AssertionError("no error")
# What a GPU computes, too: numbers and indices of the host.
assert (here + torch.tensor(1.)).sum().item() == 8
assert here[torch.tensor([1])].sum().item() == 2
here[torch.tensor([0])] = torch.tensor(5.)
assert here.sum().item() == 12
print("done")
"""
    assert run(code).stdout == "done\n"


def test_sparse_layouts_compute_the_same_as_the_host(run):
    assert run(SPARSE).stdout == "done\n"


def test_operators_take_the_time_that_the_profile_gives(run):
    code = """
import torch
a = torch.ones(1024, 1024, device="cuda")
begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
begin.record()
a @ a
middle.record()
a += 1
end.record()
torch.cuda.synchronize()
assert begin.elapsed_time(middle) >= 2 * 1024**3 / 82.6e12 * 1e3
assert middle.elapsed_time(end) >= (4 << 20) / 1.008e12 * 1e3
print("done")
"""
    assert run(code, "1x1GiB,context=32MiB,profile=rtx4090").stdout == "done\n"


def test_a_program_without_devices_computes_on_the_host(run):
    code = "import torch; print(torch.cuda.is_available(), torch.ones(2).sum().item())"
    assert run(code, CUDA_VISIBLE_DEVICES="").stdout == "False 2.0\n"


def test_pytorch_finds_no_gpu_without_emulated_devices(run):
    text = """
import torch
assert not torch.cuda.is_available()
assert (torch.ones(2) + 1).tolist() == [2, 2]
try:
    torch.ones(1).cuda()
except RuntimeError as error:
    print(error)
"""
    found = run(text, EMUCUDA_MACHINE="", LD_LIBRARY_PATH="")
    assert "NVIDIA driver" in found.stdout
