# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The link by itself: what a real kernel would show too late or not at all."""

from __future__ import annotations

import threading

from scripted_broker import ScriptedBroker

from jupyter_gpupool.kernel.link import Link


def link_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("gpupool-")]


def test_closing_ends_its_threads(broker: ScriptedBroker) -> None:
    link = Link(broker.path, "s1", "token")
    link.start()
    broker.wait_for("hello")
    link.close()
    assert link_threads() == []


def test_closing_while_there_is_no_broker_ends_its_threads(broker: ScriptedBroker) -> None:
    broker.die()
    link = Link(broker.path, "s1", "token")
    link.start()
    link.close()
    assert link_threads() == []
