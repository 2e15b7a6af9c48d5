# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Triton's kernels, and kernels of PyTorch's compiler, compute the same as PyTorch on the host."""

from __future__ import annotations

#: The test runs this code from a file, because Triton reads the source of a kernel from its file.
KERNELS = """
import torch, triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

@triton.jit
def softmax(x, out, n, B: tl.constexpr):
    at = tl.arange(0, B)
    row = tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=-float("inf"))
    e = tl.exp(row - tl.max(row, axis=0))
    tl.store(out + tl.program_id(0) * n + at, e / tl.sum(e, axis=0), mask=at < n)

@triton.jit
def matmul(a, b, out, N, K, M: tl.constexpr, B: tl.constexpr):
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * M + tl.arange(0, M)
    total = tl.zeros((M, M), dtype=tl.float32)
    for k in range(0, K, B):
        inner = k + tl.arange(0, B)
        left = tl.load(a + rows[:, None] * K + inner[None, :])
        total = tl.dot(left, tl.load(b + inner[:, None] * N + columns[None, :]), total)
    tl.store(out + rows[:, None] * N + columns[None, :], total)

@triton.jit
def counted(x, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(out + tl.load(x + at, mask=at < n, other=0), 1, mask=at < n)

torch.manual_seed(3)
x, y = torch.randn(3000), torch.randn(3000)
out = torch.empty(3000, device="cuda")
add[(3,)](x.cuda(), y.cuda(), out, 3000, B=1024)
assert torch.equal(out.cpu(), x + y)

x = torch.randn(20, 300)
out = torch.empty(20, 300, device="cuda")
softmax[(20,)](x.cuda(), out, 300, B=512)
torch.testing.assert_close(out.cpu(), x.softmax(1))

for dtype in (torch.float16, torch.bfloat16):
    a, b = torch.randint(-4, 5, (64, 96)).to(dtype), torch.randint(-4, 5, (96, 64)).to(dtype)
    out = torch.empty(64, 64, device="cuda")
    matmul[(2, 2)](a.cuda(), b.cuda(), out, 64, 96, M=32, B=32)
    assert torch.equal(out.cpu(), a.float() @ b.float())  # whole numbers: no sum is rounded

x = torch.randint(0, 10, (2000,), dtype=torch.int32)
out = torch.zeros(10, dtype=torch.int32, device="cuda")
counted[(2,)](x.cuda(), out, 2000, B=1024)
assert torch.equal(out.cpu().long(), x.bincount(minlength=10))
"""

COMPILED = """
import torch
import torch.nn.functional as F

def pointwise(x, y):
    return torch.where(x > 0, torch.sin(x) * y.to(torch.float32), F.gelu(y - x)), (x + 1).half()

def reduced(x, y):
    return F.layer_norm(x, (x.shape[1],)), x.softmax(0).sum(1), (x - y).square().mean(), x.argmax(1)

def indexed(x, y):
    return x[:, (y[0] > 0).long()].cumsum(1), torch.cat((x, y)).flip(0)

torch.manual_seed(4)
x, y = torch.randn(40, 70), torch.randn(40, 70)
for function in (pointwise, reduced, indexed):
    found = torch.compile(function)(x.cuda(), y.cuda())
    torch.testing.assert_close(tuple(t.cpu() for t in found), function(x, y))
"""


def test_triton_computes_the_same_as_the_host(run, tmp_path):
    source = tmp_path / "kernels.py"
    source.write_text(KERNELS)
    run(f"import runpy; runpy.run_path({str(source)!r})", TRITON_CACHE_DIR=str(tmp_path / "cache"))


def test_compiled_functions_compute_the_same_as_the_host(run, tmp_path):
    run(COMPILED, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
