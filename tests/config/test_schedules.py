# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Schedules: how they are read, what they change and when, and which mistakes are refused."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from zoneinfo import TZPATH, ZoneInfo

import pytest
from traitlets.config import Config

from jupyter_gpupool.config import WrongConfiguration, load_timetable, loading
from jupyter_gpupool.config.schedules import machine_zone, read_schedules
from jupyter_gpupool.config.tree import check_sizes

GiB = 1 << 30

#: 12:00 and 21:00 of a Monday in winter, in Berlin.
NOON, EVENING = (datetime(2026, 11, 23, hour, tzinfo=timezone.utc).timestamp() for hour in (11, 20))

NIGHT = {"name": "night", "hours": "20:00-08:00", "time_zone": "Europe/Berlin"}
WEEKEND = {"name": "weekend", "days": "sat, sun", "time_zone": "Europe/Berlin"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The only folder in which Jupyter looks for configuration files."""
    monkeypatch.setattr(loading, "jupyter_config_path", lambda: [str(tmp_path)])
    monkeypatch.delenv("GPUPOOL_EMULATE", raising=False)
    return tmp_path


def timetable(**options):
    return load_timetable(overrides=Config({"GPUPool": options}), now=NOON)


def faults(**options) -> list[str]:
    with pytest.raises(WrongConfiguration) as caught:
        timetable(**options)
    texts = (str(fault).removeprefix("c.GPUPool.schedules") for fault in caught.value.faults)
    return [text.replace(" in the command line", "") for text in texts]


def night(**values):
    return [{**NIGHT, "set": values}]


# ------------------------------------------------------------------ changes by a schedule


def test_class_is_closed_until_a_schedule_opens_it():
    times = timetable(
        classes_allowed=["notebook"],
        schedules=[
            {**NIGHT, "set": {"classes_allowed": ["notebook", "interactive"]}},
            {**WEEKEND, "set": {"classes_allowed": None}},
        ],
    )
    night, saturday = (
        datetime(2026, 11, day, hour, tzinfo=timezone.utc).timestamp()
        for day, hour in ((23, 19), (27, 23))
    )
    assert times.classes_open(NOON) == {"interactive": night, "batch": saturday}
    assert times.classes_open(EVENING) == {"batch": saturday}
    assert times.classes_open(saturday) == {}
    assert timetable(classes_allowed=[]).classes_open(NOON) == {}
    assert timetable(schedules=night_closes()).classes_open(NOON) == {}


def night_closes():
    return [{**NIGHT, "set": {"classes_allowed": ["notebook"]}}]


def test_schedule_changes_only_the_options_that_it_sets():
    times = timetable(idle_timeout=60, linger=7, schedules=night(idle_timeout="1h", attach="cell"))
    day, dark = times.under(times.rules(NOON)), times.under(times.rules(EVENING))
    assert (day.pool.idle_timeout, day.attach, day.linger) == (60, "lazy", 7)
    assert (dark.pool.idle_timeout, dark.attach, dark.linger) == (3600, "cell", 7)
    assert times.base.pool.idle_timeout == 60
    assert dark.options == day.options == times.base.options
    assert times.next_change(NOON) == (NOON + 8 * 3600, (0,))
    assert times.names((0,)) == ("night",)


def test_dicts_are_merged_key_by_key():
    times = timetable(
        quotas={"*": {"memory": "8GiB", "leases": 1}, "ada": {"leases": 3}},
        groups={"a": {"guarantee": "40%", "users": ["ada"]}, "b": {"cap": "50%", "weight": 2}},
        schedules=night(
            quotas={"*": {"memory": "80GiB"}, "bob": {"leases": 9}},
            groups={"b": {"cap": None, "weight": 5}},
        ),
    )
    pool = times.under((0,)).pool
    assert (pool.quotas["*"].memory, pool.quotas["*"].leases) == (80 * GiB, 1)
    assert (pool.quotas["ada"].leases, pool.quotas["bob"].leases) == (3, 9)
    assert (pool.groups["b"].cap, pool.groups["b"].weight) == (None, 5)
    assert pool.groups["a"] == times.base.pool.groups["a"]
    assert times.under((0,)).members == times.base.members


def test_later_of_two_rules_in_force_wins():
    rules = [
        {**NIGHT, "set": {"idle_timeout": 1, "max_wait": 1}},
        {**WEEKEND, "set": {"idle_timeout": 2}},
    ]
    times = timetable(schedules=rules)
    saturday_evening = EVENING + 5 * 86400
    assert times.rules(saturday_evening) == (0, 1)
    pool = times.under((0, 1)).pool
    assert (pool.idle_timeout, pool.max_wait) == (2, 1)


def test_warning_names_a_schedule_that_never_has_effect():
    week = {"name": "week", "time_zone": "Europe/Berlin", "set": {"idle_timeout": 2}}
    night_ = {**NIGHT, "set": {"idle_timeout": 1, "linger": 5}}
    (told,) = timetable(schedules=[night_, week]).overruled(NOON)
    assert told == (
        "The schedule 'night' sets idle_timeout without effect: whenever this schedule is in "
        "force, 'week' also sets it, and the last of such schedules in the list wins. Put 'night' "
        "after 'week', or remove idle_timeout from 'week'."
    )
    assert timetable(schedules=[week, night_]).overruled(NOON) == []
    weekend = {**WEEKEND, "set": {"idle_timeout": 2}}
    assert timetable(schedules=[night_, weekend]).overruled(NOON) == [], "on other nights it counts"


def test_values_of_a_dict_are_overruled_one_by_one():
    groups = {"a": {"users": ["ada"]}, "b": {"users": ["bob"]}}
    first = {**NIGHT, "set": {"groups": {"a": {"weight": 2}, "b": {"weight": 3}}}}
    second = {"name": "week", "time_zone": "Europe/Berlin"}
    (told,) = timetable(
        groups=groups, schedules=[first, {**second, "set": {"groups": {"a": {"weight": 4}}}}]
    ).overruled(NOON)
    assert "sets groups['a']['weight'] without effect" in told
    other = {**second, "set": {"groups": {"a": {"cap": "50%"}}}}
    assert timetable(groups=groups, schedules=[first, other]).overruled(NOON) == []


def test_schedule_changes_values_of_another_file_too(folder):
    (folder / "jupyter_config.py").write_text("c.GPUPool.quotas.update({'ada': {'leases': 1}})")
    (folder / "jupyter_server_config.py").write_text(
        "c.GPUPool.quotas.update({'bob': {'leases': 2}})\n"
        f"c.GPUPool.schedules.append({night(quotas={'ada': {'leases': 5}})[0]!r})"
    )
    times = load_timetable(now=NOON)
    leases = {name: quota.leases for name, quota in times.under((0,)).pool.quotas.items()}
    assert leases == {"ada": 5, "bob": 2}


def test_only_schedules_in_force_together_are_combined():
    day = {"name": "day", "hours": "08:00-20:00", "time_zone": "Europe/Berlin"}
    set_ = {"set": {"linger": 1}}
    times = timetable(schedules=[{**NIGHT, **set_}, {**day, **set_}, {**WEEKEND, **set_}])
    assert sorted(times.combinations(NOON)) == [(0,), (0, 2), (1,), (1, 2)]


# ------------------------------------------------------------------ the machine's own zone


def test_schedule_without_a_zone_uses_the_machines_zone(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    (one,) = read_schedules([{"name": "n", "hours": "20:00-08:00", "set": {"linger": 1}}])
    assert (one.zone, one.rule.zone) == ("Asia/Kolkata", ZoneInfo("Asia/Kolkata"))
    assert one.rule.is_in_force(datetime(2026, 11, 23, 14, 30, tzinfo=timezone.utc).timestamp())
    assert not one.rule.is_in_force(datetime(2026, 11, 23, 14, 29, tzinfo=timezone.utc).timestamp())


def test_machines_zone_comes_from_etc_localtime(monkeypatch, tmp_path):
    from jupyter_gpupool.config import schedules

    monkeypatch.delenv("TZ", raising=False)
    link = tmp_path / "localtime"
    monkeypatch.setattr(schedules, "LOCALTIME", link)
    assert machine_zone() == (timezone.utc, "UTC")
    link.symlink_to("/usr/share/zoneinfo/Europe/Berlin")
    assert machine_zone()[1] == "Europe/Berlin"
    tokyo = next(p for p in (Path(top, "Asia/Tokyo") for top in TZPATH) if p.exists())
    link.unlink()
    link.write_bytes(tokyo.read_bytes())
    zone, name = machine_zone()
    assert name == "this machine's"
    assert datetime(2026, 1, 1, tzinfo=zone).utcoffset().total_seconds() == 9 * 3600


# ------------------------------------------------------------------ refused values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"days": "mon-fry"}, ("[0]['days']: 'fry' is not a day. Did you mean 'friday'? Write "
         "'mon', 'tue', 'wed', 'thu', 'fri', 'sat' or 'sun'.")),
        ({"days": []}, ("[0]['days']: [] is not a list of days. Write text such as 'mon-fri' or "
         "'mon, wed, sat-sun'.")),
        ({"hours": "8pm"}, ("[0]['hours']: '8pm' is not a span of hours. Write text such as "
         "'20:00-08:00' or '08:00-12:00, 13:00-18:00'.")),
        ({"hours": "25:00-08:00"}, ("[0]['hours']: '25:00-08:00' has a time outside the day. "
         "Write times from '00:00' to '24:00'.")),
        ({"hours": "08:00-08:00"}, ("[0]['hours']: '08:00-08:00' begins and ends at the same time. "
         "Write '00:00-24:00' for the whole day.")),
        ({"time_zone": "Europe/Berln"}, ("[0]['time_zone']: There is no time zone 'Europe/Berln'. "
         "Did you mean 'Europe/Berlin'? Write a name such as 'Europe/Berlin' or 'UTC'.")),
        ({"time_zone": "../x"}, ("[0]['time_zone']: There is no time zone '../x'. Write a name "
         "such as 'Europe/Berlin' or 'UTC'.")),
        ({"hour": "1"}, ("[0]['hour']: A schedule has no 'hour'. Did you mean 'hours'? Allowed are "
         "'name', 'days', 'hours', 'time_zone' or 'set'.")),
        ({"set": {}}, ("[0]['set']: {} sets nothing. Write a dict of options, such as "
         "{'idle_timeout': '1h'}.")),
        ({"set": {"idle_timout": 1}}, ("[0]['set']['idle_timout']: There is no option "
         "'idle_timout'. Did you mean 'idle_timeout'?")),
        ({"set": {"devices": [0]}}, ("[0]['set']['devices']: A change of 'devices' takes effect "
         "only when the broker starts. Remove 'devices' from the schedule.")),
        ({"set": {"schedules": []}}, ("[0]['set']['schedules']: A schedule cannot set 'schedules'. "
         "Remove 'schedules' from the schedule.")),
        ({"set": {"groups": {"b": {"cap": "4%"}}}}, ("[0]['set']['groups']['b']: There is no group "
         "'b'. If the group is new, add it to c.GPUPool.groups.")),
        ({"set": {"groups": {"a": {"users": []}}}}, ("[0]['set']['groups']['a']['users']: A "
         "schedule cannot set 'users' of a group. A schedule can set 'guarantee', 'weight', 'cap' "
         "or 'gpu_seconds_per_day'.")),
        ({"set": {"idle_timeout": "soon"}}, ("[0]['set']['idle_timeout']: With 'night' in force: "
         "c.GPUPool.idle_timeout: 'soon' is not a duration. Write one like 90s, 10m or 2h. "
         "Example: c.GPUPool.idle_timeout = 600")),
        ({"set": {"default_priority": "x"}}, ("[0]['set']['default_priority']: With 'night' in "
         "force: c.GPUPool.default_priority: 'x' is not a priority class. "
         "Allowed are 'interactive', "
         "'notebook' or 'batch'.")),
        ({"set": {"groups": {"a": {"guarantee": "90%"}}}}, ("[0]['set']['groups']['a']: "
         "With 'night' in force: The cap 60% is below the guarantee 90%. Raise the "
         "cap or lower the guarantee.")),
    ],
)  # fmt: skip
def test_wrong_schedule_is_refused(change, message):
    groups = {"a": {"guarantee": "40%", "cap": "60%"}}
    base = {**NIGHT, "set": {"idle_timeout": 60}}
    assert faults(groups=groups, schedules=[{**base, **change}]) == [message]


def test_schedule_without_a_required_key_is_refused():
    found = faults(schedules=[{}, 5, {**NIGHT, "set": {"linger": 1}}, {**NIGHT, "set": {}}])
    assert [text.partition(".")[0] for text in found] == [
        "[0]: The schedule has no 'name'", "[0]: The schedule has no 'set'",
        "[1]: 5 is not a schedule", "[3]['set']: {} sets nothing",
    ]  # fmt: skip


def test_two_schedules_of_one_name_are_refused():
    rule = {**NIGHT, "set": {"linger": 1}}
    (found,) = faults(schedules=[rule, rule])
    assert found == (
        "[1]['name']: Another schedule has the name 'night'. Give each schedule its own name."
    )


def test_contradicting_rules_are_refused_before_they_apply():
    groups = {"a": {"guarantee": "40%"}, "b": {"guarantee": "40%"}}
    rules = [
        {**NIGHT, "set": {"groups": {"a": {"guarantee": "60%"}}}},
        {**WEEKEND, "set": {"groups": {"b": {"guarantee": "60%"}}}},
    ]
    (found,) = faults(groups=groups, schedules=rules)
    assert found == (
        "[1]['set']['groups']['b']['guarantee']: With 'night' and 'weekend' in force: The "
        "guarantees of 'a' (60%), 'b' (60%) add up to 120%, but the whole pool is 100%. Lower "
        "these guarantees."
    )


def test_mistake_that_recurs_every_night_is_reported_once():
    rules = [
        {**NIGHT, "set": {"idle_timeout": "soon"}},
        {**WEEKEND, "set": {"linger": 1}},
    ]
    assert len(faults(schedules=rules)) == 1


def test_guarantee_that_is_too_large_only_at_night_is_found():
    groups = {"a": {"guarantee": "1 device"}}
    times = timetable(groups=groups, schedules=night(groups={"a": {"guarantee": "3 devices"}}))
    found = times.faults(NOON, lambda one: check_sizes(one.pool.groups, [GiB, GiB]))
    assert [str(fault) for fault in found] == [
        (
            "c.GPUPool.schedules[0]['set']['groups']['a']['guarantee'] in the command line: With "
            "'night' in force: 'a' is guaranteed 3 GiB, but the GPUs of this machine have 2 GiB. "
            "Lower these guarantees."
        )
    ]
    assert times.faults(NOON, lambda one: check_sizes(one.pool.groups, [GiB] * 3)) == []


# ------------------------------------------------------------------ the line of a mistake

FILE = """\
c = get_config()
GROUPS = {
    "a": {"guarantee": "40%"},
    "b": {
        "users": ["ada"],
        "guarantee": "4O%",
    },
}
c.GPUPool.groups = GROUPS
c.GPUPool.linger = 1
c.GPUPool.schedules = [
    {"name": "night", "hours": "20:00-08:00",
     "set": {
         "idle_timeout": "soon",
     }},
]
"""


def test_mistake_is_reported_with_its_line(folder):
    path = folder / "jupyter_server_config.py"
    path.write_text(FILE)
    (found,) = faults()
    assert found.startswith(f"c.GPUPool.groups['b']['guarantee'] in {path}, line 6: '4O%' is no")
    path.write_text(FILE.replace("4O%", "40%"))
    (found,) = faults()
    assert found.startswith(f"[0]['set']['idle_timeout'] in {path}, line 14: With 'night' in force")


def test_mistake_in_json_is_reported_with_its_line(folder):
    path = folder / "jupyter_server_config.json"
    path.write_text('{"GPUPool": {\n"guard": true,\n"quotas": {\n"ada": {"memory": "1"}}}}')
    (found,) = faults()
    assert found.startswith(f"c.GPUPool.quotas['ada']['memory'] in {path}, line 4: '1' has no unit")


def test_mistake_is_reported_with_its_file(folder):
    low, high = folder / "jupyter_config.py", folder / "jupyter_server_config.py"
    low.write_text("\n\nc.GPUPool.groups.update({'a': {'guarantee': '60%'}})")
    high.write_text("\nc.GPUPool.groups.update({'b': {\n'guarantee': '60%'}})")
    (found,) = faults()
    where = f"c.GPUPool.groups['b']['guarantee'] in {high}, line 3: "
    assert found.startswith(where + "The guarantees of 'a' (60%), 'b'")


def test_first_mistakes_are_listed_and_the_others_are_counted(folder):
    path = folder / "jupyter_server_config.py"
    path.write_text("\n".join(f"c.GPUPool.nothing{n} = 1" for n in range(10)))
    with pytest.raises(WrongConfiguration) as caught:
        load_timetable()
    text = str(caught.value).splitlines()
    assert text[0] == "The configuration has 10 mistakes."
    assert text[1].startswith(f"- c.GPUPool.nothing0 in {path}, line 1: there is no such option.")
    assert text[-1] == "- 2 more: `jupyter gpupool check-config` lists them."
