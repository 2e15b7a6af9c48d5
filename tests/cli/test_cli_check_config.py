# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``check-config`` shows group sizes in bytes, all mistakes, and differences from the broker."""

from __future__ import annotations

import json
import os
import pwd

import pytest
from snapshots import GiB, device, pool

from jupyter_gpupool.cli import check_config, main
from jupyter_gpupool.config import load_settings
from jupyter_gpupool.config.differences import shown

ME = pwd.getpwuid(os.getuid()).pw_name

CONFIG = f"""\
c.GPUPool.groups = {{
    "research": {{"guarantee": "60%", "weight": 3}},
    "vision": {{"parent": "research", "guarantee": "2 devices", "users": [{ME!r}]}},
    "students": {{"users": "*", "cap": "50%", "gpu_seconds_per_day": "8h"}},
}}
c.GPUPool.schedules = [
    {{"name": "night", "hours": "20:00-08:00", "time_zone": "Europe/Berlin",
     "set": {{"idle_timeout": "1h", "groups": {{"students": {{"cap": "90%"}}}}}}}},
]
"""

NOON, EVENING = "2026-11-23T12:00+01:00", "2026-11-23T22:00+01:00"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with two GPUs. Its users are all in its own files, not in a directory service."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(check_config, "knows_everybody", lambda: True)
    two = [{"memory_capacity": 80 * GiB}] * 2
    monkeypatch.setattr("jupyter_gpupool.cli.doctor.probe", lambda _: (two, "", "", ""))


@pytest.fixture
def config(no_configuration):
    path = no_configuration / "jupyter_server_config.py"
    path.write_text(CONFIG)
    return path


def report(capsys, *arguments):
    code = main(["check-config", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["ok"] else 1)
    return found


def text(capsys, *arguments):
    main(["check-config", *arguments])
    found = capsys.readouterr().out
    assert max(map(len, found.splitlines())) <= 80 or "/" in max(found.splitlines(), key=len)
    return found


def test_tree_shows_the_bytes_of_each_group_on_the_given_gpus(config, capsys):
    found = text(capsys, "--devices", "16x80GiB", "--at", NOON)
    assert (
        found
        == f"""\
Read: {config}
GPUs: 16 GPUs as given by --devices, 1.3 TiB for kernels

GROUP     GUARANTEE  CAP      WEIGHT    GPU TIME PER DAY
research  768 GiB    -        3 (75%)   -
  vision  160 GiB    -        1 (100%)  -
students  -          640 GiB  1 (25%)   8 h, then borrow
Guaranteed: 768 GiB. Shared by weight: 512 GiB and unused guaranteed memory.

MEMBERS
  vision: {ME}
  students: everybody else

SCHEDULES
  night: 20:00-08:00 Europe/Berlin; begins Mon 23 Nov 2026 20:00
    idle_timeout = '1h'
    groups['students']['cap'] = '90%'
Next change: Mon 23 Nov 2026 20:00 Europe/Berlin, then night.

The configuration is good: 3 groups, 1 schedule.
"""
    )


def test_report_says_that_cluster_sizes_are_for_all_machines(config, capsys):
    sizes = CONFIG.replace("90%", "900GiB").replace("50%", "640GiB")
    config.write_text(sizes + 'c.GPUPool.cluster_nodes = ["gpu1", "gpu2"]\n')
    found = text(capsys, "--devices", "16x80GiB", "--at", NOON)
    assert "Guaranteed:" not in found  # these are the GPUs of one machine
    assert (
        """\
CLUSTER OF 2
  gpu1, gpu2: caps, GPU time, and guarantees that are sizes are for all machines
    together. Guarantees in per cent or devices are for each machine.
"""
        in found
    )
    assert report(capsys, "--devices", "16x80GiB")["cluster_nodes"] == ["gpu1", "gpu2"]


def test_tree_shows_the_groups_at_a_given_time(config, capsys):
    found = text(capsys, "--devices", "16x80GiB", "--at", EVENING)
    assert "With night in force:\nGROUP" in found
    assert "students  -          1.1 TiB  1 (25%)   8 h, then borrow" in found
    assert "in force until Tue 24 Nov 2026 08:00" in found
    assert "Next change: Tue 24 Nov 2026 08:00 Europe/Berlin, then no schedule." in found


def test_guarantee_above_the_machines_memory_is_a_mistake(config, capsys):
    assert (
        text(capsys)
        == f"""\
c.GPUPool.groups['vision']['guarantee']
  {config}, line 3
  'vision' is guaranteed 160 GiB, but the guarantee of the parent group
  'research' is 96 GiB. Lower these guarantees or raise the guarantee of
  'research'.

The configuration has 1 mistake.
"""
    )


def test_all_mistakes_are_listed_with_line_and_option(config, capsys):
    config.write_text(CONFIG.replace("60%", "6O%").replace('"cap"', '"cup"') + "\nc.GPUPool.x = 1")
    found = report(capsys)
    assert [(fault["line"], fault["place"].partition(" ")[0]) for fault in found["faults"]] == [
        (2, "c.GPUPool.groups['research']['guarantee']"),
        (4, "c.GPUPool.groups['students']['cup']"),
        (11, "c.GPUPool.x"),
    ]
    assert {fault["origin"] for fault in found["faults"]} == {str(config)}
    assert text(capsys).endswith("\nThe configuration has 3 mistakes.\n")


def test_a_file_may_be_checked_before_it_is_installed(config, tmp_path, capsys):
    new = tmp_path / "new.py"
    new.write_text("c.GPUPool.idle_timeout = 'soon'")
    assert report(capsys, str(new))["faults"][0]["origin"] == str(new)
    new.write_text("c.GPUPool.idle_timeout = 5")
    assert report(capsys, "--devices", "16x80GiB", str(new))["files"] == [str(config), str(new)]
    alone = report(capsys, str(new), "--alone")
    assert (alone["files"], alone["groups"]) == ([str(new)], [])
    assert "No groups: all users share the pool equally." in text(capsys, str(new), "--alone")
    (fault,) = report(capsys, str(tmp_path / "none.py"))["faults"]
    assert fault["message"] == f"There is no configuration file {tmp_path / 'none.py'}."


def test_unknown_user_is_a_mistake_if_all_users_are_known(config, capsys, monkeypatch):
    config.write_text(f"c.GPUPool.groups = {{'a': {{'users': [{ME[:-1] + 'xx'!r}]}}}}")
    (fault,) = report(capsys)["faults"]
    assert fault["message"] == f"This machine has no user {ME[:-1] + 'xx'!r}."
    monkeypatch.setattr(check_config, "knows_everybody", lambda: False)
    found = report(capsys)
    assert found["ok"]
    assert "The name may exist in a directory service" in found["warnings"][0]
    assert report(capsys, "--devices", "1x80GiB")["ok"]


def test_machine_without_gpus_gets_no_sizes_in_bytes(config, capsys, monkeypatch):
    monkeypatch.setattr("jupyter_gpupool.cli.doctor.probe", lambda _: ([], "none", "", ""))
    found = text(capsys)
    assert "GPUs: none" in found
    assert "research  60%        -    3 (75%)   -" in found
    assert "Name the GPUs of the real machine: --devices 16x80GiB." in " ".join(found.split())
    assert found.endswith("The configuration is good: 3 groups, 1 schedule, 1 warning.\n")


def test_empty_group_gets_a_warning(config, capsys):
    config.write_text("c.GPUPool.groups = {'a': {}, 'b': {'parent': 'a', 'unix_groups': ['root']}}")
    assert report(capsys)["warnings"] == []
    config.write_text("c.GPUPool.groups = {'a': {}}")
    assert report(capsys)["warnings"] == [
        "The group 'a' contains no users and no groups, so nobody can use it."
    ]


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ("classes_allowed = ['batch']", "kernels that ask for no class get no slice"),
        ("quotas = {'*': {'memory': '2GiB'}}", "The quota of '*' is 2 GiB of memory, and"),
        ("groups = {'g': {'users': '*', 'cap': '2GiB'}}", "The cap of the group 'g' is 2 GiB, and"),
        (
            "groups = {'g': {'users': '*', 'gpu_seconds_per_day': '49h'}}",
            (
                "The group 'g' can never use all of its gpu_seconds_per_day: all GPUs together "
                "provide 48 h of GPU time in a day."
            ),
        ),
        (
            "quotas = {}; c.GPUPool.groups = {'g': {'users': '*', 'gpu_seconds_per_day': REFILL}}",
            "The budget of the group 'g' refills all the time, so its 'renews' has no effect.",
        ),
        (
            "quotas = {'ada': {'gpu_seconds_per_day': '49h'}}",
            (
                "The user 'ada' can never use all of its gpu_seconds_per_day: all GPUs together "
                "provide 48 h of GPU time in a day."
            ),
        ),
        (
            "quotas = {'*': {'gpu_seconds_per_day': REFILL}}",
            "The budget of the user '*' refills all the time, so its 'renews' has no effect.",
        ),
        (
            "quotas = {'*': {'gpu_seconds_per_day': {'seconds': 0, 'then': 'refuse'}}}",
            "kernels with this budget never get a slice.",
        ),
        (
            "default_memory = '100GiB'",
            "the largest GPU has 80 GiB: kernels that ask for no size get a whole GPU.",
        ),
    ],
)
def test_probable_mistake_in_an_option_gets_a_warning(no_configuration, capsys, options, warning):
    """Earlier versions of the check accepted each of these configurations without a warning."""
    path = no_configuration / "jupyter_server_config.py"
    refill = "REFILL = {'seconds': '1h', 'rule': 'refill', 'renews': '05:00'}"
    path.write_text(f"{refill}\nc.GPUPool.{options}\n")
    assert warning in " ".join(report(capsys)["warnings"])
    path.write_text("")
    assert report(capsys)["warnings"] == []


def test_check_compares_the_quota_with_the_reduced_default_size(no_configuration, capsys):
    path = no_configuration / "jupyter_server_config.py"
    quota = "{'*': {'memory': '%s'}}"
    path.write_text(f"c.GPUPool.default_memory = '100GiB'\nc.GPUPool.quotas = {quota % '90GiB'}\n")
    (warning,) = report(capsys, "--devices", "2x80GiB")["warnings"]
    assert "are refused" not in warning
    path.write_text(f"c.GPUPool.default_memory = '100GiB'\nc.GPUPool.quotas = {quota % '70GiB'}\n")
    assert "are refused" in report(capsys, "--devices", "2x80GiB")["warnings"][1]


def test_report_shows_a_misspelt_section_as_written(no_configuration, capsys):
    (no_configuration / "jupyter_server_config.py").write_text("c.GPUpool.attach = 'cell'\n")
    assert text(capsys).startswith("c.GPUpool in")


def test_differences_from_the_broker_are_listed_key_by_key(config, broker, capsys):
    in_force = shown(load_settings(), private=True)
    config.write_text(
        CONFIG.replace('"weight": 3', '"weight": 4').replace('"cap": "50%", ', "")
        + "c.GPUPool.guard = False\n"
    )
    broker.answers["status"] = pool(config=in_force, devices=[device(0), device(1)])
    found = report(capsys, "--devices", "16x80GiB")
    assert found["broker"] == {"pid": 1, "socket": "/run/gpupool/broker.sock"}
    assert [(d["option"], *d["keys"], d["there"], d["here"]) for d in found["differences"]] == [
        ("groups", "research", "weight", 3, 4),
        ("groups", "students", "cap", "50%", None),
        ("guard", True, False),
    ]
    flat = " ".join(text(capsys, "--devices", "16x80GiB").split())
    assert "DIFFERENT FROM THE RUNNING BROKER (process 1)" in flat
    assert "c.GPUPool.groups['students']['cap']: '50%' there, not set here" in flat
    late = "takes effect only when the broker starts"
    assert f"c.GPUPool.guard: True there, False here; {late}" in flat


def test_broker_with_the_same_configuration_has_no_difference(config, broker, capsys):
    in_force = shown(load_settings(), private=True)
    broker.answers["status"] = pool(config=in_force, devices=[device()] * 16)
    found = " ".join(text(capsys).split())
    assert "GPUs: 16 GPUs in the running broker, 256 GiB for kernels" in found
    assert "The running broker (process 1) has the same configuration." in found


def test_options_that_only_admins_see_are_not_compared(config, broker, capsys):
    in_force = shown(load_settings(), private=False)
    broker.answers["status"] = pool(config=in_force, devices=[device()] * 16)
    found = " ".join(text(capsys).split())
    assert (
        "Not compared, because only admins of the broker see these options: quotas, admins" in found
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--devices", "16"],
            "'16' in --devices does not describe GPUs. Write a count and a size, such as ",
        ),
        (["--devices", "0x80GiB"], "'0x80GiB' in --devices does not describe GPUs."),
        (["--devices", "2x80GiB,x"], "'x' in --devices does not describe GPUs."),
        (["--at", "tonight"], "'tonight' in --at is not a time. Write a date and a time, such as "),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert main(["check-config", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_list_of_gpus_may_name_several_sizes():
    machine = check_config.parse_devices("2x80GiB, 1x40GiB")
    assert machine.capacities == [80 * GiB, 80 * GiB, 40 * GiB]


@pytest.mark.parametrize(
    ("rules", "warned"),
    [
        ("", False),
        ('c.GPUPool.fair_share_half_life = "1h"', True),
        ('c.GPUPool.fair_share_half_life = "2h"', False),
        ('c.GPUPool.fair_share_half_life = "1h"; c.GPUPool.max_memory_per_kernel = "8GiB"', False),
        ('c.GPUPool.fair_share_half_life = "1h"; c.GPUPool.preempt = ["class"]', False),
        ("c.GPUPool.fair_share_half_life = 0", False),
    ],
)
def test_half_life_below_four_time_slices_is_a_warning(config, capsys, rules, warned):
    config.write_text(rules)
    found = report(capsys, "--devices", "1x80GiB,1x40GiB")
    about = [text for text in found["warnings"] if "fair_share_half_life" in text]
    assert bool(about) is warned
    if warned:
        assert "one time slice of a kernel with 80 GiB of state may last 27 min" in about[0]
        assert "Set this option to 1.8 h or more" in about[0]
