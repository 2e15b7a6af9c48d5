# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Builds snapshots of a pool, in the form of the broker's answer to ``status``."""

from __future__ import annotations

MiB, GiB = 1 << 20, 1 << 30
UUIDS = ("GPU-5d1c0000-aaaa", "GPU-7e2f0000-bbbb")


def device(index: int = 0, **changes):
    return {
        "uuid": UUIDS[index],
        "index": index,
        "name": "EMULATED NVIDIA GPU 16 GiB",
        "emulated": True,
        "tier": "unguarded",
        "tier_reason": "",
        "can_suspend": True,
        "memory_total": 16 * GiB,
        "memory_capacity": 16 * GiB,
        "memory_granted": 0,
        "memory_foreign": 0,
        "memory_free": 16 * GiB,
        "memory_used": 0,
        "utilisation": 0,
        "drained_reason": "",
        **changes,
    }


def session(session_id: str, **changes):
    return {
        "id": session_id,
        "pid": 1,
        "owner": "ada",
        "label": "train.ipynb",
        "kernel_id": f"kernel-{session_id}",
        "state": "detached",
        "attach": "cell",
        "priority": "notebook",
        "granted_bytes": 0,
        "footprint_bytes": 0,
        "suspended_bytes": 0,
        "request": {"memory": 4 * GiB, "limit": 4 * GiB, "devices": 1},
        "holds": [],
        "device": None,
        "devices": [],
        "queue_position": None,
        "queue_length": 0,
        "expected": None,
        "wait_reason": "",
        "pinned_reason": "",
        "wait_seconds_total": 0.0,
        "attached_seconds_total": 0.0,
        "idle_since": None,
        "suspends": 0,
        "resumes": 0,
        "migrations": 0,
        **changes,
    }


def attached(session_id: str, state: str, size: int, on: int = 0, **changes):
    place = {"device": UUIDS[on], "devices": [UUIDS[on]]}
    return session(session_id, state=state, granted_bytes=size, **place, **changes)


def pool(*, devices=None, sessions=(), **changes):
    return {
        "version": "0.1.0",
        "socket": "/run/gpupool/broker.sock",
        "pid": 1,
        "now": 1000.0,
        "emulated": True,
        "machine": "2x16GiB",
        "devices": [device()] if devices is None else devices,
        "sessions": list(sessions),
        "queue_length": 0,
        "host": {"budget_bytes": 12 * GiB, "used_bytes": 0, "available_bytes": 20 * GiB},
        "settings": {},
        **changes,
    }
