# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The times at which calendar rules are in force, compared with a search minute by minute."""

from __future__ import annotations

from bisect import bisect_right
from datetime import date, datetime, timezone
from functools import cache, lru_cache
from itertools import pairwise
from operator import itemgetter
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jupyter_gpupool.config.calendar import DAY, RuleTimes, changes, in_force, instant, next_change
from jupyter_gpupool.config.schedules import read_schedules

EPOCH = date(1970, 1, 1).toordinal()

#: Zones, each with a year in which its clock changes. The list covers summer time in both
#: hemispheres, a shift of half an hour, a change at midnight, an end of summer time for Ramadan,
#: and a skipped day.
YEARS = (
    ("Europe/Berlin", 2026),
    ("America/New_York", 2026),
    ("Australia/Lord_Howe", 2026),
    ("America/Santiago", 2025),
    ("Africa/Cairo", 2024),
    ("Africa/Casablanca", 2026),
    ("Pacific/Apia", 2011),
    ("Asia/Kolkata", 2026),
)


@cache
def minutes_of(zone: str, year: int) -> tuple[int, list[int]]:
    """Return the first second of the year, and the wall-clock time at each minute of the year.

    The returned times are in minutes since 1970, and never go back. If the real clock goes back an
    hour, the returned time stands still for an hour.
    """
    first = int(datetime(year, 1, 1, tzinfo=timezone.utc).timestamp())
    last = int(datetime(year + 1, 1, 1, tzinfo=timezone.utc).timestamp())
    place, found, before = ZoneInfo(zone), [], 0

    def wall(now: int) -> int:
        shown = datetime.fromtimestamp(now, place)
        return (shown.toordinal() - EPOCH) * DAY + shown.hour * 60 + shown.minute

    # Begin two days before the year, so that ``before`` is right at the start of the year. Each
    # step of the loop is half an hour, because no clock changes twice in half an hour.
    for half in range(first - 2 * 86400, last, 1800):
        begin, end = wall(half), wall(half + 1740)
        steady = end - begin == 29
        for minute in range(30):
            before = max(before, begin + minute if steady else wall(half + 60 * minute))
            if half >= first:
                found.append(before)
    return first, found


#: The minutes of a week. A list for a year has half a million entries. To save memory, all its
#: entries are these objects.
MINUTES = [*range(7 * DAY)]


@lru_cache(len(YEARS))
def places_in_week(zone: str, year: int) -> itemgetter[int]:
    """Return a function that turns the states of a week into the states of a year.

    A list of states has one entry for each minute.
    """
    # 1 January 1970 was a Thursday.
    walls = minutes_of(zone, year)[1]
    return itemgetter(*(MINUTES[(wall + 3 * DAY) % (7 * DAY)] for wall in walls))


def brute_force(rule: RuleTimes, zone: str, year: int) -> list[tuple[int, bool]]:
    """Search the year minute by minute; return the times at which ``rule`` begins or ends."""
    week = [False] * 7 * DAY
    for day in rule.days:
        for begin, end in rule.hours:
            for minute in range(begin, end if end > begin else end + DAY):
                week[(day * DAY + minute) % (7 * DAY)] = True
    first, _ = minutes_of(zone, year)
    states = places_in_week(zone, year)(week)
    found, state = [(first, states[0])], states[0]
    at = 0
    while True:
        try:
            at = states.index(not state, at)
        except ValueError:
            return found
        state = not state
        found.append((first + 60 * at, state))


def by_product(rule: RuleTimes, zone: str, year: int) -> list[tuple[int, bool]]:
    first, walls = minutes_of(zone, year)
    found = [(first, bool(in_force([rule], first)))]
    last = first + 60 * len(walls) - 1
    return found + [(at, bool(rules)) for at, rules in changes([rule], first, last)]


def rule(hours: str, days: str = "mon-sun", zone: str = "Europe/Berlin") -> RuleTimes:
    (found,) = read_schedules(
        [{"name": "r", "hours": hours, "days": days, "time_zone": zone, "set": {"linger": 1}}]
    )
    return found.rule


#: The years of the long form. In these years, many zones changed their rules.
DECADES = range(1990, 2030)

spans = st.tuples(st.integers(0, DAY - 1), st.integers(0, DAY)).filter(lambda s: s[0] != s[1])
#: Times around the hours at which clocks change.
nightly = st.tuples(st.integers(0, 240), st.integers(0, 240)).filter(lambda s: s[0] != s[1])


@settings(max_examples=30, deadline=None)
@given(
    place=st.sampled_from(YEARS),
    days=st.frozensets(st.integers(0, 6), min_size=1),
    hours=st.lists(spans | nightly, min_size=1, max_size=2),
)
def test_changes_in_a_year_agree_with_a_search_of_every_minute(place, days, hours):
    one = RuleTimes("r", days, tuple(hours), ZoneInfo(place[0]))
    assert by_product(one, *place) == brute_force(one, *place)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    zone=st.sampled_from(sorted(available_timezones() - {"localtime", "Factory"})),
    year=st.sampled_from(DECADES),
    days=st.frozensets(st.integers(0, 6), min_size=1),
    hours=st.lists(spans | nightly, min_size=1, max_size=3),
)
def test_changes_in_any_year_and_zone_agree_with_the_search(zone, year, days, hours):
    one = RuleTimes("r", days, tuple(hours), ZoneInfo(zone))
    assert by_product(one, zone, year) == brute_force(one, zone, year)


@settings(max_examples=100, deadline=None)
@given(
    place=st.sampled_from(YEARS),
    days=st.frozensets(st.integers(0, 6), min_size=1),
    hours=spans | nightly,
    second=st.integers(0, 350 * 86400),
)
def test_state_and_next_change_at_any_instant_agree_with_search(place, days, hours, second):
    one = RuleTimes("r", days, (hours,), ZoneInfo(place[0]))
    steps = brute_force(one, *place)
    now = steps[0][0] + second
    at = bisect_right(steps, now, key=lambda step: step[0])
    assert one.is_in_force(now) == steps[at - 1][1]
    change = next_change([one], now)
    after = steps[at] if at < len(steps) else None
    if after is None:
        assert change is None or change[0] >= steps[0][0] + 365 * 86400
    else:
        assert change == (after[0], (0,) if after[1] else ())


@settings(max_examples=100, deadline=None)
@example(
    rules=[RuleTimes("r", frozenset([0]), ((0, 387),), ZoneInfo("Europe/Berlin"))],
    now=1_704_778_020,  # the rule ends at the last second of the search
)
@given(
    rules=st.lists(
        st.builds(
            RuleTimes, st.just("r"), st.frozensets(st.integers(0, 6), min_size=1),
            st.tuples(spans | nightly), st.sampled_from([ZoneInfo(zone) for zone, _ in YEARS]),
        ),
        max_size=4,
    ),
    now=st.integers(1_700_000_000, 1_900_000_000),
)  # fmt: skip
def test_changes_of_several_rules_match_the_rules_in_force(rules, now):
    until = now + 20 * 86400
    found = [*changes(rules, now, until)]
    assert [rules for _, rules in found] == [in_force(rules, at) for at, _ in found]
    states = [in_force(rules, now), *(rules for _, rules in found)]
    assert all(before != after for before, after in pairwise(states))
    for begin, after in zip([now, *(at for at, _ in found)], states, strict=True):
        # ``changes`` also finds a change at ``until`` itself. So the last state must still be in
        # force at ``until``.
        later = min((at for at, _ in found if at > begin), default=until + 1)
        for second in (begin, (begin + later) // 2, later - 1):
            assert in_force(rules, second) == after
    if found:
        assert next_change(rules, now) == (found[0] if found[0][0] <= now + 15 * 86400 else None)


@settings(max_examples=60, deadline=None)
@given(zone=st.sampled_from(YEARS), cut=st.integers(0, DAY - 1), end=st.integers(0, DAY - 1),
       now=st.integers(1_300_000_000, 1_900_000_000))  # fmt: skip
def test_each_instant_is_either_day_or_night(zone, cut, end, now):
    if cut == end:
        return
    place = ZoneInfo(zone[0])
    every = frozenset(range(7))
    both = [
        RuleTimes("day", every, ((cut, end),), place),
        RuleTimes("night", every, ((end, cut),), place),
    ]
    assert all(len(rules) == 1 for _, rules in changes(both, now, now + 400 * 86400))


def utc(*when: int) -> int:
    return int(datetime(*when, tzinfo=timezone.utc).timestamp())


BERLIN = ZoneInfo("Europe/Berlin")


def test_skipped_time_means_the_instant_of_the_clock_change():
    jump = utc(2026, 3, 29, 1, 0)  # the clock goes from 02:00 to 03:00
    for minute in (120, 121, 150, 179, 180):
        assert instant(date(2026, 3, 29), minute, BERLIN) == jump
    assert instant(date(2026, 3, 29), 119, BERLIN) == jump - 60
    assert instant(date(2026, 3, 29), 181, BERLIN) == jump + 60


def test_repeated_time_means_its_first_occurrence():
    first = utc(2026, 10, 25, 0, 30)  # 02:30 in Berlin, before the clock goes back at 01:00 UTC
    assert instant(date(2026, 10, 25), 150, BERLIN) == first
    assert instant(date(2026, 10, 25), 180, BERLIN) == utc(2026, 10, 25, 2, 0)


def test_rule_is_not_in_force_on_a_skipped_day():
    apia = rule("08:00-20:00", zone="Pacific/Apia")
    skipped = utc(2011, 12, 30, 10, 0)  # the clock went from 30th 00:00 to 31st 00:00
    assert instant(date(2011, 12, 30), 8 * 60, apia.zone) == skipped
    assert [at for at, _ in changes([apia], skipped - 43200, skipped + 43200)] == [
        utc(2011, 12, 30, 6, 0), utc(2011, 12, 30, 18, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("begin", "hours"),
    [((2026, 3, 28, 19), 11), ((2026, 10, 24, 18), 13), ((2026, 6, 1, 18), 12)],
    ids=["short", "long", "usual"],
)
def test_night_rule_begins_and_ends_once_if_the_clock_changes(begin, hours):
    night = rule("20:00-08:00")
    start = utc(*begin, 0)
    assert [*changes([night], start - 3600, start + 20 * 3600)] == [
        (start, (0,)), (start + hours * 3600, ()),
    ]  # fmt: skip


def test_night_rule_that_ends_in_a_repeated_hour_ends_once():
    night = rule("20:00-02:30", days="sat")
    found = [*changes([night], utc(2026, 10, 24, 12, 0), utc(2026, 10, 26, 0, 0))]
    assert found == [(utc(2026, 10, 24, 18, 0), (0,)), (utc(2026, 10, 25, 0, 30), ())]


def test_a_rule_inside_a_skipped_hour_is_not_in_force_that_day():
    short = rule("02:15-02:45", days="sun")
    found = [at for at, rules in changes([short], utc(2026, 3, 20), utc(2026, 4, 10)) if rules]
    assert found == [utc(2026, 3, 22, 1, 15), utc(2026, 4, 5, 0, 15)]


def test_days_of_a_rule_are_the_days_on_which_it_begins():
    night = rule("20:00-08:00", days="mon-fri")
    friday = utc(2026, 11, 27, 19, 0)
    assert in_force([night], friday) == (0,)
    assert in_force([night], friday + 11 * 3600) == (0,)  # Saturday morning
    assert in_force([night], friday + 24 * 3600) == ()
    assert next_change([night], friday + 24 * 3600) == (friday + 3 * 86400, (0,))


def test_a_rule_for_all_times_never_changes():
    assert next_change([rule("00:00-24:00")], 1_790_000_000) is None
    assert next_change([], 1_790_000_000) is None


def test_adjacent_rules_change_at_the_same_time():
    both = [rule("08:00-20:00"), rule("20:00-08:00")]
    assert next_change(both, utc(2026, 11, 23, 12, 0)) == (utc(2026, 11, 23, 19, 0), (1,))
