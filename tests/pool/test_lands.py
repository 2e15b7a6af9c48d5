# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Landing: a process has called cuInit for one device, but its slice may be on another device.

When the process makes its first context, the guard can move the process to its slice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpupool.broker.store.records import from_json, to_json
from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Owner, Request, Slice

from .builders import Lab, device, got, none


def landing(index, model="A", **fields):
    return device(index, 17, model=model, landing_bytes=1, **fields)


def asked(lab, name, *bound, memory=10, lands=True):
    """Open a session and let it ask for its slice; return the pool's actions.

    Its process has seen the devices ``bound`` at cuInit, and now makes its first context.
    """
    lab.send(
        ev.SessionOpened, session=name, owner=Owner(name), attach="lazy", lands=lands,
        request=Request(memory=memory, limit=memory, devices=len(bound)),
    )  # fmt: skip
    return lab.send(ev.HoldTaken, session=name, hold="device", kind="device", bound=bound)


def test_capacity_leaves_room_for_a_landing_context():
    lab = Lab(landing(0), landing(1))
    assert [view.capacity for view in lab.pool.view(lab.now).devices] == [16, 16]


def test_session_stays_on_the_device_it_saw_if_there_is_room():
    lab = Lab(landing(0), landing(1))
    lab.running("b", 4)  # b is on G0, which best fit would choose for a
    got(asked(lab, "a", "G1"), ev.Attach, session="a", slices=(Slice("G1", 10),))


def test_session_goes_to_any_device_of_its_model_with_room():
    lab = Lab(landing(0), landing(1))
    lab.running("b", 16)
    got(asked(lab, "a", "G0"), ev.Attach, session="a", slices=(Slice("G1", 10),))


def test_sessions_that_saw_one_gpu_may_use_all_gpus_of_its_model():
    lab = Lab(landing(0), landing(1), landing(2))
    for name in ("b", "c", "d"):
        lab.running(name, 16)
    for name in ("w1", "w2"):
        none(asked(lab, name, "G0"), ev.Attach)
    got(lab.end("c"), ev.Attach, session="w1")
    got(lab.end("d"), ev.Attach, session="w2")


def test_session_is_bound_to_the_device_that_has_its_memory():
    """The session saw G0 and landed on G1. G1 reserves no bytes for the contexts of landings.

    So the session cannot move again.
    """
    lab = Lab(landing(0), device(1, 17, model="A"))
    lab.running("b", 16)  # b is on G0
    asked(lab, "a", "G0")
    lab.done("a")
    assert lab.where("a") == [("G1", 10)]
    lab.seen("G1", a=10)
    assert lab.pool.record("a").bound == ("G1",)


def test_session_waits_for_its_gpu_model_and_the_reason_says_so():
    lab = Lab(landing(0), landing(1), landing(2, "B"))
    lab.running("b", 16)
    lab.running("c", 16)
    none(asked(lab, "a", "G0"), ev.Attach)
    assert lab.reason("a") == (
        "10 B is needed on a GPU of the model A, because the kernel initialised CUDA on this "
        "model; at most 0 B is free on such a GPU"
    )
    got(lab.end("c"), ev.Attach, session="a", slices=(Slice("G1", 10),))


def test_each_device_of_a_gang_is_replaced_by_one_of_its_model():
    lab = Lab(landing(0, "B"), landing(1), landing(2), landing(3, "B"))
    lab.running("x", 16, devices=1)  # x is on G0
    got(
        asked(lab, "a", "G1", "G0"), ev.Attach, session="a",
        slices=(Slice("G1", 10), Slice("G3", 10)),
    )  # fmt: skip


@pytest.mark.parametrize("why", ["no room is kept", "no guard"])
def test_session_that_cannot_land_waits_for_the_device_it_saw(why):
    devices = [landing(0), landing(1)]
    if why == "no room is kept":
        devices = [replace(d, landing_bytes=0) for d in devices]
    lab = Lab(*devices)
    lab.running("b", 16)
    none(asked(lab, "a", "G0", lands=why != "no guard"), ev.Attach)
    assert "GPU 0" in lab.reason("a")
    got(lab.end("b"), ev.Attach, session="a", slices=(Slice("G0", 10),))


def test_record_says_whether_a_session_lands():
    lab = Lab(landing(0), landing(1))
    asked(lab, "a", "G0")
    record = from_json(to_json(lab.pool.record("a")))
    assert record.lands
    assert record.bound == ("G0",)


def not_landed(lab, name, *bound, stay=False):
    epoch = lab.record(name).epoch
    return lab.send(
        ev.LandingRefused, session=name, epoch=epoch, bound=bound, message="not moved", stay=stay
    )


def test_refused_landing_gives_the_slice_back():
    lab = Lab(landing(0), landing(1))
    lab.running("b", 16)
    asked(lab, "a", "G0")
    lab.done("a")
    lab.open("c", 10)
    lab.after(5)
    none(not_landed(lab, "a", "G0", stay=True), ev.Attach)
    assert (lab.state("a"), lab.record("a").slices) == ("queued", ())
    assert lab.reason("a").startswith("10 B is needed on GPU 0, and 0 B is free there")
    assert "the driver could not move it" in lab.reason("a")
    got(lab.hold("c"), ev.Attach, session="c", slices=(Slice("G1", 10),))
    got(lab.end("b"), ev.Attach, session="a", slices=(Slice("G0", 10),))


def test_refused_landing_keeps_the_place_in_the_queue():
    lab = Lab(landing(0), landing(1))
    lab.running("b", 16)
    asked(lab, "a", "G0")
    lab.done("a")
    lab.after(5)
    lab.open("c", 16)
    none(lab.hold("c"), ev.Attach)
    got(not_landed(lab, "a", "G0", stay=True), ev.Attach, session="c")
    lab.open("d", 16)
    none(lab.hold("d"), ev.Attach)
    got(lab.end("b"), ev.Attach, session="a", slices=(Slice("G0", 10),))


def test_session_waits_for_the_seen_model_if_landing_fails():
    lab = Lab(landing(0, "B"), landing(1), landing(2, "B"))
    lab.running("b", 16)
    lab.running("c", 16)
    lab.running("d", 16)
    asked(lab, "a", "G1", lands=True)
    lab.end("c")
    lab.done("a")
    assert lab.record("a").slices[0].device == "G1"
    none(not_landed(lab, "a", "G0"), ev.Attach)
    assert "of the model B" in lab.reason("a")
    got(lab.end("d"), ev.Attach, session="a", slices=(Slice("G2", 10),))


@pytest.mark.parametrize("how", ["another epoch", "idle", "nobody"])
def test_refused_landing_of_another_lease_changes_nothing(how):
    lab = Lab(landing(0), landing(1))
    asked(lab, "a", "G0")
    lab.done("a")
    before = lab.record("a")
    name, epoch = "a", before.epoch
    if how == "another epoch":
        epoch += 1
    elif how == "idle":
        lab.drop("a", "device")
    else:
        name = "b"
    lab.send(
        ev.LandingRefused, session=name, epoch=epoch, bound=("G1",), message="x", stay=True
    )  # fmt: skip
    assert lab.record("a").slices == before.slices
    assert lab.record("a").bound == before.bound


def test_cuinit_binds_a_waiting_session_to_visible_devices():
    lab = Lab(landing(0), landing(1, "B"))
    lab.running("b", 16)
    lab.running("c", 16)
    lab.open("a", 10)
    none(lab.hold("a"), ev.Attach)
    lab.send(ev.DevicesSettled, session="a", bound=("G0",))
    none(lab.end("c"), ev.Attach)
    got(lab.end("b"), ev.Attach, session="a", slices=(Slice("G0", 10),))


def test_waiting_session_prefers_the_devices_promised_to_it():
    lab = Lab(landing(0), landing(1, "B"))
    lab.running("b", 16)
    lab.running("c", 16)
    lab.open("a", 10)
    lab.hold("a")
    for name, place in (("c", "G1"), ("b", "G0")):
        lab.drop(name)
        if lab.state(name) == "detaching":
            assert lab.pool.preferred("a") == (place,)
            return
    pytest.fail("no lease was preempted for it")


def test_request_too_large_for_its_model_is_refused():
    lab = Lab(landing(0), device(1, 49, model="B", landing_bytes=1))
    refused = got(asked(lab, "a", "G0", memory=20), ev.HoldRefused, session="a").refusal
    assert refused.code == "over-device"
    assert refused.message == (
        "20 B was asked for; this kernel initialised CUDA on a GPU of the model A, and the largest "
        "can give at most 16 B."
    )
    assert refused.next_step == ("Restart the kernel to use another GPU, or ask for at most 16 B.")
    assert refused.details["most"] == 16
    assert lab.state("a") == "detached"
    # The message offers at most 16 B, and the pool accepts a request for 16 B.
    assert lab.change("a", 16)[0].refusal is None
    got(lab.hold("a"), ev.Attach, session="a", slices=(Slice("G0", 16),))


def test_changed_request_too_large_for_its_model_is_refused():
    lab = Lab(landing(0), device(1, 49, model="B", landing_bytes=1))
    lab.running("b", 16)
    lab.open("a", 10, lands=True)
    lab.send(ev.DevicesSettled, session="a", bound=("G0",))
    assert "of the model A" in lab.change("a", 20)[0].refusal.message


def test_wait_ends_when_the_session_binds_to_a_too_small_model():
    lab = Lab(landing(0), device(1, 49, model="B", landing_bytes=1))
    lab.running("b", 48)
    lab.open("a", 20, lands=True)
    lab.hold("a")
    assert lab.state("a") == "queued"
    found = lab.send(ev.DevicesSettled, session="a", bound=("G0",))
    assert "of the model A" in got(found, ev.HoldRefused, session="a").refusal.message
    assert lab.state("a") == "detached"


def test_refusal_names_the_limit_of_the_gpu_that_binds_a_process():
    lab = Lab(landing(0), landing(1), device(2, 49, model="A"))
    refused = got(asked(lab, "a", "G1", memory=20, lands=False), ev.HoldRefused, session="a")
    assert "that GPU can give at most 16 B" in refused.refusal.message


def test_second_largest_gpu_limits_a_request_for_two_gpus():
    lab = Lab(
        landing(0), device(1, 31, model="A", landing_bytes=1), landing(2, "B"), landing(3, "B")
    )
    lab2 = asked(lab, "a", "G0", "G1", memory=12)
    got(lab2, ev.Attach, session="a")
    lab.end("a")
    lab = Lab(landing(0), device(1, 31, model="A", landing_bytes=1),
              device(2, 49, model="B"), device(3, 49, model="B"))  # fmt: skip
    refused = got(asked(lab, "a", "G0", "G1", memory=20), ev.HoldRefused, session="a").refusal
    assert "2 of these GPUs can give at most 16 B on each" in refused.message


def test_a_set_aside_session_is_restored_with_its_next_lease():
    lab = Lab(landing(0), landing(1))
    lab.open("a", 10, lands=True)
    lab.send(ev.SetAside, session="a", suspended=(Slice("G0", 0),))
    assert lab.record("a").suspended == (Slice("G0", 0),)
    lab.send(ev.DevicePaused, device="G0", reason="paused")
    attach = got(lab.hold("a"), ev.Attach, session="a")
    assert (attach.origin, attach.slices[0].device) == (("G0",), "G1")
    got(lab.done("a"), ev.HoldGranted, session="a")
    assert lab.record("a").suspended == ()
    assert lab.record("a").bound == ("G1",)


def test_restored_session_that_was_set_aside_needs_no_resume():
    lab = Lab(landing(0), landing(1))
    lab.open("a", 10, lands=True)
    lab.send(ev.SetAside, session="a", suspended=(Slice("G0", 2),))
    lab.send(ev.SetAside, session="a", suspended=())
    assert got(lab.hold("a"), ev.Attach, session="a").origin == ()


def test_waiting_session_that_is_set_aside_still_waits():
    lab = Lab(landing(0))
    lab.open("a", 10, lands=True)
    lab.send(ev.DevicePaused, device="G0", reason="paused")
    lab.hold("a")
    lab.send(ev.SetAside, session="a", suspended=(Slice("G0", 0),))
    assert lab.state("a") == "queued"
    assert got(lab.send(ev.DeviceResumed, device="G0"), ev.Attach, session="a").origin == ("G0",)


def test_session_with_a_lease_is_not_set_aside():
    lab = Lab(landing(0))
    lab.running("a", 10)
    lab.send(ev.SetAside, session="a", suspended=(Slice("G0", 0),))
    assert lab.record("a").suspended == ()
    assert lab.state("a") == "active"
