# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The table of transitions, and the documentation page that a script makes from this table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from jupyter_gpupool.pool.transitions import TRANSITIONS
from jupyter_gpupool.states import State

DOCS = Path(__file__).parents[2] / "docs"


def test_page_is_up_to_date_with_the_script():
    done = subprocess.run(
        [sys.executable, str(DOCS / "make_states.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_page_shows_every_transition_in_diagram_and_table():
    page = (DOCS / "states.md").read_text()
    arrows = set(re.findall(r"^ +(\w+) --> (\w+)$", page, re.MULTILINE))
    assert arrows == {step for step in TRANSITIONS if step[1] != "ended"}
    rows = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE))
    assert rows == set(TRANSITIONS)


def test_sessions_can_reach_every_state_and_leave_all_but_ended():
    states = set(get_args(State))
    assert {old for old, _ in TRANSITIONS} == states - {"ended"}
    assert {new for _, new in TRANSITIONS} == states
    assert all((state, "ended") in TRANSITIONS for state in states - {"ended"})
