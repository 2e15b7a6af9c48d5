# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sends millions of random events: ``python -m tests.pool.soak --events 1000000 --seed 0``.

After every event the naive model checks every action, ``check_pool`` recomputes all accounts, and
``liveness`` tries all plans. The soak prints a JSON summary. If it finds a violation, it prints the
seed and the last events.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from .world import World

#: Number of events of an episode. Each episode has a new machine with other settings.
EPISODE = 2000

#: Number of events between two thorough checks. A thorough check compares the explanations before
#: and after a second plan, even if their data has not changed.
EVERY = 10


def run(events: int, seed: int, *, shares: bool = False) -> dict[str, object]:
    done, episode = 0, 0
    kinds: dict[str, int] = {}
    started = time.perf_counter()
    while done < events:
        rng = random.Random(seed * 1_000_003 + episode)
        world = _world(rng, shares=shares)
        try:
            while world.events < min(EPISODE, events - done):
                world.step()
        except Exception as error:
            error.add_note(f"seed {seed}, episode {episode}, event {world.events}")
            raise
        done += world.events
        episode += 1
        for name, count in world.kinds.items():
            kinds[name] = kinds.get(name, 0) + count
    return {
        "events": done,
        "seed": seed,
        "machines": episode,
        "violations": 0,
        "seconds": round(time.perf_counter() - started, 1),
        "counts": dict(sorted(kinds.items())),
    }


def _world(rng: random.Random, *, shares: bool) -> World:
    return World(
        rng,
        devices=rng.choice([1, 2, 2, 3]),
        most=rng.choice([4, 6, 9]),
        every=EVERY,
        shares=shares,
    )


def one(seed: int, episode: int, tail: int = 40, *, shares: bool = False) -> None:
    """Run one episode again and print the last events before its failure."""
    rng = random.Random(seed * 1_000_003 + episode)
    world = _world(rng, shares=shares)
    lines: list[str] = [str(world.settings), *(str(d) for d in world.naive.devices.values())]
    send = world.pool.__class__.handle

    def handle(pool, event):
        lines.append(f"> {event}")
        actions = send(pool, event)
        lines.extend(f"    {a}" for a in actions)
        return actions

    world.pool.__class__.handle = handle
    try:
        while world.events < EPISODE:
            world.step()
    finally:
        world.pool.__class__.handle = send
        print("\n".join([*lines[:4], "...", *lines[-tail:]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episode", type=int, help="run only this one, and show its last events")
    parser.add_argument("--tail", type=int, default=40)
    parser.add_argument("--shares", action="store_true", help="with groups, budgets, preemption")
    options = parser.parse_args()
    if options.episode is not None:
        one(options.seed, options.episode, options.tail, shares=options.shares)
    else:
        print(json.dumps(run(options.events, options.seed, shares=options.shares), indent=2))


if __name__ == "__main__":
    main()
