# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The fused cells of LSTM and GRU, written with operators: PyTorch has none for the host."""

from __future__ import annotations

import torch
from torch import Tensor


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


#: By the name of the operator.
CELLS = {
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
}
