# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The states and the attach policies of a session. Standard library only (kernels use it)."""

from __future__ import annotations

from typing import Any, Literal, Mapping, get_args

#: A driver call cannot be cancelled, so ``attaching`` and ``detaching`` are states of their own.
#: The table of transitions is in ``pool/transitions.py``.
State = Literal["detached", "queued", "attaching", "active", "idle", "detaching", "ended"]

#: The states of a session that has not ended.
LIVING: tuple[State, ...] = tuple(state for state in get_args(State) if state != "ended")

#: In these states, the session has slices, and the pool counts these slices as granted.
HAS_LEASE: frozenset[State] = frozenset({"attaching", "active", "idle", "detaching"})

#: The session may use its slice now.
ATTACHED: frozenset[State] = frozenset({"active", "idle"})

#: In these states, the session has asked for a slice, but may not use one yet.
WAITING: frozenset[State] = frozenset({"queued", "attaching"})

#: A driver call may be under way for the session.
MOVING: frozenset[State] = frozenset({"attaching", "detaching"})

#: How a session gets its slice: at the first CUDA call (needs the guard), when a cell starts,
#: or only when the user asks with ``%gpu attach``.
AttachPolicy = Literal["lazy", "cell", "manual"]

POLICIES: tuple[AttachPolicy, ...] = get_args(AttachPolicy)

_WORDS: Mapping[str, str] = {
    "detached": "no GPU",
    "queued": "waits",
    "attaching": "gets a GPU",
    "active": "in use",
    "detaching": "gives it back",
}


def in_words(session: Mapping[str, Any]) -> str:
    """Return the state of a session as text; all lists for people use this text.

    ``session`` is an entry of the broker's ``status``.
    """
    state = str(session.get("state", ""))
    if state == "detached" and session.get("suspended_bytes"):
        return "in host memory"
    if state == "queued" and session.get("preempted"):
        return "preempted"
    return _WORDS.get(state, state)
