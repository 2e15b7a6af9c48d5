# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Groups: how they are read, which users are in them, and every way in which they can be wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traitlets.config import Config

from jupyter_gpupool.config import GPUPool, WrongConfiguration, check_config
from jupyter_gpupool.config.grouping import groups_of, read_portion
from jupyter_gpupool.config.tree import check_machine, check_sizes, written
from jupyter_gpupool.pool.groups import Daily, Group, Portion
from jupyter_gpupool.pool.model import Quota

GiB = 1 << 30


def settings(**options):
    config = Config({"GPUPool": options})
    check_config(config)
    return GPUPool(config=config).settings(host_total=64 * GiB, environ={})


def faults(**options) -> list[str]:
    with pytest.raises(WrongConfiguration) as caught:
        settings(**options)
    return [str(fault).removeprefix("c.GPUPool.") for fault in caught.value.faults]


def tree(**groups):
    return settings(groups=groups).pool.groups


# ------------------------------------------------------------------ reading


def test_every_key_of_a_group_is_read():
    found = settings(
        groups={
            "lab": {"guarantee": "60%", "weight": 3, "unix_groups": ["lab"]},
            "vision": {"parent": "lab", "guarantee": "2 devices", "cap": "400GiB",
                       "users": ["ada", "bob"], "order": 1, "gpu_seconds_per_day": "8h"},
            "rest": {"users": "*", "gpu_seconds_per_day": {"seconds": 3600, "rule": "refill",
                                                           "then": "stop", "renews": "5:30"}},
        }
    )  # fmt: skip
    assert found.pool.groups == {
        "lab": Group(guarantee=Portion(percent=60), weight=3),
        "vision": Group("lab", Portion(devices=2), cap=Portion(bytes=400 * GiB),
                        daily=Daily(8 * 3600)),
        "rest": Group(daily=Daily(3600, "refill", "stop", renews=5.5 * 3600)),
    }  # fmt: skip
    assert found.members["vision"].users == ("ada", "bob")
    assert found.members["lab"].unix_groups == ("lab",)
    assert found.members["rest"].everybody


def test_a_quota_may_have_a_daily_budget():
    quotas = settings(quotas={"*": {"gpu_seconds_per_day": "4h"}, "ada": {"leases": 1}}).pool.quotas
    assert quotas == {"*": Quota(daily=Daily(4 * 3600)), "ada": Quota(leases=1)}


@pytest.mark.parametrize(
    ("text", "portion"),
    [
        ("40%", Portion(percent=40)),
        ("12.5 %", Portion(percent=12.5)),
        ("1 device", Portion(devices=1)),
        ("0.5 devices", Portion(devices=0.5)),
        ("2 GPUs", Portion(devices=2)),
        ("24GiB", Portion(bytes=24 * GiB)),
        (GiB, Portion(bytes=GiB)),
    ],
)
def test_portion_is_a_percentage_or_a_size(text, portion):
    assert read_portion(text) == portion
    assert read_portion(written(portion).replace("GiB", " GiB")) == portion


# ------------------------------------------------------------------ membership

MEMBERS = {
    "all": {"users": "*"},
    "staff": {"unix_groups": ["staff", "lab"]},
    "thesis": {"users": ["ada"], "order": 2},
    "paper": {"users": ["ada", "bob"], "order": 1},
}


@pytest.mark.parametrize(
    ("user", "unix_groups", "found"),
    [
        ("ada", ["staff"], ("paper", "thesis", "staff", "all")),
        ("bob", [], ("paper", "all")),
        ("cyd", ["x", "lab"], ("staff", "all")),
        ("dan", ["x"], ("all",)),
    ],
)
def test_user_name_wins_over_unix_group_and_unix_group_over_star(user, unix_groups, found):
    assert groups_of(settings(groups=MEMBERS).members, user, unix_groups) == found


def test_groups_of_a_user_have_the_order_of_the_configuration():
    members = settings(groups={"b": {"unix_groups": ["x"]}, "a": {"unix_groups": ["y"]}}).members
    assert groups_of(members, "ada", ["y", "x"]) == ("b", "a")


def test_groups_of_the_hub_count_like_unix_groups():
    groups = {"all": {"users": "*"}, "u": {"unix_groups": ["x"]}, "h": {"hub_groups": ["x", "y"]}}
    members = settings(groups=groups, hub_groups=lambda _: ()).members
    assert groups_of(members, "ada", [], ["y"]) == ("h", "all")
    assert groups_of(members, "ada", ["x"], ["x"]) == ("u", "h", "all")
    assert groups_of(members, "ada", ["y"], ["z"]) == ("all",)


def test_hub_groups_without_a_source_are_refused():
    with pytest.raises(WrongConfiguration, match=r"groups\['h'\]\['hub_groups'\].* is not set"):
        settings(groups={"h": {"hub_groups": ["x"]}})
    with pytest.raises(Exception, match=r"'hub\.py' is not a function"):
        settings(hub_groups="hub.py")


def test_function_in_the_options_is_shown_by_its_name():
    def hub(user):
        return [user]

    chosen = GPUPool(hub_groups=hub).chosen()
    assert chosen == {
        "hub_groups": "function test_function_in_the_options_is_shown_by_its_name.<locals>.hub"
    }


def test_nobody_is_in_a_group_of_a_pool_without_groups():
    assert groups_of({}, "ada", ["staff"]) == ()


# ------------------------------------------------------------------ refused values


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (5, ("groups['g']: The value of the group 'g' is 5, not a dict. Write a dict such as "
         "{'guarantee': '40%', 'users': ['ada']}.")),
        ({"guarentee": "4%"}, ("groups['g']['guarentee']: A group has no 'guarentee'. Did you mean "
         "'guarantee'? Allowed are 'parent', 'users', 'unix_groups', 'hub_groups', 'order', "
          "'guarantee', "
         "'weight', 'cap' or 'gpu_seconds_per_day'.")),
        ({"guarantee": "lots"}, ("groups['g']['guarantee']: 'lots' is not a part of the pool. "
         "Write '40%' of the pool's memory, '2 devices', or a size like '24GiB'.")),
        ({"guarantee": "140%"}, ("groups['g']['guarantee']: '140%' must be above 0% and at most "
         "100%. Write '40%' of the pool's memory, '2 devices', or a size like '24GiB'.")),
        ({"cap": "0 devices"}, ("groups['g']['cap']: '0 devices' is not above zero. Write '40%' of "
         "the pool's memory, '2 devices', or a size like '24GiB'.")),
        ({"cap": 0.5}, ("groups['g']['cap']: 0.5 is not a part of the pool. Write '40%' of the "
         "pool's memory, '2 devices', or a size like '24GiB'.")),
        ({"guarantee": 40}, ("groups['g']['guarantee']: 40 means 40 bytes. Write '40%' of the "
         "pool's memory, '2 devices', or a size like '24GiB'.")),
        ({"weight": 0}, ("groups['g']['weight']: The weight is 0. Write a number above zero; of "
         "what is left over, a group with weight 2 gets twice as much as a group with weight 1.")),
        ({"weight": "3"}, "groups['g']['weight']: '3' is not a number."),
        ({"weight": float("nan")}, "groups['g']['weight']: nan is not a number."),
        ({"users": "ada"}, ("groups['g']['users']: 'ada' is not a list of names. Write ['ada', "
         "'bob'], or '*' for everybody.")),
        ({"users": ["ada", "*"]}, ("groups['g']['users']: '*' is in a list of names. For "
         "everybody, write '*' without a list.")),
        ({"users": ["ada", "ada"]}, "groups['g']['users']: 'ada' is listed twice."),
        ({"users": ["@staff"]}, ("groups['g']['users']: '@staff' begins with '@'. Write Unix "
         "groups in 'unix_groups'.")),
        ({"unix_groups": [5]}, ("groups['g']['unix_groups']: 5 is not the name of a Unix group. "
         "Write ['research'].")),
        ({"order": "first"}, "groups['g']['order']: 'first' is not a number."),
        ({"parent": 5}, "groups['g']['parent']: 5 is not the name of a group."),
        ({"parent": "h"}, ("groups['g']['parent']: There is no group 'h'. Without a parent a group "
         "is directly in the pool.")),
        ({"parent": "g"}, ("groups['g']['parent']: The group is its own parent. Write another "
         "parent, or remove it.")),
        ({"gpu_seconds_per_day": "much"}, ("groups['g']['gpu_seconds_per_day']: 'much' is not a "
         "duration. Write one like 90s, 10m or 2h.")),
        ({"gpu_seconds_per_day": {"seconds": "8h", "then": "kill"}},
         ("groups['g']['gpu_seconds_per_day']['then']: 'kill' is not allowed. Allowed are "
         "'borrow', 'refuse' or 'stop'.")),
        ({"gpu_seconds_per_day": {"rule": "windw", "seconds": 5}},
         ("groups['g']['gpu_seconds_per_day']['rule']: 'windw' is not allowed. Did you mean "
         "'window'? Allowed are 'window' or 'refill'.")),
        ({"gpu_seconds_per_day": {"renews": "24:00", "seconds": 5}},
         ("groups['g']['gpu_seconds_per_day']['renews']: '24:00' is not a time of the day in UTC. "
          "Write text such as '05:00'.")),
        ({"gpu_seconds_per_day": {"secs": 5}},
         [("groups['g']['gpu_seconds_per_day']['secs']: A daily budget has no 'secs'. Did you mean "
          "'seconds'? Allowed are 'seconds', 'rule', 'renews' or 'then'."),
          ("groups['g']['gpu_seconds_per_day']: The daily budget has no 'seconds'. Write "
          "{'seconds': '8h'}.")]),
        ({"guarantee": "50%", "cap": "40%"}, ("groups['g']['cap']: The cap 40% is below the "
         "guarantee 50%. Raise the cap or lower the guarantee.")),
    ],
)  # fmt: skip
def test_wrong_group_is_refused(group, message):
    assert faults(groups={"g": group}) == ([message] if isinstance(message, str) else message)


@pytest.mark.parametrize("name", ["", " a", "a b", "x" * 70, "-", 5])
def test_invalid_group_name_is_refused(name):
    (found,) = faults(groups={name: {}})
    assert f"{name!r} is not a name for a group." in found


def test_several_mistakes_are_found_at_once():
    found = faults(
        groups={"a": {"weight": -1, "cap": "x"}, "b": {"user": ["ada"]}},
        quotas={"ada": {"memory": "lots", "lease": 1}},
        idle_timeout="soon",
    )
    assert [text.partition(":")[0] for text in found] == [
        "groups['a']['weight']", "groups['a']['cap']", "groups['b']['user']",
        "quotas['ada']['memory']", "quotas['ada']['lease']", "idle_timeout",
    ]  # fmt: skip


def test_circle_of_parents_is_refused():
    found = faults(groups={"a": {"parent": "c"}, "b": {"parent": "a"}, "c": {"parent": "b"},
                           "d": {"parent": "a"}})  # fmt: skip
    assert found == [
        (
            "groups['a']['parent']: The parents form a circle: a is in c, c is in b, b is in "
            "a. Remove one of these parents."
        )
    ]


def test_misspelt_parent_is_refused_with_the_nearest_name():
    (found,) = faults(groups={"research": {}, "vision": {"parent": "reserch"}})
    assert "Did you mean 'research'?" in found


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"users": ["ada"]}, {"users": ["ada", "bob"]}, "groups['b']['users']: The user 'ada' is"),
        ({"users": "*"}, {"users": "*"}, "groups['b']['users']: Everybody ('*') is"),
        ({"unix_groups": ["x"]}, {"unix_groups": ["x"]},
         "groups['b']['unix_groups']: The Unix group 'x' is"),
    ],
)  # fmt: skip
def test_two_groups_that_list_the_same_member_need_an_order(first, second, message):
    (found,) = faults(groups={"a": first, "b": second})
    assert found == (
        f"{message} in the groups 'a' and 'b', and nothing says which group counts. Set a lower "
        "'order', such as 1, for the group that counts; a session can choose the other group."
    )
    settings(groups={"a": {**first, "order": 1}, "b": second})
    assert faults(groups={"a": {**first, "order": 1}, "b": {**second, "order": 1}})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"a": {"guarantee": "60%"}, "b": {"guarantee": "50%"}},
            ("groups['b']['guarantee']: The guarantees of 'a' (60%), 'b' (50%) add up to 110%, but "
            "the whole pool is 100%. Lower these guarantees."),
        ),
        (
            {"a": {"guarantee": "2 devices"}, "b": {"parent": "a", "guarantee": "3 devices"}},
            ("groups['b']['guarantee']: 'b' is guaranteed 3 devices, but the guarantee of the "
            "parent group 'a' is 2 devices. Lower these guarantees or raise the guarantee of 'a'."),
        ),
        (
            {"a": {"cap": "24GiB"}, "b": {"parent": "a", "guarantee": "16GiB"},
             "c": {"parent": "a", "guarantee": "16GiB"}},
            ("groups['c']['guarantee']: The guarantees of 'b' (16 GiB), 'c' (16 GiB) add up to "
            "32 GiB, but the cap of the parent group 'a' is 24 GiB. Lower these guarantees or "
            "raise the cap of 'a'."),
        ),
        (
            {"a": {"cap": "20%"}, "b": {"parent": "a"}, "c": {"parent": "b", "guarantee": "30%"}},
            ("groups['c']['guarantee']: The guarantee 30% cannot be reached: this group is inside "
            "'a', and the cap of 'a' is 20%. Lower this guarantee or raise the cap of 'a'."),
        ),
        (
            {"a": {"cap": "20%"}, "b": {"parent": "a"}, "c": {"parent": "b", "cap": "30%"}},
            ("groups['c']['cap']: The cap 30% cannot be reached: this group is inside 'a', and the "
            "cap of 'a' is 20%. Lower this cap or raise the cap of 'a'."),
        ),
    ],
)  # fmt: skip
def test_guarantees_that_no_machine_can_keep_are_refused(groups, message):
    assert faults(groups=groups) == [message]


def test_inner_guarantees_count_if_the_outer_group_has_none():
    (found,) = faults(
        groups={
            "a": {}, "a1": {"parent": "a", "guarantee": "40%"},
            "a2": {"parent": "a", "guarantee": "40%"}, "b": {"guarantee": "30%"},
        }
    )  # fmt: skip
    assert "The guarantees of 'a' (80%), 'b' (30%) add up to 110%, but" in found


def test_cluster_machine_does_not_check_cluster_wide_sizes():
    groups = tree(
        a={"guarantee": "3 devices"}, b={"cap": "900GiB", "guarantee": "800GiB"},
    )  # fmt: skip

    def faults(*nodes):
        settings = SimpleNamespace(pool=SimpleNamespace(groups=groups), cluster_nodes=nodes)
        return [str(fault) for fault in check_machine(settings, [80 << 30] * 2)]

    assert len(faults()) == 2
    (fault,) = faults("m0", "m1")
    assert "'a' is guaranteed 240 GiB" in fault


def machine_faults(capacities, **groups):
    return [str(fault) for fault in check_sizes(tree(**groups), capacities)]


def test_guarantees_are_compared_with_the_machines_memory():
    two = [80 * GiB, 80 * GiB]
    groups = {"a": {"guarantee": "1 device"}, "b": {"guarantee": "100GiB"}}
    assert machine_faults([80 * GiB] * 3, **groups) == []
    assert machine_faults(two, **groups) == [
        (
            "c.GPUPool.groups['b']['guarantee']: The guarantees of 'a' (80 GiB), 'b' (100 GiB) add "
            "up to 180 GiB, but the GPUs of this machine have 160 GiB. Lower these guarantees."
        )
    ]


def test_cap_above_the_machines_memory_is_found():
    (found,) = machine_faults([80 * GiB], a={"cap": "4 devices"})
    assert found == (
        "c.GPUPool.groups['a']['cap']: The cap 4 devices (320 GiB) cannot be reached: the GPUs of "
        "this machine have 80 GiB. Lower the cap, or remove it."
    )


def test_cap_and_guarantee_in_different_units_are_compared():
    groups = {"a": {"guarantee": "50%", "cap": "30GiB"}}
    assert machine_faults([40 * GiB], **groups) == []
    assert machine_faults([80 * GiB], **groups) == [
        (
            "c.GPUPool.groups['a']['cap']: The cap 30 GiB is below the guarantee 50% (40 GiB). "
            "Raise the cap or lower the guarantee."
        )
    ]


@given(
    parts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1 << 20, 1 << 40), min_size=1, max_size=16),
)
def test_percentages_are_refused_only_above_100(parts, sizes):
    groups = {f"g{n}": {"guarantee": f"{part}%"} for n, part in enumerate(parts)}
    if sum(parts) > 100:
        assert len(faults(groups=groups)) == 1
    else:
        assert machine_faults(sizes, **groups) == []
