# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

from jupyter_gpupool.cluster.messages import Key
from jupyter_gpupool.cluster.overlay import DRAINS, SILENT, keys_of, limits_of, overlay
from jupyter_gpupool.pool.model import Group, Owner, PoolSettings, Portion, Quota

RULES = PoolSettings(
    quotas={"*": Quota(leases=2), "ada": Quota(memory=8, devices=4), "root": Quota()},
    groups={"lab": Group(cap=Portion(bytes=10)), "bio": Group("lab")},
)


def test_all_that_was_not_lent_is_elsewhere():
    lent = {Key("user", "ada", "memory"): 5, Key("user", "bob", "leases"): 1}
    found = overlay(RULES, ["bob"], lambda key: lent.get(key, 0), connected=True, drains=False)
    assert found.elsewhere.get("ada") == (3, 4, 0)
    assert found.elsewhere.get("bob") == (0, 0, 1)
    assert found.elsewhere_groups == {"lab": 10}


def test_a_user_nobody_asked_for_gets_nothing_yet():
    found = overlay(RULES, [], lambda key: 0, connected=True, drains=False)
    assert found.elsewhere.get("eve") == (0, 0, 2)
    assert found.elsewhere.get("root") is None


def test_nothing_is_elsewhere_of_a_limit_that_was_lent_whole():
    found = overlay(RULES, ["bob"], lambda key: 100, connected=True, drains=False)
    assert found.elsewhere.get("bob") is None
    assert found.elsewhere_groups == {}


def test_equal_budgets_are_equal_rules():
    first, second = (
        overlay(RULES, ["bob"], lambda key: 1, connected=True, drains=False) for _ in range(2)
    )
    assert first == second
    assert first != overlay(RULES, ["bob"], lambda key: 0, connected=True, drains=False)
    assert (
        overlay(RULES, [], lambda key: 1, connected=False, drains=False).elsewhere_reason == SILENT
    )
    assert (
        overlay(RULES, [], lambda key: 0, connected=False, drains=True).elsewhere_reason == DRAINS
    )


def test_a_slice_counts_for_its_user_and_the_groups_above():
    assert keys_of(RULES, Owner("ada", "bio")) == [
        Key("user", "ada", "memory"), Key("user", "ada", "devices"), Key("group", "lab", "memory"),
    ]  # fmt: skip
    assert limits_of(RULES)["user"]["*"] == {"leases": 2}
    assert limits_of(RULES)["group"] == {"lab": {"memory": 10}}
