# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Converts the arguments of an operator from the device to the host, and its results back."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .launches import Launcher


def host(launcher: Launcher, tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor that shares its bytes with the device tensor ``tensor``."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    address = launcher.bytes_at(storage.data_ptr(), size)
    if not address:
        raise RuntimeError(
            f"CUDA error: an illegal memory access was encountered: {size} bytes at "
            f"{storage.data_ptr():#x} are not memory of the device."
        )
    buffer = (ctypes.c_char * size).from_address(address)
    bytes_ = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(bytes_, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        made = made.conj()
    return torch._neg_view(made) if tensor.is_neg() else made


def device_of(value: Any) -> torch.device | None:
    """Return the CUDA device of an argument, or None if it has no CUDA device.

    The argument may be a tensor or a device. In a list, the first item with a CUDA device counts.
    """
    if isinstance(value, torch.Tensor):
        return value.device if value.is_cuda else None
    if isinstance(value, torch.device) and value.type == "cuda":
        index = torch.cuda.current_device() if value.index is None else value.index
        return torch.device("cuda", index)
    if isinstance(value, (list, tuple)):
        for item in value:
            found = device_of(item)
            if found is not None:
                return found
    return None


def refuse_elsewhere(tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse an argument that is not on ``device``, as PyTorch's kernels for a GPU do.

    The emulation could compute with such an argument. But then a program with this mistake would
    fail only on a real GPU. A host tensor without dimensions is allowed, because it is a number.
    """
    if tensor.device != device and (tensor.is_cuda or tensor.dim()):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{device} and {tensor.device}!"
        )


class Call:
    """Converts the arguments and results of one call between the host and the device.

    If ``device`` is set, all tensors of the arguments must be on that device.
    """

    def __init__(self, launcher: Launcher, device: torch.device | None = None) -> None:
        self.launcher = launcher
        self.device = device
        #: Pairs of a host tensor and the device tensor for which it stands.
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def there(self, value: Any) -> Any:
        """Return the argument with a host tensor in place of each device tensor."""
        if isinstance(value, torch.Tensor):
            if self.device is not None:
                refuse_elsewhere(value, self.device)
            if not value.is_cuda:
                return value
            if value.layout is not torch.strided:
                return value.cpu()
            for on_host, on_device in self.pairs:
                if on_device is value:
                    return on_host
            made = host(self.launcher, value)
            self.pairs.append((made, value))
            return made
        if isinstance(value, (list, tuple)):
            return type(value)(self.there(item) for item in value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def copied(self) -> dict[int, torch.Tensor]:
        """Return a copy of each host tensor. The key is the id of the original."""
        return {id(on_host): on_host.clone() for on_host, _ in self.pairs}

    def here(self, value: Any, device: torch.device, new: list[Any]) -> Any:
        """Return a result with device tensors in place of host tensors.

        A new device tensor has no content yet. For each, append the host tensor and the device
        tensor to ``new``; the caller copies the content.
        """
        if isinstance(value, torch.Tensor):
            for on_host, on_device in self.pairs:
                if on_host is value:
                    return on_device
            if value.layout is not torch.strided:
                return value.to(device)
            made = torch.empty_strided(
                value.size(), _dense(value), dtype=value.dtype, device=device
            )
            new.append((value, made))
            return made
        if isinstance(value, (list, tuple)):
            return type(value)(self.here(item, device, new) for item in value)
        return value


def _dense(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides for a copy of ``value``: its own, or contiguous ones if it is expanded."""
    strides = tuple(value.stride())
    expanded = any(step == 0 and size > 1 for size, step in zip(value.size(), strides, strict=True))
    return tuple(torch.empty(value.size(), device="meta").stride()) if expanded else strides


#: Each call adds this step to the offset of a CUDA generator. The seed and the offset determine the
#: random numbers of a call.
_STEP = 4


def drawn(generator: torch.Generator) -> torch.Generator:
    """Return a host generator for one call, and advance the device generator ``generator``."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + _STEP)
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) & ((1 << 63) - 1))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in an argument or a result, which may be a nested list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
