# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The operators of PyTorch on emulated devices.

PyTorch's CUDA build has registered a kernel for each operator that runs on the device. This module
replaces these kernels. The new kernel is a launch that runs PyTorch's CPU operator on the bytes of
the device. Autograd and autocast do not change, because they are layers above the operators.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from . import sparse
from .arguments import Call, device_of, drawn, host, tensors_in
from .board_times import BoardTimes
from .compositions import COMPOSITIONS
from .launches import SHORTEST, Launcher, NotEmulatedError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Operators that keep PyTorch's own code, because this code launches no kernel.
NATIVE = frozenset({
    "empty", "empty_strided", "empty_like", "new_empty", "_efficientzerotensor", "resize_",
    "resize_as_", "_resize_output_", "set_", "set_data", "record_stream", "is_pinned",
    "_pin_memory", "pin_memory", "_local_scalar_dense", "item", "is_set_to",
    "_has_compatible_shallow_copy_type", "_to_copy",
})  # fmt: skip
#: Operators that choose one of NVIDIA's libraries before PyTorch looks up a kernel. So they also
#: need a new kernel.
CHOOSING = ("convolution", "convolution_backward", "linalg_solve")
#: PyTorch's number for the method that computes attention from other operators, without a library.
_PLAIN_ATTENTION = 0

#: Operators that accept host tensors or tensors of several devices even on a real GPU. So they skip
#: the check that all tensors are on one device.
ANYWHERE = frozenset({
    "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put",
    "_ctc_loss", "_ctc_loss_backward",
})  # fmt: skip
#: The operators that choose a library for CTC.
_CTC_CHOICES = tuple(
    f"_use_{library}_ctc_loss{overload}"
    for library in ("cudnn", "miopen")
    for overload in ("", ".Tensor")
)
#: The kernels stay registered as long as this reference exists.
_library: torch.library.Library | None = None


class NoKernelError(NotImplementedError):
    """PyTorch cannot compute this operator on the host."""


class _Kernel:
    """The new kernel of one operator."""

    def __init__(
        self,
        launcher: Launcher,
        durations: BoardTimes,
        name: str,
        op: Any,
        on_host: Callable[..., Any],
    ) -> None:
        self.launcher = launcher
        self.durations = durations
        self.op = op
        self.name = name
        self.on_host = on_host
        arguments = op._schema.arguments
        names = [argument.name for argument in arguments]
        self.random = names.index("generator") if "generator" in names else None
        base = name.removeprefix("aten::").partition(".")[0]
        self.anywhere = base in ANYWHERE or base.startswith(("_foreach_", "_fused_", "_amp_"))
        self.writes = any(a.alias_info and a.alias_info.is_write for a in arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of((*args, *kwargs.values()))
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.device(device):
            call = Call(self.launcher, None if self.anywhere else device)
            there = call.there(args), {name: call.there(v) for name, v in kwargs.items()}
            run = self._capture if torch.cuda.is_current_stream_capturing() else self._now
            return run(call, there, device)

    def _compute(self, there: Any, draw: Callable[[torch.Generator], Any], device: Any) -> Any:
        args, kwargs = list(there[0]), dict(there[1])
        place = self.random
        if place is not None:
            given = args[place] if len(args) > place else kwargs.get("generator")
            given = given or torch.cuda.default_generators[device.index]
            if given.device.type == "cuda":
                given = draw(given)
            if len(args) > place:
                args[place] = given
            else:
                kwargs["generator"] = given
        try:
            return self.on_host(*args, **kwargs)
        except NotImplementedError as error:
            raise NoKernelError(
                f"{self.name} is not computed on an emulated device: PyTorch has no kernel of it "
                "for the CPU, where the emulation computes."
            ) from error

    def _now(self, call: Call, there: Any, device: torch.device) -> Any:
        sizes = [on_host.size() for on_host, _ in call.pairs] if self.writes else ()
        results: list[Any] = []

        def work() -> None:
            results.append(self._compute(there, drawn, device))

        self.launcher.launch(device.index, work)
        new: list[Any] = []
        for (on_host, on_device), size in zip(call.pairs, sizes, strict=False):
            if on_host.size() != size:  # the operator has resized this output
                on_device.resize_(on_host.size())
                new.append((on_host, on_device))
        answer = call.here(results[0], device, new)
        filled = [(value, host(self.launcher, made)) for value, made in new if made.numel()]
        ns = self._ns(call, there, results[0])
        if filled or ns > SHORTEST:

            def fill() -> None:
                for value, made in filled:
                    made.copy_(value)

            self.launcher.launch(device.index, fill, ns - SHORTEST)
        return answer

    def _ns(self, call: Call, there: Any, results: Any) -> int:
        return self.durations.of(self.op, there[0], (h for h, _ in call.pairs), results)

    def _capture(self, call: Call, there: Any, device: torch.device) -> Any:
        """Record the call in a graph; return its results, which have no content yet.

        The results need memory now, although the operator runs only at each launch of the graph. So
        run the operator once on copies of the arguments, to get the sizes of the results.
        """
        copies = call.copied()
        trial = _replaced(there[0], copies), {n: _replaced(v, copies) for n, v in there[1].items()}
        tried = self._compute(trial, lambda _: torch.Generator(), device)
        for on_host, _ in call.pairs:
            if copies[id(on_host)].size() != on_host.size():
                raise NoKernelError(f"{self.name} resizes an output: a graph cannot capture that.")
        same = {id(copy): on_host for on_host, _ in call.pairs for copy in (copies[id(on_host)],)}
        new: list[Any] = []
        answer = call.here(_replaced(tried, same), device, new)
        made = [host(self.launcher, tensor) for _, tensor in new]
        known = {id(on_host) for on_host, _ in call.pairs}

        def again() -> None:
            found = self._compute(there, drawn, device)
            results = [t for t in tensors_in(found) if id(t) not in known]
            for value, tensor in zip(results, made, strict=True):
                tensor.copy_(value)

        ns = self._ns(call, there, tried)
        self.launcher.launch(device.index, again, ns, keep=True)
        return answer


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, by) for item in value)
    return value


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.size() == other.size()
        and one.stride() == other.stride()
        and one.is_contiguous()
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


def _no(*_: Any, **__: Any) -> bool:
    """Return False, the answer to PyTorch's question whether to use one of NVIDIA's libraries."""
    return False


def _copier(launcher: Launcher) -> Callable[..., torch.Tensor]:
    """Return the new ``copy_``.

    A copy between two device tensors is a launch, unless the tensors are contiguous and alike.
    All other copies run PyTorch's own code.
    """
    native = torch.ops.aten.copy_.default
    keys = DispatchKeySet(DispatchKey.CPU)  # this kernel of copy_ is the same for all devices

    def copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not (self.is_cuda and src.is_cuda) or _alike(self, src):
            copied: torch.Tensor = native.redispatch(keys, self, src, non_blocking)
            return copied
        with torch.cuda.device(self.device):
            to, of = host(launcher, self), host(launcher, src)

            def work() -> None:
                to.copy_(of)

            keep = torch.cuda.is_current_stream_capturing()
            launcher.launch(self.device.index, work, keep=keep)
        return self

    return copy


def _names() -> list[str]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name for name in registered if name.startswith("aten::")}
    return sorted(names | {f"aten::{name}" for name in CHOOSING})


def install() -> None:
    """Replace PyTorch's CUDA kernels with kernels for the emulated device.

    A second call does nothing.
    """
    global _library  # noqa: PLW0603 - it keeps them registered
    if _library is not None:
        return
    try:
        launcher, durations = Launcher(), BoardTimes(os.environ["EMUCUDA_MACHINE"])
    except (NotEmulatedError, OSError) as error:
        print(f"emucuda: {error}", file=sys.stderr)
        return
    _library = torch.library.Library("aten", "IMPL")
    own: dict[str, Callable[..., Any]] = {
        "_fused_sdp_choice": lambda *_, **__: _PLAIN_ATTENTION,
        **dict.fromkeys(_CTC_CHOICES, _no),
        "copy_": _copier(launcher),
    }
    with warnings.catch_warnings():
        # Each registration replaces a kernel of PyTorch, and PyTorch warns about it.
        warnings.simplefilter("ignore")
        names = _names()
        for full in names:
            name, _, overload = full.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
            if op is None or name in NATIVE or full.removeprefix("aten::") in own or _is_view(op):
                continue
            on_host = COMPOSITIONS.get(full.removeprefix("aten::"), op)
            kernel = _Kernel(launcher, durations, full, op, on_host)
            _library.impl(full.removeprefix("aten::"), kernel.__call__, "CUDA")
        for name, function in own.items():
            if f"aten::{name}" in names or name == "copy_":
                _library.impl(name, function, "CUDA")
        for name, key, function in sparse.kernels():
            _library.impl(name, function, key)
    # These options use NVIDIA's libraries, which cannot run here.
    torch.backends.cudnn.enabled = False
    for choose in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{choose}_sdp")(False)


def _is_view(op: Any) -> bool:
    return any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
