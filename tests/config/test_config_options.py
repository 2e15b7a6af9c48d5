# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The values that each option accepts, and the messages that refuse other values."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from traitlets.config import Config
from traitlets.config.loader import KVArgParseConfigLoader

from jupyter_gpupool.cgroups import Host
from jupyter_gpupool.config import (
    BrokerSettings,
    GPUPool,
    check_config,
    needs_restart,
    usable_attach,
)
from jupyter_gpupool.errors import ConfigError
from jupyter_gpupool.pool.model import PoolSettings, Quota

MiB, GiB = 1 << 20, 1 << 30
HOST = 100 * GiB


def settings(environ=None, host_total=HOST, **options):
    config = Config({"GPUPool": options})
    check_config(config)
    return GPUPool(config=config).settings(host_total=host_total, environ=environ or {})


def refused(**options) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(**options)
    return str(caught.value)


# ------------------------------------------------------------------ valid values


def test_options_have_the_defaults_of_the_pool_settings():
    pool = settings().pool
    default = PoolSettings()
    for name in PoolSettings.__slots__:
        if name != "host_memory":
            assert getattr(pool, name) == getattr(default, name), name
    assert pool.host_memory == HOST // 2


def test_every_setting_has_an_option_and_vice_versa():
    options = set(GPUPool.class_traits(config=True))
    pool = {f.name for f in fields(PoolSettings)}
    broker = {f.name for f in fields(BrokerSettings)}
    #: These settings of the pool have no option: no admin needs to change them, or the broker
    #: computes them from the schedules.
    constants = {"ageing", "pinned_retry", "growth_step", "residence", "classes_open"}
    #: In a cluster, the broker sets these settings from the ledger.
    constants |= {"elsewhere", "elsewhere_groups", "elsewhere_reason"}
    #: These fields hold the pool's settings, notes for the admin, and the origins of the options.
    about = {"pool", "notes", "files", "options", "origins"}
    #: The option of ``half_life`` has another name.
    pool = pool - {"half_life"} | {"fair_share_half_life"}
    assert pool - constants | broker - about - {"members"} == options


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("default_memory", 1 << 30, GiB),
        ("default_memory", "512MiB", 512 * MiB),
        ("default_memory", "1.5 GB", 1_500_000_000),
        ("default_limit", "12GiB", 12 * GiB),
        ("max_memory_per_kernel", "24GiB", 24 * GiB),
        ("max_memory_per_kernel", None, None),
        ("idle_timeout", 45, 45.0),
        ("idle_timeout", "10m", 600.0),
        ("reclaim_after", 0, 0.0),
        ("reclaim_after", "30s", 30.0),
        ("max_wait", None, None),
        ("max_wait", "1h", 3600.0),
        ("reserve", 0, 0),
        ("reserve", "512MiB", 512 * MiB),
        ("resume_headroom", 0, 0),
        ("host_memory", "64GiB", 64 * GiB),
        ("host_memory", "25%", 25 * GiB),
        ("host_memory", 7, 7),
        ("priority_classes", {"notebook": 1, "urgent": 2}, {"notebook": 1, "urgent": 2}),
        ("default_priority", "batch", "batch"),
        ("classes_allowed", None, None),
        ("classes_allowed", ["notebook"], frozenset({"notebook"})),
        ("preempt", [], frozenset()),
        ("preempt", ["class", "turns"], frozenset({"class", "turns"})),
        ("unsuspendable", "end", "end"),
        ("unsuspendable_after", ["5m", 600, "1h"], (300.0, 600.0, 3600.0)),
        ("max_swap_overhead", 0.05, 0.05),
        ("max_swap_overhead", "5%", 0.05),
        ("max_swap_overhead", 0, 0.0),
    ],
)
def test_pool_options_accept_these_values(name, value, found):
    assert getattr(settings(**{name: value}).pool, name) == found


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("attach", "manual", "manual"),
        ("guard", False, False),
        ("quiet_after", "5s", 5.0),
        ("turn", 0.25, 0.25),
        ("turn", 0.01, 0.01),
        ("managed_memory", "allow", "allow"),
        ("overuse", "end", "end"),
        ("devices", None, None),
        ("devices", [0, "1", "GPU-5d1c", "MIG-ab"], ("0", "1", "GPU-5d1c", "MIG-ab")),
        ("foreign_processes", "report", "report"),
        ("socket", "/run/x/y.sock", "/run/x/y.sock"),
        ("state_dir", "/var/lib/x", Path("/var/lib/x")),
        ("sample_interval", 0.25, 0.25),
        ("lock_timeout", "2s", 2.0),
        ("linger", 0, 0.0),
        ("metrics_port", 9845, 9845),
        ("metrics_port", 0, 0),
        ("admins", ["ada"], ("ada",)),
        ("cluster_min_uid", 500, 500),
        ("cluster_data", ["/scratch/", "/a/../b"], ("/scratch", "/b")),
        ("cluster_identity", "munge:/run/m.socket", "munge:/run/m.socket"),
        ("cluster_identity", "http://hub:8081/hub/api", "http://hub:8081/hub/api"),
    ],
)
def test_broker_options_accept_these_values(name, value, found):
    assert getattr(settings(**{name: value}), name) == found


def test_half_life_of_fair_share_is_read_in_seconds():
    assert settings(fair_share_half_life="2d").pool.half_life == 2 * 86400
    assert settings(fair_share_half_life=0).pool.half_life == 0


def test_default_limit_is_the_whole_device_for_any_memory():
    assert settings(default_memory="8GiB").pool.default_limit is None
    # The pool reduces the default limit to the largest size that a kernel may request.
    assert settings(max_memory_per_kernel="8GiB").pool.default_limit is None


def test_quotas_are_read_for_each_user():
    quotas = settings(
        quotas={"*": {"memory": "16GiB", "leases": 2, "suspended": 0}, "ada": {"devices": None}}
    ).pool.quotas
    assert quotas == {"*": Quota(memory=16 * GiB, leases=2, suspended=0), "ada": Quota()}


def test_options_from_the_command_line_are_parsed():
    loader = KVArgParseConfigLoader()
    arguments = ["--GPUPool.default_memory=6GiB", "--GPUPool.max_wait=None",
                 "--GPUPool.guard=False", "--GPUPool.max_swap_overhead=0.2",
                 "--GPUPool.devices=0", "--GPUPool.admins=ada",
                 "--GPUPool.metrics_port=9845"]  # fmt: skip
    config = loader.load_config(arguments)
    check_config(config)
    found = GPUPool(config=config).settings(host_total=HOST, environ={})
    assert (found.pool.default_memory, found.pool.max_wait) == (6 * GiB, None)
    assert (found.devices, found.admins) == (("0",), ("ada",))
    assert (found.guard, found.pool.max_swap_overhead) == (False, 0.2)
    assert found.metrics_port == 9845


def test_lazy_attach_is_the_default_and_can_be_configured():
    assert settings().attach == settings(attach="lazy").attach == "lazy"
    assert settings().notes == ()


@pytest.mark.parametrize("policy", ["lazy", "cell", "manual"])
def test_every_attach_policy_works_with_the_guard(policy):
    assert usable_attach(policy, True, "not asked for") == (policy, "")


@pytest.mark.parametrize("policy", ["cell", "manual"])
def test_only_lazy_attach_needs_the_guard(policy):
    assert usable_attach(policy, False, "c.GPUPool.guard is False.") == (policy, "")


def test_policy_lazy_becomes_cell_if_the_guard_is_unavailable():
    assert usable_attach("lazy", False, "c.GPUPool.guard is False.") == (
        "cell",
        (
            "Attach policy 'lazy' needs the guard, which is not available here, so kernels get "
            "their slice when a cell starts ('cell'). c.GPUPool.guard is False."
        ),
    )


def test_host_memory_above_the_machines_memory_gets_a_note():
    found = settings(host_memory="200GiB")
    assert found.pool.host_memory == 200 * GiB
    assert found.notes == (
        (
            "c.GPUPool.host_memory is 200 GiB, but this machine has 100 GiB. "
            "The pool starts a suspend only if the kernel's state fits into host memory."
        ),
    )


def test_state_dir_of_root_differs_from_that_of_other_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 1000)
    assert settings().state_dir == tmp_path / "gpupool"
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert settings().state_dir == Path("/var/lib/gpupool")


# ------------------------------------------------------------------ refused values


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("default_memory", "12 parsecs", ("'12 parsecs' is not a size. Write a number and a unit, "
         "like 12GiB or 512MiB.")),
        ("default_memory", -1, ("'-1' is not a size. Write a number and a unit, like 12GiB or "
         "512MiB.")),
        ("default_memory", 0, "'0' is not a size above zero. Write one like 12GiB or 512MiB."),
        ("default_memory", True, ("True is not a size. Write a number of bytes, or text like "
         "'12GiB'.")),
        ("default_memory", 1.5, "1.5 is not a whole number of bytes."),
        ("default_memory", None, ("None is not a size. Write a number of bytes, or text like "
         "'12GiB'.")),
        ("idle_timeout", "soon", "'soon' is not a duration. Write one like 90s, 10m or 2h."),
        ("idle_timeout", 0, "'0' is not a duration above zero. Write one like 10m."),
        ("max_wait", [], "[] is not a duration. Write a number of seconds, or text like '10m'."),
        ("attach", "lasy", "'lasy' is not allowed. Allowed: 'lazy', 'cell' or 'manual'."),
        ("foreign_processes", "kill", ("'kill' is not allowed. Allowed: 'count', 'report' or "
         "'end'.")),
        ("guard", "on", "'on' is not allowed. Allowed: True or False."),
        ("quiet_after", 0, "'0' is not a duration above zero. Write one like 10m."),
        ("turn", 0.001, "0.001 is too small. Write 0.01 or more."),
        ("managed_memory", "deny", "'deny' is not allowed. Allowed: 'refuse' or 'allow'."),
        ("overuse", "kill", "'kill' is not allowed. Allowed: 'report' or 'end'."),
        ("overuse", "suspend", ("'suspend' is no longer allowed: after a suspend, a kernel that "
         "goes around the guard can take the memory again. Write 'report', or 'end' to end such "
         "kernels.")),
        ("max_swap_overhead", -1, ("-1 is not a share above 0 and below 1. Write 0.1 or '10%'.")),
        ("max_swap_overhead", 1, ("1 is not a share above 0 and below 1. Write 0.1 or '10%'.")),
        ("max_swap_overhead", "lots", ("'lots' is not a share above 0 and below 1. Write 0.1 or "
         "'10%'.")),
        ("devices", [], "The list is empty, so the pool would have no GPU. Use None for all GPUs."),
        ("devices", ["rtx"], ("'rtx' is not an index or a UUID of a GPU. Write an index such as "
         "0, or the beginning of a UUID such as 'GPU-5d1c'; `nvidia-smi -L` shows both.")),
        ("devices", [0, "0"], "'0' is listed twice."),
        ("devices", 0, "0 is not allowed. Allowed: list of indices or UUIDs."),
        ("quotas", {"@staff": {}}, ("'@staff' looks like a group, but quotas are per user. Write "
         "names of users, or '*' for all others. For groups, use c.GPUPool.groups.")),
        ("quotas", {7: {}}, "7 is not a user name. Write a name, or '*' for all others."),
        ("quotas", "x", "'x' is not allowed. Allowed: dict of user name to dict."),
        ("priority_classes", {}, ("There must be at least one priority class, such as "
         "{'notebook': 100}.")),
        ("priority_classes", {"a b": 1}, ("'a b' is not a name for a priority class. Use letters "
         "and '_'.")),
        ("priority_classes", {"a": "x"}, ("The priority class 'a' has the value 'x'. Write a whole "
         "number.")),
        ("host_memory", "0%", "'0%' is not a share of memory. Write '1%' to '100%'."),
        ("host_memory", "120%", "'120%' is not a share of memory. Write '1%' to '100%'."),
        ("host_memory", "x%", "'x%' is not a share of memory. Write '1%' to '100%'."),
        ("host_memory", "much", ("'much' is not a size. Write a number and a unit, like 12GiB or "
         "512MiB. A percentage like '50%' is allowed, too.")),
        ("host_memory", None, "None is not a size. Write '64GiB', bytes, or per cent like '50%'."),
        ("socket", "broker.sock", ("'broker.sock' is not an absolute path. Begin it with '/' or "
         "'~'.")),
        ("metrics_port", 65536, ("65536 is not a port. Write a whole number up to 65535, or 0 for "
         "none.")),
        ("metrics_port", True, ("True is not a port. Write a whole number up to 65535, or 0 for "
         "none.")),
        ("metrics_port", "9845", "'9845' is not allowed. Allowed: TCP port, 1 to 65535."),
        ("preempt", ["clas"], ("There is no rule 'clas'. Did you mean 'class'? Allowed are "
         "'burst', 'class', 'guarantee' or 'turns'.")),
        ("unsuspendable", "kill", "'kill' is not allowed. Allowed: 'warn', 'ask' or 'end'."),
        ("unsuspendable_after", ["1m"], ("Write three durations: after how long the broker warns "
         "the user, asks the user to end the kernel, and ends it, such as ['1m', '10m', '1h'].")),
        ("unsuspendable_after", ["1h", "1m", "1d"], ("The warning comes first, then the request, "
         "then the end. Write three durations, each at least as long as the one before.")),
        ("fair_share_half_life", -1, ("'-1' is not a duration. Write one like 90s, 10m or 2h.")),
        ("groups", [], "[] is not allowed. Allowed: dict of group name to dict."),
        ("schedules", {}, "{} is not allowed. Allowed: list of dicts."),
        ("cluster_data", ["here"], "'here' is not an absolute path. Begin it with '/' or '~'."),
        ("cluster_data", ["/a"] * 9, "There are 9 folders. Write at most 8."),
        ("cluster_data", ["/" + "a" * 200], (f"{'/' + 'a' * 39!r}... has 201 characters. Write a "
         "path of at most 200.")),
        ("cluster_min_uid", 0, ("0 is not allowed. Write a user id, 1 at least: 0, the id of "
         "root, is refused.")),
        ("cluster_identity", "krb5", ("'krb5' is not a way to identify users. Write 'munge', "
         "'munge:/path/of/its/socket', or the address of a JupyterHub's API.")),
        ("state_dir", "here", "'here' is not an absolute path. Begin it with '/' or '~'."),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_with_the_reason(name, value, message):
    example = GPUPool.class_traits()[name].metadata["example"]
    assert refused(**{name: value}) == f"c.GPUPool.{name}: {message} Example: {example}"


@pytest.mark.parametrize(
    ("quota", "message"),
    [
        ({"ada": {"memry": 1}}, ("['ada']['memry']: A quota has no 'memry'. Did you mean 'memory'? "
         "Allowed are 'memory', 'devices', 'leases', 'suspended' or 'gpu_seconds_per_day'.")),
        ({"ada": {"memory": "lots"}}, ("['ada']['memory']: 'lots' is not a size. Write a number "
         "and a unit, like 12GiB or 512MiB.")),
        ({"ada": {"leases": -1}}, ("['ada']['leases']: -1 is not a limit. Write a whole number, 0 "
         "or more.")),
        ({"ada": {"leases": True}}, ("['ada']['leases']: True is not a limit. Write a whole "
         "number, 0 or more.")),
        ({"ada": "16GiB"}, ("['ada']: '16GiB' is not a quota. Write a dict such as {'memory': "
         "'16GiB'}.")),
        ({"ada": {"gpu_seconds_per_day": []}}, ("['ada']['gpu_seconds_per_day']: [] is not a daily "
         "budget. Write GPU-seconds, text like '8h', or a dict such as {'seconds': '8h', 'rule': "
         "'refill', 'then': 'refuse'}.")),
    ],
)  # fmt: skip
def test_wrong_quotas_are_refused(quota, message):
    assert refused(quotas=quota) == f"c.GPUPool.quotas{message}"


def test_socket_path_too_long_for_linux_is_refused():
    message = refused(socket="/" + "x" * 200)
    assert "The broker socket path has 201 bytes" in message
    assert "107" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"default_limit": "1GiB"},
            (
                "c.GPUPool.default_limit: 1 GiB is below default_memory (4 GiB). "
                "Raise default_limit or lower default_memory."
            ),
        ),
        (
            {"default_memory": "12GiB", "max_memory_per_kernel": "8GiB"},
            (
                "c.GPUPool.default_memory: 12 GiB is above max_memory_per_kernel (8 GiB). "
                "Lower default_memory or raise max_memory_per_kernel."
            ),
        ),
        (
            {"default_limit": "12GiB", "max_memory_per_kernel": "8GiB"},
            (
                "c.GPUPool.default_limit: 12 GiB is above max_memory_per_kernel (8 GiB). "
                "Lower default_limit or raise max_memory_per_kernel."
            ),
        ),
        (
            {"classes_allowed": ["notebook", "bach"]},
            (
                "c.GPUPool.classes_allowed[1]: 'bach' is not a priority class. "
                "Did you mean 'batch'? "
                "Allowed are 'interactive', 'notebook' or 'batch'."
            ),
        ),
        (
            {"default_priority": "note"},
            (
                "c.GPUPool.default_priority: 'note' is not a priority class. "
                "Did you mean 'notebook'? "
                "Allowed are 'interactive', 'notebook' or 'batch'."
            ),
        ),
    ],
)
def test_contradicting_values_are_refused(options, message):
    assert refused(**options) == message


# ------------------------------------------------------------------ the rest


@pytest.mark.parametrize("name", sorted(GPUPool.class_traits(config=True)))
def test_every_option_has_help_and_an_example(name):
    trait = GPUPool.class_traits()[name]
    for key in ("what", "unit", "default", "example"):
        assert trait.metadata[key], f"{name} has no {key}"
        assert trait.metadata[key] in trait.help
    config = Config()
    exec(trait.metadata["example"], {"c": config})
    check_config(config)


def test_needs_restart_names_only_options_read_at_the_start():
    old = settings()
    assert needs_restart(old, settings(idle_timeout=1, quotas={"ada": {"leases": 1}})) == ()
    assert needs_restart(old, settings(devices=[0], socket="/x")) == ("devices", "socket")
    assert needs_restart(old, settings(guard=False)) == ("guard",)
    live = {"attach": "cell", "quiet_after": 2, "turn": 1, "managed_memory": "allow",
            "overuse": "end", "max_swap_overhead": 0.2, "metrics_port": 9845}  # fmt: skip
    assert needs_restart(old, settings(**live)) == ()


def proc(tmp_path, cgroup: str, **limits: str) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024 kB\nMemFree: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for folder, text in limits.items():
        place = tmp_path / "sys/fs/cgroup" / folder.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return tmp_path


def total(root: Path) -> int:
    return Host(root / "sys/fs/cgroup", root / "proc").total()


def test_memory_without_control_groups_is_the_whole_machine(tmp_path):
    assert total(proc(tmp_path, "")) == MiB


def test_memory_is_bounded_by_every_parent_group(tmp_path):
    root = proc(tmp_path, "0::/a/b\n")
    for folder, text in {"a/b": "max", "a": "4096"}.items():
        place = root / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(text)
    assert total(root) == 4096


def test_memory_is_bounded_by_a_version_1_group(tmp_path):
    root = proc(tmp_path, "5:cpu:/x\n4:memory:/job\n")
    place = root / "sys/fs/cgroup/memory/job"
    place.mkdir(parents=True)
    (place / "memory.limit_in_bytes").write_text("8192")
    assert total(root) == 8192
