# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Operators on tensors with a sparse layout.

PyTorch computes most operators on a sparse tensor with operators on two dense tensors: the sparse
tensor's indices and its values. For the operators in :data:`COMPUTED`, PyTorch has special CUDA
kernels or calls cuSPARSE. This module computes the operators in :data:`COMPUTED` with PyTorch on
copies in host memory. The driver makes the copies, so the guard sees them and they take time. A
CUDA graph cannot capture these operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .arguments import device_of, refuse_elsewhere, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEYS = ("SparseCUDA", "SparseCsrCUDA")

#: Names of operators. A name stands for all its overloads.
COMPUTED = frozenset({
    "_coalesce", "_to_dense", "_to_sparse", "_to_sparse_bsc", "_to_sparse_bsr", "_to_sparse_csc",
    "_to_sparse_csr", "_sparse_broadcast_to", "_sparse_csr_prod", "_sparse_csr_sum",
    "_sparse_log_softmax", "_sparse_log_softmax_backward_data", "_sparse_mask_projection",
    "_sparse_softmax", "_sparse_softmax_backward_data", "_sparse_sparse_matmul",
    "_sparse_sum_backward", "add", "add_", "addmm", "addmm_", "addmv", "baddbmm", "bmm", "div",
    "div_", "hspmm", "index_select", "mm", "mul", "mul_", "mv", "sparse_mask",
    "sparse_sampled_addmm", "sspaddmm", "sub", "sub_", "sum", "triangular_solve",
})  # fmt: skip


class _OnHost:
    """The kernel of one operator."""

    def __init__(self, name: str, op: Any) -> None:
        self.name = name
        self.op = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of((*args, *kwargs.values()))
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                f"{self.name} on a tensor of a sparse layout cannot be captured on an emulated "
                "device."
            )
        pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in tensors_in((*args, *kwargs.values())):
            refuse_elsewhere(tensor, device)
        there = _moved((args, kwargs), pairs)
        results = self.op(*there[0], **there[1])
        written = {id(copy): mine for mine, copy in pairs.values()}
        for result in tensors_in(results):
            mine = written.get(id(result))
            if mine is not None:  # the operator has written to this argument
                _write(mine, result)
        return _back(results, written, device)


def _moved(value: Any, pairs: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return ``value`` with a host copy in place of each device tensor.

    ``pairs`` receives each device tensor and its copy.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_cuda:
            return value
        if id(value) not in pairs:
            pairs[id(value)] = value, value.cpu()
        return pairs[id(value)][1]
    if isinstance(value, dict):
        return {name: _moved(item, pairs) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, pairs) for item in value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _write(mine: torch.Tensor, result: torch.Tensor) -> None:
    if result.layout is torch.strided and mine.size() != result.size():
        mine.resize_(result.size())
    mine.copy_(result.to(mine.device))


def _back(value: Any, written: dict[int, torch.Tensor], device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        mine = written.get(id(value))
        return value.to(device) if mine is None else mine
    if isinstance(value, (list, tuple)):
        return type(value)(_back(item, written, device) for item in value)
    return value


def kernels() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield the name, dispatch key and kernel of each operator that this module computes."""
    for key in KEYS:
        for full in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            name, _, overload = full.removeprefix("aten::").partition(".")
            packet = getattr(torch.ops.aten, name, None) if full.startswith("aten::") else None
            op = getattr(packet, overload or "default", None)
            if name in COMPUTED and op is not None:
                yield full.removeprefix("aten::"), key, _OnHost(full, op).__call__
