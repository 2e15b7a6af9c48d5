# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker that preempts a busy session when a test asks, even if the pool's rules forbid it.

To ask, the test writes the session's id into the file ``preempt`` beside the socket. So tests can
check what happens after a preemption, and do not depend on the rules for preemptions.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from jupyter_gpupool.broker import app
from jupyter_gpupool.broker.runner import Runner
from jupyter_gpupool.pool import events as e
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.transitions import move

REASON = "a kernel of a higher priority class needs the GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt(e.Event):
    """The pool decides to preempt a session."""

    session: str


handle = Pool.handle
begin = Runner.__init__


def decide(self, event):
    if not isinstance(event, Preempt):
        return handle(self, event)
    facts = self._facts
    facts.now = max(facts.now, event.now)
    session = facts.sessions.get(event.session)
    if session is None or session.state != "active":
        return []
    return move(facts, session, "detaching", REASON, REASON, 3)


async def listen(core, file):
    while True:
        await asyncio.sleep(0.01)
        if file.exists():
            name = file.read_text()
            try:
                core.handle(Preempt(now=core.now(), session=name))
            except Exception:
                core.log.exception("The test's decision failed")
            file.unlink()


def started(self, core, **parts):
    begin(self, core, **parts)
    file = Path(sys.argv[sys.argv.index("--socket") + 1]).with_name("preempt")
    self.listening = asyncio.get_running_loop().create_task(listen(core, file))


if __name__ == "__main__":
    Pool.handle = decide
    Runner.__init__ = started
    sys.exit(app.main())
