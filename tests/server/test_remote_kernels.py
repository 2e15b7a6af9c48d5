# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How a server shows kernels on other machines. The tests answer in place of their brokers."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from jupyter_gpupool.errors import Code, RefusedError
from jupyter_gpupool.protocol import MOST_LOOKED
from jupyter_gpupool.server import remote_kernels
from jupyter_gpupool.server.remote_kernels import RemoteKernels

#: The other machine's clock is this many seconds ahead of ours.
AHEAD = 50.0


class Kernel:
    """A kernel on another machine, which has one GPU.

    It answers in place of the broker of this machine, which has the sessions ``sessions``.
    """

    def __init__(self, node="gpu2"):
        self.node = node
        self.now, self.sessions, self.fails = 1000.0 + AHEAD, [], None
        self.asked, self.told = [], []
        self.hold = None
        self.named = lambda _: False

    def has(self, kernel, **more):
        self.sessions.append({
            "id": f"s-{kernel}", "kernel_id": kernel, "owner": "me", "state": "idle",
            "label": "", "granted_bytes": 8, "slices": [], "request": {},
            "devices": ["G"], "queue_position": None, "queue_length": 7, "expected": None,
            "opened_at": self.now - 10, "leaves_at": self.now + 20, "keep_until": None,
            "busy_seconds": 3.0, **more,
        })  # fmt: skip
        return self

    async def look(self, kernels):
        self.asked.append([*kernels])
        if self.hold is not None:
            await self.hold.wait()
        if self.fails is not None:
            raise self.fails
        gpus = [{"uuid": "G", "index": 0, "name": "a GPU", "emulated": False}]
        found = [s for s in self.sessions if self.named(s) or s["kernel_id"] in kernels]
        return {"now": self.now, "sessions": found, "gpus": gpus}

    async def tell(self, request, session, fields):
        self.told.append((request, session, fields))
        return {"note": "done"}


SILENT = RefusedError("gpu2 does not answer: it is silent.", code=Code.UNREACHABLE)


@pytest.fixture
def clock(monkeypatch):
    """Our monotonic clock, which tests set."""
    found = [100.0]
    monkeypatch.setattr(remote_kernels, "time", SimpleNamespace(monotonic=lambda: found[0]))
    return found


class Scene:
    def __init__(self, clock, **kernels):
        self.clock, self.kernels, self.changes = clock, kernels, 0
        self.remote = RemoteKernels(lambda: self.kernels, self._changed, logging.getLogger("test"))

    def _changed(self):
        self.changes += 1

    async def asked(self):
        self.remote.ask()
        waits = [m.question for m in self.remote._machines.values() if m.question]
        await asyncio.gather(*waits)

    async def ask(self):
        """Let a second pass, ask all machines, and return the sessions that they report."""
        self.clock[0] += 1.0
        await self.asked()
        return self.remote.sessions(899.0 + self.clock[0])


def test_a_session_names_its_machine_and_has_times_of_our_clock(clock):
    async def run():
        scene = Scene(clock, k=Kernel().has("k", expected={"since": 1051.0, "until": 1052.0}))
        (row,) = await scene.ask()
        assert (row["machine"], row["unreachable"], row["here"], row["mine"]) == (
            "gpu2", "", True, True,
        )  # fmt: skip
        assert (row["opened_at"], row["leaves_at"], row["keep_until"]) == (990.0, 1020.0, None)
        assert row["expected"] == {"since": 1001.0, "until": 1002.0}
        assert [gpu["name"] for gpu in row["gpus"]] == ["a GPU"]
        assert (row["queue_length"], row["busy_seconds"]) == (None, None)

    asyncio.run(run())


def test_times_do_not_change_with_the_duration_of_an_answer(clock):
    async def run():
        scene = Scene(clock, k=(kernel := Kernel().has("k")))
        (before,) = await scene.ask()
        kernel.now += 0.7  # this answer took 0.3 s less than the last one
        scene.remote.ask()
        (after,) = await scene.ask()
        assert after["leaves_at"] == before["leaves_at"]
        # An admin sets the other machine's clock. The times that this server shows do not change.
        kernel.now += 3600
        kernel.sessions[0]["leaves_at"] += 3600
        (later,) = await scene.ask()
        assert abs(later["leaves_at"] - before["leaves_at"]) < 2

    asyncio.run(run())


def test_kernels_of_a_silent_machine_stay_and_show_the_reason(clock):
    async def run():
        scene = Scene(clock, k=(kernel := Kernel().has("k")))
        await scene.ask()
        kernel.fails = SILENT
        (row,) = await scene.ask()
        assert (row["state"], row["unreachable"]) == ("idle", SILENT.message)
        assert scene.changes == 2
        kernel.fails = None
        (row,) = await scene.ask()
        assert (row["unreachable"], scene.changes) == ("", 3)
        await scene.ask()
        assert scene.changes == 3  # the answer is the same: no change

    asyncio.run(run())


def test_a_busy_machine_is_called_silent_only_after_some_time(clock):
    async def run():
        scene = Scene(clock, k=(kernel := Kernel().has("k")))
        await scene.ask()
        kernel.fails = RefusedError("gpu2 carries out too many orders.", code=Code.TOO_MANY)
        (row,) = await scene.ask()
        assert row["unreachable"] == ""
        clock[0] += remote_kernels.PATIENCE
        (row,) = await scene.ask()
        assert row["unreachable"] == kernel.fails.message

    asyncio.run(run())


def test_an_answer_of_another_version_does_not_end_the_watch(clock):
    async def run():
        scene = Scene(clock, k=(kernel := Kernel().has("k")))
        await scene.ask()
        for session in ({}, {**kernel.sessions[0], "opened_at": "x"}, 7):
            kernel.sessions[1:] = [session]
            kernel.named = lambda _: True
            (row,) = await scene.ask()
            assert row["unreachable"] == "gpu2 gave an answer that this server cannot read."
        del kernel.sessions[1:]
        (row,) = await scene.ask()
        assert row["unreachable"] == ""

    asyncio.run(run())


def test_server_asks_again_after_an_answer_and_one_second(clock):
    async def run():
        scene = Scene(clock, k=(kernel := Kernel().has("k")))
        kernel.hold = asyncio.Event()
        first = asyncio.create_task(scene.asked())
        while not kernel.asked:
            await asyncio.sleep(0)  # wait until the first question has begun
        clock[0] += 60
        scene.remote.ask()
        kernel.hold.set()
        await first
        await scene.ask()
        assert len(kernel.asked) == 2
        clock[0] += 0.9
        await scene.asked()
        assert len(kernel.asked) == 2

    asyncio.run(run())


def test_a_lost_question_ends_after_a_time_out(clock, monkeypatch):
    monkeypatch.setattr(remote_kernels, "PATIENCE", 0.01)

    async def run():
        scene = Scene(clock, k=(kernel := Kernel().has("k")))
        await scene.ask()
        kernel.hold = asyncio.Event()
        (row,) = await scene.ask()
        assert row["unreachable"] == "gpu2 has not answered for 0.01 s."
        kernel.hold.set()
        (row,) = await scene.ask()
        assert row["unreachable"] == ""

    asyncio.run(run())


def test_server_asks_for_many_kernels_in_several_requests(clock):
    async def run():
        kernel = Kernel()
        names = [f"k{number}" for number in range(MOST_LOOKED + 1)]
        for name in names:
            kernel.has(name)
        scene = Scene(clock, **dict.fromkeys(names, kernel))
        assert len(await scene.ask()) == len(names)
        assert [len(part) for part in kernel.asked] == [MOST_LOOKED, 1]

    asyncio.run(run())


def test_an_ended_kernel_and_its_machine_are_forgotten(clock):
    async def run():
        scene = Scene(clock, k=Kernel().has("k"), other=Kernel("gpu3").has("other"))
        assert len(await scene.ask()) == 2
        assert scene.remote.where() == {"k": "gpu2", "other": "gpu3"}
        del scene.kernels["other"]
        assert [row["kernel_id"] for row in scene.remote.sessions(1000.0)] == ["k"]
        await scene.ask()
        assert not scene.remote.has("s-other")
        with pytest.raises(RefusedError, match="has ended"):
            await scene.remote.tell("release", "s-other", {})

    asyncio.run(run())


def test_a_request_goes_to_the_machine_of_its_session(clock):
    async def run():
        scene = Scene(clock, k=Kernel().has("k"), other=(far := Kernel("gpu3").has("other")))
        await scene.ask()
        assert await scene.remote.tell("keep", "s-other", {"seconds": 60}) == {"note": "done"}
        assert far.told == [("keep", "s-other", {"seconds": 60})]
        assert scene.kernels["k"].told == []
        # The request may have changed the session. So the server at once asks its machine again.
        await scene.asked()
        assert (len(far.asked), len(scene.kernels["k"].asked)) == (2, 1)

    asyncio.run(run())
