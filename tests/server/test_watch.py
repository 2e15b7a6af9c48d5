# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which messages the watch sends to each client.

The watch has a link to a broker. The tests decide what the link answers.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from jupyter_gpupool.server.watch import Watch

GIB = 1 << 30


class Link:
    """The link to a broker with one idle session. The session loses its slice at the time 160."""

    def __init__(self):
        self.now, self.available, self.more = 100.0, 50 * GIB, {}

    async def watch(self):
        pass

    async def call(self, kind, **_):
        assert kind == "status"
        session = {
            "id": "s",
            "owner": "me",
            "label": "",
            "kernel_id": "k",
            "state": "idle",
            "granted_bytes": 8,
            "footprint_bytes": 8,
            "devices": ["G"],
            "idle_since": 100.0,
            "leaves_at": 160.0,
            **self.more,
        }
        return {
            "now": self.now,
            "devices": [],
            "sessions": [session],
            "queue_length": 0,
            "host": {"available_bytes": self.available},
            "settings": {"idle_timeout": 60.0},
        }

    async def close(self):
        pass


class Page:
    """A subscriber that keeps its messages."""

    def __init__(self):
        self.got = []

    def publish(self, message):
        self.got.append(message)

    def kinds(self):
        return [message["type"] for message in self.got]

    async def until(self, count):
        async def there():
            while len(self.got) < count:
                await asyncio.sleep(0.005)

        await asyncio.wait_for(there(), 60)


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def run(link):
    """Return a function that runs a scenario with a watch.

    The function returns the data of the "idle" events that the watch has sent to the server's bus.
    """

    def go(scenario, slow_resume=0.0):
        emitted = []

        async def main():
            watch = Watch(
                link, lambda: ["k"], "me", lambda kind, data: emitted.append((kind, data)),
                lambda _view: None, interval=3600.0, idle_warning=20.0, slow_resume=slow_resume,
                log=logging.getLogger("test"),
            )  # fmt: skip
            try:
                await scenario(watch)
            finally:
                await watch.close()

        asyncio.run(main())
        return [data for kind, data in emitted if kind == "idle"]

    return go


def test_late_subscriber_gets_a_warning_that_is_still_true(link, run):
    first, late = Page(), Page()

    async def scenario(watch):
        watch.subscribe(first)
        await first.until(1)
        link.now = 145.0
        await watch.look()
        assert first.got[-1]["data"]["seconds_left"] == 15.0
        link.now = 152.0
        watch.subscribe(late)
        await late.until(2)

    (told,) = run(scenario)
    assert told["seconds_left"] == 15.0, "one event on the bus"
    assert late.kinds() == ["snapshot", "idle"]
    assert late.got[1]["data"] == {**told, "seconds_left": 8.0}
    assert first.kinds().count("idle") == 1


@pytest.mark.parametrize("more", [{"leaves_at": 900.0}, {"leaves_at": None}])
def test_late_subscriber_gets_no_outdated_warning(link, run, more):
    late = Page()

    async def scenario(watch):
        link.now = 145.0
        watch.subscribe(first := Page())
        await first.until(1)
        link.more = more
        watch.subscribe(late)
        await late.until(1)
        await watch.look()

    assert len(run(scenario)) == 1
    assert "idle" not in late.kinds()


def test_late_subscriber_gets_only_warnings_that_others_got(link, run):
    late = Page()
    link.more = {"footprint_bytes": 0}

    async def scenario(watch):
        link.now = 145.0
        watch.subscribe(first := Page())
        await first.until(1)
        watch.subscribe(late)
        await late.until(1)
        await watch.look()

    assert run(scenario) == []
    assert "idle" not in late.kinds()


def test_small_changes_of_free_memory_add_up_and_are_sent(link, run):
    page = Page()

    async def scenario(watch):
        watch.subscribe(page)
        await page.until(1)
        page.got.clear()
        for step in range(1, 11):
            link.now, link.available = 100.0 + step, (500 - step) * GIB // 10
            await watch.look()

    run(scenario)
    told = [m["delta"]["host"]["available_bytes"] for m in page.got if "host" in m["delta"]]
    assert told == [49 * GIB]
