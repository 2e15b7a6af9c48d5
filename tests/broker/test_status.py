# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The status for a user interface: what a user may request, and why a device is missing."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from jupyter_gpupool.errors import RefusedError

from .kit import BIG, CAPACITY, MACHINE, Kernel, MiB, wait_until


@pytest.fixture
def make(make_broker):
    return lambda **config: make_broker(**config).started


def test_status_shows_the_limits_that_apply_to_requests(make):
    broker = make(
        emulate=MACHINE,
        quotas={"*": {"memory": "400MiB", "devices": 1}},
        max_wait=60,
        priority_classes={"notebook": 5, "batch": 0},
    )
    status = broker.status()
    assert status["problem"] == ""
    assert status["limits"] == {
        "memory": 400 * MiB,
        "devices": 1,
        "max_wait": 60.0,
        "max_keep": 14400.0,
        "priorities": ["batch", "notebook"],
    }
    kernel = Kernel(broker, "a")
    try:
        with broker.client() as client:
            for wrong, code in (
                ({"memory": 400 * MiB + 1}, "over-quota"),
                ({"memory": CAPACITY + 1}, "over-device"),
                ({"memory": 100 * MiB, "devices": 2}, "over-quota"),
            ):
                with pytest.raises(RefusedError) as error:
                    client.call("request", session=kernel.session, **wrong)
                assert error.value.code == code
            answer = client.call("request", session=kernel.session, memory=400 * MiB)
            assert answer["request"]["memory"] == 400 * MiB
    finally:
        kernel.close()


def test_status_shows_the_largest_request_that_is_granted(make):
    """Host memory (400 MiB) is the limit: a session may have 200 MiB on each of two devices."""
    broker = make(
        emulate=MACHINE, host_memory="400MiB", quotas={"*": {"memory": "600MiB", "devices": 2}}
    )
    assert broker.status()["limits"]["memory"] == 400 * MiB
    kernel = Kernel(broker, "a", memory=100 * MiB, devices=2)
    try:
        assert broker.session(kernel.session)["slices"] == []
        kernel.attach()
        seen = broker.session(kernel.session)
        assert seen["most_bytes"] == 200 * MiB
        assert [s["device"] for s in seen["slices"]] == seen["devices"]
        assert [s["granted_bytes"] for s in seen["slices"]] == [100 * MiB] * 2
        with broker.client() as client:
            with pytest.raises(RefusedError) as error:
                client.call("request", session=kernel.session, memory=201 * MiB)
            assert error.value.code == "over-host"
            client.call("request", session=kernel.session, memory=200 * MiB)
    finally:
        kernel.close()


def test_measured_use_is_shown_for_each_device(make):
    """A kernel without the guard has two devices, and uses memory on the first one only."""
    broker = make(emulate=MACHINE)
    kernel = Kernel(broker, "a", memory=200 * MiB, devices=2)
    try:
        kernel.attach()
        kernel.do("alloc", bytes=64 * MiB, byte=1)

        def used():
            seen = broker.session(kernel.session)
            assert [s["device"] for s in seen["slices"]] == seen["devices"]
            return [s["used_bytes"] for s in seen["slices"]], seen["footprint_bytes"]

        (first, second), whole = wait_until(
            lambda: (u := used())[1] and u[1] >= 64 * MiB and None not in u[0] and u, "a sample"
        )
        assert (first >= 64 * MiB, second) == (True, 0)
        assert first + second == whole
    finally:
        kernel.close()


def test_pending_release_is_shown_and_cancelled_by_keep(make):
    broker = make(emulate=MACHINE)
    with closing(Kernel(broker, "a")) as kernel, broker.client() as client:
        kernel.attach()
        assert broker.session(kernel.session)["release_asked"] is False
        client.call("release", session=kernel.session)
        assert broker.session(kernel.session)["release_asked"] is True
        client.call("keep", session=kernel.session, seconds=60)
        assert broker.session(kernel.session)["release_asked"] is False


def test_idle_kernel_needs_host_memory_for_its_use_only(make):
    """Host memory has room for what both kernels use, but not for both slices."""
    broker = make(emulate=MACHINE, host_memory="340MiB", sample_interval=0.1)
    use = (16 + 32) * MiB
    with ExitStack() as stack:
        client = stack.enter_context(broker.client())
        for name in ("a", "b"):  # kernel a is in host memory when kernel b is suspended
            kernel = stack.enter_context(closing(Kernel(broker, name, memory=300 * MiB)))
            kernel.attach()
            kernel.do("alloc", bytes=16 * MiB, byte=1)
            wait_until(
                lambda k=kernel: broker.session(k.session)["footprint_bytes"] == use, "a sample"
            )
            kernel.do("drop", hold="cell")
            kernel.wait_state("idle")
            client.call("release", session=kernel.session)
            kernel.wait_state("detached")
            assert broker.session(kernel.session)["suspended_bytes"] == use


def test_device_is_sampled_until_a_sessions_memory_is_free(make):
    """The process outlives its session. The broker takes samples until the process has ended."""
    broker = make(emulate=MACHINE, sample_interval=0.1)

    def used():
        return [device["memory_used"] for device in broker.status()["devices"]]

    kernel = Kernel(broker, "a")
    kernel.attach()
    kernel.do("alloc", bytes=100 * MiB, byte=1)
    wait_until(lambda: max(size or 0 for size in used()) >= 100 * MiB, "the use")
    with broker.client() as client:
        client.call("close", session=kernel.session)  # its process continues
    wait_until(lambda: broker.status()["devices"][0]["memory_foreign"] >= 100 * MiB, "the rest")
    kernel.close()
    wait_until(lambda: used() == [0, 0], "the freed memory")
    assert [device["memory_foreign"] for device in broker.status()["devices"]] == [0, 0]
    wait_until(lambda: used() == [None, None], "that nobody looks any more")
    with closing(Kernel(broker, "b")):
        wait_until(lambda: used() == [0, 0], "a new look")


def test_largest_device_is_the_limit_if_no_limit_is_set(make):
    assert make(emulate=MACHINE).status()["limits"]["memory"] == CAPACITY


def test_status_shows_when_a_session_opened_and_became_idle(make):
    broker = make(emulate=MACHINE)
    before = broker.status()["now"]
    kernel = Kernel(broker, "a", memory=BIG)
    try:
        seen = broker.session(kernel.session)
        assert before <= seen["opened_at"] <= broker.status()["now"]
        assert (seen["idle_since"], seen["idle_seconds"]) == (None, None)
        kernel.attach()
        kernel.do("drop", hold="cell")
        idle = wait_until(
            lambda: (s := broker.session(kernel.session))["state"] == "idle" and s, "an idle slice"
        )
        assert seen["opened_at"] < idle["idle_since"] <= broker.status()["now"]
        assert idle["idle_seconds"] >= 0
        again = broker.session(kernel.session)
        assert (again["opened_at"], again["idle_since"]) == (
            *(seen["opened_at"], idle["idle_since"]),
        )
    finally:
        kernel.close()


def test_reason_for_a_missing_device_is_shown(make):
    """The broker uses real GPUs. If this machine has none, the status says why."""
    status = make(emulate="").status()
    if status["devices"]:
        assert status["problem"] == ""
    else:
        assert "GPU" in status["problem"]
        assert status["problem"].endswith(".")
        assert (status["limits"]["memory"], status["limits"]["devices"]) == (None, 0)
