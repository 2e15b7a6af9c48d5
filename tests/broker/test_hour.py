# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Figures of the devices and of the queue for each minute of the last hour."""

from __future__ import annotations

from jupyter_gpupool.broker.hour import KEPT, DeviceLook, Hour

from .kit import Kernel


def test_minute_shows_the_mean_sample_and_the_longest_queue():
    hour = Hour()
    hour.take(6000.0, {"G0": DeviceLook(100, 40, 10)}, 0)
    hour.take(6030.0, {"G0": DeviceLook(200, 60, None)}, 3)
    hour.take(6059.0, {"G0": DeviceLook(300, 80, 20)}, 1)
    shown = hour.shown(6059.5, ["G0"])
    assert shown["step"] == 60
    assert {name: values[-1] for name, values in shown["devices"]["G0"].items()} == {
        "granted": 200, "used": 60, "utilisation": 15,
    }  # fmt: skip
    assert shown["queue"][-1] == 3


def test_minute_without_a_sample_is_null():
    hour = Hour()
    hour.take(6000.0, {"G0": DeviceLook(100, None, None)}, 1)
    hour.take(6180.0, {"G0": DeviceLook(200, None, None)}, 0)
    shown = hour.shown(6190.0, ["G0", "G1"])
    assert shown["queue"][-4:] == [1, None, None, 0]
    assert shown["devices"]["G0"]["granted"][-4:] == [100, None, None, 200]
    assert shown["devices"]["G0"]["used"][-1] is None
    assert set(shown["devices"]["G1"]["granted"]) == {None}
    assert len(shown["queue"]) == len(shown["devices"]["G1"]["used"]) == KEPT


def test_points_older_than_an_hour_are_gone():
    hour = Hour()
    hour.take(6000.0, {}, 5)
    assert hour.shown(6000.0 + 3600 - 1, [])["queue"][0] == 5
    assert set(hour.shown(6000.0 + 3600, [])["queue"]) == {None}


def test_wait_between_two_samples_counts(make_broker):
    broker = make_broker(quotas={"*": {"leases": 1}}, sample_interval=60).started
    first, second = Kernel(broker, "first"), Kernel(broker, "second")
    try:
        first.attach()
        second.do("ask", hold="cell")
        second.wait_state("queued")
        first.do("drop", hold="cell")
        second.wait_state("active")
        with broker.client() as client:
            assert max(n or 0 for n in client.call("hour")["queue"]) == 1
    finally:
        first.close()
        second.close()
