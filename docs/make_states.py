# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Write ``states.md`` from the table of transitions: ``python docs/make_states.py``.

With ``--check``, the program writes nothing and only checks whether the page is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from jupyter_gpupool.pool.transitions import TRANSITIONS
from jupyter_gpupool.states import ATTACHED, HAS_LEASE, State

PAGE = Path(__file__).parent / "states.md"

#: What a state means, for people.
MEANING: dict[State, str] = {
    "detached": "no slice; its device state, if any, is in host memory",
    "queued": "waits for a slice; holds nothing",
    "attaching": "the slice is reserved and the driver restores the state, if there is any",
    "active": "has its slice and uses it: a cell runs, or something else holds it",
    "idle": "has its slice and does not use it; the idle timer runs",
    "detaching": "the driver moves the state to host memory; the slice is not free yet",
    "ended": "the process is gone, or its state was lost and the process is being ended",
}


def page() -> str:
    """Return the text of the page."""
    lines = [
        "<!-- Written by docs/make_states.py from pool/transitions.py; do not edit. -->",
        "",
        "# The states of a session",
        "",
        "A session is one kernel. It is in exactly one of these states. `attaching` and",
        "`detaching` are states of their own because",
        "a driver call cannot be cancelled: the pool remembers later events and acts on them after",
        "the call. A session has at most one such call at a time.",
        "",
        "```{mermaid}",
        "stateDiagram-v2",
        "    [*] --> detached",
    ]
    lines += [f"    {old} --> {new}" for old, new in TRANSITIONS if new != "ended"]
    lines += [
        "    ended --> [*]",
        "    note right of ended : from every state",
        "```",
        "",
        "| state | has a slice | may use it | meaning |",
        "|---|---|---|---|",
    ]
    for state in get_args(State):
        has, may = ("yes" if state in group else "no" for group in (HAS_LEASE, ATTACHED))
        lines.append(f"| `{state}` | {has} | {may} | {MEANING[state]} |")
    lines += [
        "",
        "All steps, and when the pool takes them:",
        "",
        "| from | to | when |",
        "|---|---|---|",
    ]
    lines += [f"| `{old}` | `{new}` | {step.when} |" for (old, new), step in TRANSITIONS.items()]
    lines += [
        "",
        "A slice counts as granted in every state that has one: from before the driver begins to",
        "attach until after it has freed the memory. A session whose state was lost is `ended`,",
        "but its memory counts until its process has ended.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or with ``--check`` compare it with the file; return the exit status."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print(f"{PAGE} is out of date: run `python docs/make_states.py`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
