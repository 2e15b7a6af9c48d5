# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Turns of computing: each session gets its share of the time, and no turn is wasted.

No session starves. The same inputs always give the same turns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from jupyter_gpupool.pool.timeslice import Contender, Tallies, Turn, contended_devices, next_turn

TURN = 0.1


@dataclass
class Program:
    """A session that computes all the time, or in bursts with pauses."""

    share: int
    devices: tuple[str, ...] = ("G0",)
    #: The session works for ``work`` turns and then pauses for ``pause`` turns. If ``pause`` is 0,
    #: the session is always busy.
    work: int = 1
    pause: int = 0
    #: Seconds for which its GPU kernels run on after the end of a turn.
    overrun: float = 0.0
    at: int = 0
    used: float = 0.0
    busy: bool = False
    owed: float = 0.0
    ran: list[int] = field(default_factory=list)

    def wants(self) -> bool:
        return not self.pause or self.at % (self.work + self.pause) < self.work


class Machine:
    """Simulated devices. In each turn, they run the programs that the plan selects for the turn.

    Programs that run on a device at the same time share its time.
    """

    def __init__(self, seed: int = 0, **programs: Program) -> None:
        self.programs = programs
        self.rng = random.Random(seed)
        self.state = Tallies()
        self.now = 0.0
        self.number = 0
        self.last: Turn | None = None

    def turn(self) -> Turn:
        runners = [
            Contender(name, p.share, p.devices, p.busy, p.used) for name, p in self.programs.items()
        ]
        shuffled = list(runners)
        self.rng.shuffle(shuffled)
        found = next_turn(self.state, shuffled, self.now)
        again = next_turn(self.state, tuple(runners), self.now)
        assert (again.run, again.wait, again.state) == (found.run, found.wait, found.state)
        assert found.run | found.wait == set(self.programs)
        assert not found.run & found.wait
        self.check(found)
        self.state = found.state
        running = []
        for name, p in self.programs.items():
            wants = p.wants()
            p.busy = wants
            if wants and name in found.run:
                running.append(p)
                p.ran.append(self.number)
                p.at += 1
            elif not wants:
                p.at += 1
        for p in running:
            crowd = max(sum(uuid in o.devices for o in running) for uuid in p.devices)
            p.used += TURN / crowd * self.rng.uniform(0.9, 1.0)
            p.used += p.overrun * self.rng.random()
        self.now += TURN
        self.number += 1
        self.last = found
        return found

    def check(self, found: Turn) -> None:
        """Check that a contended device runs at most one busy program.

        Check also that a program waits only if another busy program runs on one of its devices.
        """
        busy = {n: p for n, p in self.programs.items() if p.busy}
        for uuid in {u for p in self.programs.values() for u in p.devices}:
            there = [n for n, p in busy.items() if uuid in p.devices]
            running = [n for n in there if n in found.run]
            if uuid in found.contended:
                assert len(there) > 1
                assert len(running) <= 1
            else:
                full = all(busy[n].share == 100 for n in there)
                assert len(there) < 2 or full, "contention that nobody sees"
        assert set(self.programs) - set(busy) <= found.run, "paused, but not busy"
        assert found.contended == contended_devices(
            Contender(n, p.share, p.devices, p.busy, p.used) for n, p in self.programs.items()
        )
        for name in found.wait:
            mine = found.contended.intersection(self.programs[name].devices)
            holders = {n for n in found.run & set(busy) if mine & set(self.programs[n].devices)}
            assert holders, f"{name} waits for no session"

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    def shares(self, before: dict[str, float] | None = None) -> dict[str, float]:
        used = {n: p.used - (before or {}).get(n, 0.0) for n, p in self.programs.items()}
        total = sum(used.values())
        return {n: u / total for n, u in used.items()}

    def snapshot(self) -> dict[str, float]:
        return {n: p.used for n, p in self.programs.items()}


def test_sole_busy_session_runs_even_with_a_small_share():
    m = Machine(a=Program(10), b=Program(50, pause=10**9, work=0))
    for _ in range(20):
        assert m.turn().run == {"a", "b"}
    assert m.programs["a"].ran == list(range(20))


def test_sessions_with_full_shares_are_never_paused():
    m = Machine(a=Program(100), b=Program(100))
    m.run(20)
    assert len(m.programs["a"].ran) == len(m.programs["b"].ran) == 20
    m.programs["c"] = Program(50)
    m.run(20)
    assert len(m.programs["a"].ran) < 40


@pytest.mark.parametrize("overrun", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_busy_seconds_follow_the_shares_over_time(seed, overrun):
    rng = random.Random(seed)
    shares = [rng.randint(1, 99) for _ in range(rng.randint(2, 6))]
    programs = {f"s{i}": Program(share, overrun=overrun) for i, share in enumerate(shares)}
    m = Machine(seed, **programs)
    m.run(50)
    before = m.snapshot()
    # The number of turns is so large that the program with the smallest share has several of them.
    m.run(min(3000, 60 * sum(shares) // min(shares)))
    for name, got in m.shares(before).items():
        due = m.programs[name].share / sum(shares)
        assert got == pytest.approx(due, rel=0.05, abs=0.015), (name, shares)


@pytest.mark.parametrize("seed", range(25))
def test_no_session_starves_and_no_turn_is_wasted(seed):
    """Each session that wants to compute has a turn within a bounded time."""
    rng = random.Random(seed)
    programs = {}
    for i in range(rng.randint(2, 5)):
        devices = rng.sample(["G0", "G1", "G2"], rng.randint(1, 3))
        programs[f"s{i}"] = Program(
            rng.choice([10, 25, 50, 99]),
            tuple(sorted(devices)),
            work=rng.randint(1, 5),
            pause=rng.choice([0, 0, 1, 7]),
        )
    m = Machine(seed, **programs)
    m.run(600)
    for name, p in programs.items():
        gaps = [b - a for a, b in zip([0, *p.ran], [*p.ran, 600], strict=True)]
        # The largest share is about ten times the smallest (99 and 10). So between two turns of
        # this program, another program has at most about ten turns. The limit is twice as high.
        assert max(gaps) <= 2 * 10 * len(programs), f"{name} waited {max(gaps)} turns: {programs}"


def test_new_session_starts_without_credit_or_debt():
    m = Machine(a=Program(50), b=Program(50))
    m.run(1000)
    m.programs["c"] = Program(50)
    before = m.snapshot()
    m.run(60)
    for got in m.shares(before).values():
        assert got == pytest.approx(1 / 3, abs=0.05)


def test_session_gets_no_credit_for_idle_time():
    m = Machine(a=Program(50), b=Program(50, work=5, pause=10**9))
    m.run(1000)
    m.programs["b"].pause = 0
    before = m.snapshot()
    m.run(40)
    assert m.shares(before)["a"] == pytest.approx(0.5, abs=0.06)


def test_session_owes_nothing_for_time_used_alone():
    m = Machine(a=Program(10))
    m.run(1000)
    m.programs["b"] = Program(90)
    before = m.snapshot()
    m.run(200)
    assert m.shares(before)["a"] == pytest.approx(0.1, abs=0.02)


def test_session_with_pauses_gets_its_share_of_busy_time():
    m = Machine(a=Program(50), b=Program(50, work=10, pause=10))
    m.run(2000)
    # b computes in 10 turns, and a has 10 turns in between. Then b pauses for 10 turns. So b has 10
    # of 30 turns.
    assert m.shares()["b"] == pytest.approx(1 / 3, abs=0.05)


def test_a_turn_on_several_devices_is_all_or_nothing():
    m = Machine(
        a=Program(50), b=Program(50, ("G1",)), both=Program(50, ("G0", "G1")), c=Program(50)
    )
    m.run(900)
    before = m.snapshot()
    m.run(900)
    used = {n: p.used - before[n] for n, p in m.programs.items()}
    assert used["a"] == pytest.approx(used["both"], rel=0.1)
    assert used["a"] == pytest.approx(used["c"], rel=0.1)
    # On G1, b gets all turns that ``both`` cannot use.
    assert used["b"] == pytest.approx(2 * used["both"], rel=0.1)
    # These extra turns give b neither credit nor debt: when a and c leave, b gets half of G1.
    del m.programs["a"], m.programs["c"]
    before = m.snapshot()
    m.run(50)
    assert m.shares(before)["b"] == pytest.approx(0.5, abs=0.05)


def test_usage_counter_that_restarts_at_zero_is_no_error():
    m = Machine(a=Program(50), b=Program(50))
    m.run(100)
    m.programs["a"].used = 0.0
    m.run(100)
    assert m.programs["a"].used == pytest.approx(5.0, abs=0.6)


def test_a_session_that_left_is_forgotten():
    m = Machine(a=Program(50), b=Program(50, ("G1",)))
    m.run(10)
    del m.programs["b"]
    m.run(1)
    assert set(m.state.accounts) == {"a"}
    assert set(m.state.clocks) == {"G0"}


def test_plan_without_sessions_is_empty():
    found = next_turn(Tallies(), (), 0.0)
    assert (found.run, found.wait, found.contended) == (frozenset(), frozenset(), frozenset())


@pytest.mark.parametrize(
    ("programs", "want"),
    [
        ({"a": (50, "G0"), "b": (100, "G0")}, {"G0"}),
        ({"a": (100, "G0"), "b": (100, "G0")}, set()),
        ({"a": (50, "G0"), "b": (50, "G1")}, set()),
        ({"a": (50, "G0"), "idle": (50, "G0")}, set()),
        ({"idle": (50, "G0"), "b": (100, "G0"), "c": (100, "G0")}, set()),
        ({"a": (50, "G0 G1"), "b": (100, "G1"), "c": (100, "G1 G2")}, {"G1"}),
    ],
    ids=[
        "one of them wants less",
        "all want the whole",
        "not on one device",
        "one is busy",
        "the one that wants less is idle",
        "on several devices",
    ],
)
def test_two_busy_sessions_contend_if_a_share_is_below_100(programs, want):
    runners = [
        Contender(name, share, tuple(devices.split()), name != "idle", 0.0)
        for name, (share, devices) in programs.items()
    ]
    assert contended_devices(runners) == want
    assert next_turn(Tallies(), runners, 0.0).contended == want
