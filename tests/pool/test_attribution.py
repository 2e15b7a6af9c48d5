# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How the pool attributes GPU memory to sessions, to the driver and to other processes.

This module also tests the overhead of a process, overuse, and the size of the state that the pool
moves.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.pool.attribution import (
    AGREE,
    REST_LOOKS,
    SAMPLES,
    LeaseHolder,
    Listed,
    Observed,
    Overhead,
    at_rest,
    attribute,
    complete,
    confirmed,
    driver_share,
    excused,
    measured_again,
    overuse,
    restore_room,
    slack,
    state_moved,
    state_to_move,
    tolerated,
    unlisted,
)
from jupyter_gpupool.pool.model import GiB, MiB, Slice

# ---------------------------------------------------------------------- attribution

#: DRIVER: bytes that the driver itself uses, without the reserve that it reports. CONTEXT: bytes of
#: one context.
DRIVER, CONTEXT = 80, 100


def observed(used, /, *, hidden=(), driver=DRIVER, **listed):
    """Return an observed device. The process ``stranger`` belongs to no session."""
    entries = [Listed(n, None if name == "stranger" else name) for name, n in listed.items()]
    entries += [Listed(size, known=False) for size in hidden]
    return Observed(used, entries, driver, CONTEXT)


@pytest.mark.parametrize(
    ("device", "granted", "foreign"),
    [
        (observed(70), 0, 0),
        (observed(100), 0, 20),
        (observed(120, stranger=50), 0, 50),
        (observed(150, stranger=70), 0, 70),
        (observed(250, a=150), 300, 0),
        (observed(430, a=150), 300, 100),
        (observed(400, a=150), 150, 170),
        (observed(150, stranger=40), 300, 40),
        (observed(60, s=500), 0, 0),
        (observed(60, stranger=500), 0, 60),
        (observed(250, s=500, a=200), 300, 0),
        (observed(90, s=5), 0, 10),
        (observed(500, s=420), 0, 420),
        (observed(300, hidden=[220]), 300, 0),
        (observed(500, hidden=[220]), 300, 120),
    ],
    ids=[
        "the driver's own",
        "more than that",
        "a listed process beside it",
        "a listed process with all of it",
        "a context that the list lacks",
        "more than a context",
        "beyond a slice that is full",
        "unlisted sessions are covered by their slices",
        "a list that is older than the figures",
        "nobody has more than is in use",
        "an old list beside an attached session",
        "what is left of a suspended one",
        "a suspended session that has memory again",
        "a number of the host's that may be the session's",
        "more under such a number than the slice covers",
    ],
)
def test_foreign_memory_excludes_sessions_and_the_driver(device, granted, foreign):
    """Session ``a`` has a slice if ``granted`` is not zero. Session ``s`` is suspended."""
    found = attribute(device, {"a": LeaseHolder(granted)} if granted else {})
    assert found.foreign == foreign
    listed = sum(entry.bytes for entry in device.listed if entry.session == "a")
    assert found.shown.get("s", 0) <= max(0, device.used - listed - DRIVER)


def test_context_of_a_landing_process_is_not_foreign_memory():
    device = observed(DRIVER + 200, s=200)
    assert attribute(device, {}).foreign == 200
    found = attribute(device, {}, landing={"s"})
    assert (found.foreign, found.shown) == (0, {})


def test_session_that_never_called_cuinit_holds_nothing():
    holders = {"a": LeaseHolder(300, cuda=False), "b": LeaseHolder(300, cuda=None)}
    assert attribute(observed(0), holders).footprints == {"a": 0}


def test_figures_of_the_guard_are_capped_at_the_slice():
    holders = {"a": LeaseHolder(300, counted=5000), "b": LeaseHolder(300, counted=200)}
    found = attribute(observed(600, b=250), holders)
    assert found.footprints == {"a": 300, "b": 250}
    assert found.shown == {"b": 250}, "the driver's word alone"


def test_process_without_a_byte_count_counts_as_unlisted():
    entries = [Listed(None, "a"), Listed(None)]
    found = attribute(Observed(280, entries, DRIVER, CONTEXT), {"a": LeaseHolder(200)})
    assert (found.foreign, found.footprints) == (0, {})


NAMES = ("a", "b", "c")
SIZE = st.integers(0, 30)
HOLDERS = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(LeaseHolder, SIZE, SIZE, st.sampled_from([None, True, False])),
)
DEVICES = st.builds(
    Observed,
    used=st.integers(0, 60),
    listed=st.lists(
        st.builds(
            Listed,
            st.none() | SIZE,
            st.sampled_from([*NAMES, None, None]),
            st.sampled_from([True, True, False]),
        ),
        max_size=5,
    ),
    driver=st.integers(0, 10),
    context=st.integers(0, 5),
)


@given(device=DEVICES, holders=HOLDERS, landing=st.sets(st.sampled_from(NAMES)), data=st.data())
def test_attribution_counts_each_used_byte_exactly_once(device, holders, landing, data):
    found = attribute(device, holders, landing)
    known = [entry for entry in device.listed if entry.known and entry.bytes is not None]
    listed = {n: sum(e.bytes for e in known if e.session == n) for n in NAMES}
    attached = sum(size for name, size in listed.items() if name in holders)
    assert 0 <= found.foreign <= max(0, device.used - attached)
    assert set(found.footprints) <= set(holders)
    for name, size in found.footprints.items():
        most = max(listed[name], min(holders[name].counted, holders[name].granted))
        assert listed[name] <= size <= most
    for name, size in found.shown.items():
        assert 0 <= size <= listed[name]
    # Another order of the listed processes changes nothing. Wrong figures in the sessions' pages do
    # not change ``foreign``.
    again = Observed(
        device.used, data.draw(st.permutations(device.listed)), device.driver, device.context
    )
    lying = {
        name: LeaseHolder(holder.granted, 10**6, holder.cuda) for name, holder in holders.items()
    }
    assert attribute(again, holders, landing) == found
    assert attribute(again, lying, landing).foreign == found.foreign


@given(used=st.integers(0, 60), holders=HOLDERS, driver=st.integers(0, 10))
def test_unlisted_memory_beyond_slices_and_driver_is_foreign(used, holders, driver):
    """NVML may not show to which session memory belongs.

    In a container, NVML lists no processes, or lists them with process ids of the host.
    """
    slices = sum(holder.granted for holder in holders.values())
    found = attribute(Observed(used, (), driver, 3), holders)
    assert found.foreign == max(0, used - slices - driver)
    hidden = [Listed(used, known=False)]
    assert attribute(Observed(used, hidden, driver, 3), holders) == found


@given(device=DEVICES, holders=HOLDERS, more=st.integers(0, 30))
def test_growth_of_an_unknown_process_is_foreign_memory(device, holders, more):
    grown = Observed(
        device.used + more, [*device.listed, Listed(more)], device.driver, device.context
    )
    assert attribute(grown, holders).foreign >= attribute(device, holders).foreign


# ---------------------------------------------------------------------- the driver's own memory


def test_unlisted_memory_is_the_use_beyond_all_listed_processes():
    assert unlisted(100, [30, 20]) == 50
    assert unlisted(40, [30, 20]) == 0
    assert unlisted(100, [30, None]) == 0, "it may have all of it"


def test_driver_share_includes_reserve_and_variation():
    total = 64 * GiB
    assert driver_share(300 * MiB, 100 * MiB, total) == 400 * MiB + slack(total)
    assert driver_share(0, 0, total) == 0, "a driver that shows none is exact"
    # The driver's share has a limit. The pool assumes that processes which NVML does not list use
    # the memory above this limit.
    assert driver_share(0, 5 * GiB, total) == 1 * GiB + slack(total)
    assert driver_share(0, 5 * GiB, 4 * GiB) == 512 * MiB + slack(4 * GiB)


def test_device_is_at_rest_if_only_the_driver_uses_it():
    assert at_rest([], leased=False)
    assert at_rest([Listed(5, "suspended")], leased=False)
    assert not at_rest([Listed(5)], leased=False)
    assert not at_rest([Listed(5, known=False)], leased=False)
    assert not at_rest([], leased=True)


def test_driver_share_is_measured_again_at_rest():
    total, was = 64 * GiB, 100 * MiB + slack(64 * GiB)
    grown = 300 * MiB
    assert measured_again([grown] * (REST_LOOKS - 1), 0, total, was) is None
    assert measured_again([grown] * REST_LOOKS, 0, total, was) == grown + slack(total)
    assert measured_again([grown, 100 * MiB, grown], 0, total, was) is None, "the smallest counts"
    assert measured_again([50 * MiB] * REST_LOOKS, 0, total, was) is None, "it comes and goes"
    assert measured_again([0] * REST_LOOKS, 0, total, was) == 0


@given(st.lists(st.integers(0, 4 * GiB), min_size=REST_LOOKS), st.integers(0, GiB))
def test_repeated_measurement_changes_nothing(looks, reserved):
    total = 16 * GiB
    found = measured_again(looks, reserved, total, was=10**15)
    assert found is not None
    assert measured_again(looks, reserved, total, found) is None


# ---------------------------------------------------------------------- overhead of a process


def looks(*figures, constant=32, complete=True):
    """Feed samples (counted, shown) to an ``Overhead``; return it, and the last sample's excess."""
    known, more = Overhead(), 0
    for counted, shown in figures:
        known, more = known.look(constant, counted, shown, complete=complete)
    return known, more


def test_overhead_is_learnt_when_samples_agree():
    known, more = looks(*[(200, 300)] * (AGREE - 1))
    assert (known.beyond(32), more) == (0, 100)
    known, more = looks(*[(200, 300)] * AGREE)
    assert known.beyond(32) == 100
    # One larger sample alone does not raise the learnt overhead.
    known, _ = known.look(32, 200, 900, complete=True)
    assert known.beyond(32) == 100


def test_small_context_lowers_overhead_only_if_list_is_complete():
    known, _ = looks(*[(32, 20)] * AGREE)
    assert known.beyond(32) == -12
    assert known.look(32, 96, 84, complete=True)[0].beyond(32) == -12
    known, _ = looks(*[(32, 20)] * AGREE, complete=False)
    assert known.beyond(32) == 0


def test_extra_cost_of_a_context_is_charged_once():
    known, more = looks(*[(32, 50)] * AGREE)
    assert (known.context, known.learnt, known.beyond(32), more) == (50, 0, 18, 18)


@given(steady=st.integers(0, 100), at=st.integers(0, 9), extra=st.integers(0, 1000))
def test_single_sample_does_not_raise_the_learnt_overhead(steady, at, extra):
    known = Overhead()
    for look in range(10):
        shown = 200 + steady + (extra if look == at else 0)
        known, more = known.look(32, 200, shown, complete=True)
        assert more == shown - 200
        assert known.beyond(32) <= steady
    assert known.beyond(32) == steady


def test_process_list_is_complete_if_the_driver_uses_the_rest():
    assert complete(observed(180, a=100))
    assert not complete(observed(181, a=100))
    assert not complete(observed(0)), "no list"
    assert complete(Observed(500, [Listed(None)], 0)), "one process may have all of it"


def test_larger_devices_excuse_more_driver_memory_up_to_1_gib():
    assert [excused(size) for size in (GiB // 4, 2 * GiB, 80 * GiB)] == [
        64 * MiB,
        256 * MiB,
        1 * GiB,
    ]


# ---------------------------------------------------------------------- overuse

TOTALS = {"G0": 2 * GiB, "G1": 2 * GiB}


def test_use_beyond_grant_and_tolerance_is_overuse():
    allowed = 128 * MiB  # a sixteenth of the device
    used, granted = {"G0": GiB + allowed}, {"G0": GiB}
    assert overuse(used, granted, {}, TOTALS) == 0
    used = {"G0": GiB + allowed + 1}
    assert overuse(used, granted, {}, TOTALS) == allowed + 1
    assert overuse(used, granted, {"G0": 1}, TOTALS) == 0
    assert overuse(used, {}, {}, TOTALS) == GiB + allowed + 1


def test_free_bytes_on_another_device_do_not_excuse_overuse():
    used, granted = {"G0": GiB, "G1": 0}, {"G0": GiB // 2, "G1": GiB}
    assert overuse(used, granted, {}, TOTALS) == GiB // 2


def test_tolerance_is_a_part_of_the_device_within_bounds():
    assert [tolerated(size) for size in (0, GiB, 2 * GiB, 80 * GiB)] == [
        64 * MiB,
        64 * MiB,
        128 * MiB,
        512 * MiB,
    ]


def test_pool_acts_once_on_each_overuse():
    samples, acts = 0, []
    for over in [1, 0, *[1] * (SAMPLES + 2), 0, *[5] * SAMPLES]:
        samples, act = confirmed(samples, over)
        acts.append(act)
    assert acts == [False, False, *[False, False, True, False, False], False, False, False, True]


# ---------------------------------------------------------------------- state that is moved

SLICES = (Slice("G0", 300), Slice("G1", 200))


@pytest.mark.parametrize(
    ("shown", "counted", "guarded", "cuda", "want"),
    [
        ({"G0": 120, "G1": 30}, {"G0": 90, "G1": 80}, True, True, {"G0": 120, "G1": 80}),
        ({}, {"G0": 90, "G1": 0}, True, True, {"G0": 90, "G1": 40}),
        ({"G0": 120}, {}, False, None, {"G0": 120, "G1": 200}),
        ({}, {}, False, True, {"G0": 300, "G1": 200}),
        ({}, {"G0": 0, "G1": 0}, True, False, {}),
        ({"G0": 5}, {}, True, False, {"G0": 5, "G1": 40}),
        ({"G7": 5}, {}, True, False, {"G0": 40, "G1": 40}),
    ],
    ids=[
        "the larger figure",
        "under the guard a context at most",
        "without the guard the whole slice",
        "nobody sees anything",
        "it has not called cuInit",
        "it has not, and is listed all the same",
        "it is listed elsewhere",
    ],
)
def test_unmeasured_state_has_the_largest_possible_size(shown, counted, guarded, cuda, want):
    contexts = {"G0": 40, "G1": 40}
    found = state_to_move(SLICES, shown, counted, contexts, guarded=guarded, cuda=cuda)
    assert found == want


def test_state_to_move_is_at_most_the_slice():
    found = state_to_move((Slice("G0", 30),), {}, {}, {"G0": 40}, guarded=True, cuda=True)
    assert found == {"G0": 30}


def test_moved_state_has_the_size_of_the_freed_bytes():
    assert state_moved(SLICES, {"G0": 7}, {"G0": 5, "G1": 6}) == (Slice("G0", 7), Slice("G1", 6))
    assert state_moved(SLICES, {"G0": 0}, {}) == SLICES


@given(state=st.integers(0, 100), granted=st.integers(0, 100), headroom=st.integers(0, 50))
def test_restore_reserves_room_for_the_whole_state(state, granted, headroom):
    room = restore_room(state, granted, headroom)
    assert state <= room <= max(state, granted)
    assert room <= state + headroom
    assert room == state + headroom or granted < state + headroom
