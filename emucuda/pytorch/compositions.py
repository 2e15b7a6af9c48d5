# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Host versions of operators that PyTorch has only for the device.

Each function computes its operator with other operators, which PyTorch has for the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def _added(gates: Tensor, *more: Tensor | None) -> Tensor:
    for other in more:
        if other is not None:
            gates = gates + other
    return gates


def _lstm(
    inputs: Tensor,
    hidden: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = _added(inputs, input_bias, _added(hidden, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def _lstm_backward(  # noqa: PLR0917 - the operator's
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    reached = cy.tanh()
    of_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    of_cy = _added(of_hy * o * (1 - reached * reached), grad_cy)
    gates = torch.cat(
        (
            of_cy * g * (1 - i) * i,
            of_cy * cx * (1 - f) * f,
            of_cy * i * (1 - g * g),
            of_hy * reached * (1 - o) * o,
        ),
        1,
    )
    return gates, of_cy * f, gates.sum(0) if has_bias else None


def _gru(
    inputs: Tensor,
    hidden: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ir, ii, in_ = _added(inputs, input_bias).chunk(3, 1)
    hr, hi, hn = _added(hidden, hidden_bias).chunk(3, 1)
    r, i = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + i * (hx - n), torch.cat((r, i, n, hx, hn), 1)


def _gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r, i, n, hx, hn = workspace.chunk(5, 1)
    of_i = grad_hy * (hx - n) * (1 - i) * i
    of_n = grad_hy * (1 - i) * (1 - n * n)
    of_r = of_n * hn * (1 - r) * r
    inputs = torch.cat((of_r, of_i, of_n), 1)
    hidden = torch.cat((of_r, of_i, of_n * r), 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad_hy * i, *biases


def _rms_norm_backward(  # noqa: PLR0917 - the operator's
    grad: Tensor,
    inputs: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    within = list(range(inputs.dim() - len(normalized_shape), inputs.dim()))
    # ``rstd`` has a higher precision than inputs of half precision. So compute everything with the
    # precision of ``rstd``, and round only the results.
    grads, normal = grad.to(rstd.dtype), inputs.to(rstd.dtype) * rstd
    of_inputs = of_weight = None
    if wanted[0]:
        scaled = grads if weight is None else grads * weight.to(rstd.dtype)
        mean = (scaled * normal).mean(within, keepdim=True)
        of_inputs = (rstd * (scaled - normal * mean)).to(inputs.dtype)
    if wanted[1] and weight is not None:
        of_weight = (grads * normal).sum(list(range(within[0]))).to(weight.dtype)
    return of_inputs, of_weight


def _mm(one: Tensor, other: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.matmul(one.to(out_dtype), other.to(out_dtype))


def _addmm(
    added: Tensor,
    one: Tensor,
    other: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    return beta * added.to(out_dtype) + alpha * _mm(one, other, out_dtype)


#: For each operator, the function that computes it on the host. The key is the operator's name. For
#: an overload other than the default one, the name of the overload follows, as in "mm.dtype".
COMPOSITIONS = {
    "_fused_rms_norm_backward": _rms_norm_backward,
    "mm.dtype": _mm,
    "bmm.dtype": _mm,
    "addmm.dtype": _addmm,
    "baddbmm.dtype": _addmm,
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
}
