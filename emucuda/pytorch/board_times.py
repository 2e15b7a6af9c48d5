# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How long an operator takes on the board whose profile the emulated machine has.

The memory of the board needs some time to move the operator's bytes. The board also needs some time
for the operator's operations, at its peak rate. The longer of these two times counts. It is a lower
bound, because real kernels reach neither rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from emucuda.specification import PROFILES, parse_machine

from .arguments import tensors_in
from .launches import SHORTEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def _formulas() -> dict[Any, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry

    return dict(flop_registry)


class BoardTimes:
    """Times of operators on the board of this process's machine."""

    def __init__(self, machine: str) -> None:
        self._profile = PROFILES[parse_machine(machine).profile]
        self._formula = _formulas() if self._profile.flops else {}

    def of(self, op: Any, args: Any, tensors: Iterable[torch.Tensor], results: Any) -> int:
        """Return the nanoseconds that the kernel of a call takes."""
        if not self._profile.memory:
            return SHORTEST
        used = [*tensors, *tensors_in(results)]
        seconds = sum(t.numel() * t.element_size() for t in used) / self._profile.memory
        formula = self._formula.get(op.overloadpacket)
        if formula is not None and used:
            half = used[0].dtype in (torch.float16, torch.bfloat16)
            peak = self._profile.half_flops if half else self._profile.flops
            seconds = max(seconds, formula(*args, out_val=results) / peak)
        return max(SHORTEST, int(seconds * 1e9))
