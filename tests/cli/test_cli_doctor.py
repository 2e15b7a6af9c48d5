# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The checks of ``doctor``: each check on a faked machine, and all checks on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from snapshots import GiB, device, pool

from jupyter_gpupool.cgroups import Host
from jupyter_gpupool.cli import checks, main
from jupyter_gpupool.config import load_settings
from jupyter_gpupool.devices import Finding, vendor
from jupyter_gpupool.devices.nvidia import driver
from jupyter_gpupool.guard import build, install
from tests import emulated


def by_name(findings):
    return {f["name"]: f for f in findings}


def doctor(capsys, *arguments: str):
    code = main(["doctor", "--json", *arguments])
    return code, by_name(json.loads(capsys.readouterr().out))


def test_doctor_shows_the_devices_of_a_broker(broker, capsys):
    broker.answers["status"] = pool(broker={"journal": "/j", "journal_problem": ""})
    _, found = doctor(capsys)
    assert found["socket"]["verdict"] == "ok"
    assert found["journal"] == {"verdict": "ok", "name": "journal", "message": "/j", "todo": ""}
    assert found["GPU 0"]["message"] == (
        "EMULATED NVIDIA GPU 16 GiB, 16 GiB, tier unguarded, suspend works"
    )


def test_doctor_without_a_broker_tests_the_devices_itself(no_configuration, monkeypatch, capsys):
    (no_configuration / "jupyter_server_config.py").write_text("c.GPUPool.guard = False")
    monkeypatch.setenv("GPUPOOL_EMULATE", "1x256MiB,context=16MiB")
    monkeypatch.setenv("COLUMNS", "60")
    main(["doctor"])
    out = capsys.readouterr().out
    assert "EMULATED NVIDIA GPU" in out
    assert "tier unguarded, a CUDA context takes 16 MiB, suspend works" in out
    assert "ok    guard           off: c.GPUPool.guard is False\n" in out
    assert "ok    attach          cell: kernels get their slice when a cell starts\n" in out
    assert "kernels get their slice when a cell starts ('cell'). c.GPUPool.guard is False." in out
    assert "security boundary" not in out
    assert "default_memory is 4 GiB, the largest GPU has 256 MiB" in out
    assert "\x1b" not in out


def test_doctor_names_the_variable_that_hides_gpus(broker, capsys):
    text = "CUDA_VISIBLE_DEVICES='1' limits the pool to GPU 1."
    broker.answers["status"] = pool(limited=text)
    _, found = doctor(capsys)
    assert found["devices"]["message"] == text


def test_doctor_without_a_broker_tests_only_configured_gpus(monkeypatch, capsys):
    monkeypatch.setenv("GPUPOOL_EMULATE", "2x256MiB,context=16MiB")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    _, found = doctor(capsys)
    assert found["devices"]["message"] == "CUDA_VISIBLE_DEVICES='1' limits the pool to GPU 1."
    assert "GPU 1" in found
    assert "GPU 0" not in found


def test_doctor_tests_the_guard_as_a_broker_does(monkeypatch, capsys):
    build.compile()
    monkeypatch.setenv("GPUPOOL_EMULATE", "1x256MiB,context=16MiB")
    _, found = doctor(capsys)
    assert found["guard"]["message"] == f"built in {build.DEFAULT_OUT}"
    assert found["GPU 0"]["message"].endswith(
        "tier guarded, a CUDA context takes 16 MiB, suspend works"
    )
    assert found["attach"]["message"] == "lazy: kernels get their slice at their first CUDA call"
    assert found["guard's limits"]["verdict"] == "ok"


def test_doctor_warns_if_the_guard_is_not_compiled(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(install, "_LIB", tmp_path)
    monkeypatch.setenv("GPUPOOL_EMULATE", "1x256MiB,context=16MiB")
    _, found = doctor(capsys)
    assert found["guard"]["verdict"] == found["attach"]["verdict"] == "warn"
    assert f"The guard is not compiled: {tmp_path}/libcuda.so.1" in found["guard"]["message"]
    assert found["guard"]["todo"].endswith("python -m jupyter_gpupool.guard.build")
    assert found["attach"]["message"] == "cell: kernels get their slice when a cell starts"
    assert "The guard is not compiled" in found["attach"]["todo"]
    assert found["GPU 0"]["verdict"] == "ok"
    assert "tier unguarded" in found["GPU 0"]["message"]
    assert "The guard is not compiled" in found["GPU 0"]["todo"]


def test_doctor_shows_the_policy_and_limits_of_a_guarded_broker(broker, capsys):
    broker.answers["status"] = pool(
        devices=[device(tier="guarded", context_bytes=512 << 20)],
        settings={"attach": "lazy", "attach_reason": ""},
    )
    _, found = doctor(capsys)
    assert found["attach"] == {
        "verdict": "ok",
        "name": "attach",
        "message": "lazy: kernels get their slice at their first CUDA call",
        "todo": "",
    }
    assert found["GPU 0"]["message"].endswith(
        "tier guarded, a CUDA context takes 512 MiB, suspend works"
    )
    limits = found["guard's limits"]
    assert limits["verdict"] == "ok"
    assert "not a security boundary" in limits["message"]
    assert "LD_PRELOAD" in limits["todo"]


def test_doctor_says_why_a_broker_does_not_attach_lazily(broker, capsys):
    reason = (
        "The guard did not pass its self-test on GPU 0: "
        "the test program did not reach the closed gate."
    )
    broker.answers["status"] = pool(settings={"attach": "cell", "attach_reason": reason})
    _, found = doctor(capsys)
    assert (found["attach"]["verdict"], found["attach"]["todo"]) == ("warn", reason)
    assert "guard's limits" not in found


def test_missing_driver_is_a_failure_with_a_next_step(monkeypatch, capsys):
    if vendor.driver_present():
        pytest.skip("this machine has an NVIDIA driver")
    code, found = doctor(capsys)
    assert code == 1
    assert found["driver"]["verdict"] == "warn"
    assert found["devices"]["verdict"] == "fail"
    assert "No NVIDIA driver was found" in found["devices"]["message"]
    assert "c.GPUPool.emulate" in found["devices"]["message"]


def test_broken_configuration_file_prevents_the_other_checks(no_configuration, tmp_path, capsys):
    (no_configuration / "jupyter_server_config.py").write_text("c.GPUPool.atach = 'cell'")
    code, found = doctor(capsys)
    assert code == 1
    assert "c.GPUPool.atach in" in found["config"]["message"]
    assert "Did you mean 'attach'?" in found["config"]["todo"]
    assert "socket" not in found


def test_wrong_spec_of_the_emulated_machine_is_a_failure(monkeypatch, capsys):
    monkeypatch.setenv("GPUPOOL_EMULATE", "2x")
    code, found = doctor(capsys)
    assert code == 1
    assert found["config"]["message"].startswith("GPUPOOL_EMULATE: '' in '2x' is not a size")


def test_missing_emulator_is_a_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GPUPOOL_EMULATE", "1x1GiB")
    monkeypatch.setattr(emulated.specification, "__file__", str(tmp_path / "specification.py"))
    code, found = doctor(capsys)
    assert code == 1
    assert found["emulator"]["todo"] == ("Build it with: python -m emucuda.build")
    assert "has not been compiled" in found["config"]["message"]


def test_missing_file_named_on_the_command_line_is_a_failure(tmp_path, capsys):
    code, found = doctor(capsys, "--config", str(tmp_path / "missing.py"))
    assert code == 1
    assert "There is no configuration file" in found["config"]["message"]


# ------------------------------------------------------------------ single checks


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("580.95.05", "ok"), ("575.57", "warn"), ("550.54.14", "fail")],
)
def test_driver_version_is_checked(tmp_path, version, verdict):
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed Oct 1\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    found = driver.loaded_driver(tmp_path / "driver/nvidia/version")
    assert (found.verdict, found.message) == (verdict, f"NVIDIA {version}")
    assert bool(found.todo) == (verdict != "ok")


@pytest.mark.parametrize(
    ("scope", "uid", "verdict"),
    [(None, 1000, "ok"), ("0", 1000, "ok"), ("1", 0, "ok"), ("1", 1000, "warn"), ("2", 0, "warn")],
)
def test_ptrace_scope_is_checked(tmp_path, monkeypatch, scope, uid, verdict):
    if scope is not None:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(scope)
    monkeypatch.setattr("os.getuid", lambda: uid)
    assert checks.ptrace_scope(tmp_path).verdict == verdict


def test_socket_without_a_broker_is_a_failure(broker):
    path = broker.path
    assert checks.socket(path, answers=True).verdict == "ok"
    found = checks.socket(path, answers=False)
    assert found == Finding(
        "fail",
        "socket",
        f"nothing answers at {path}",
        "Open a Pooled GPU kernel, which starts a broker, or run `jupyter gpupool broker`.",
    )


def test_symbolic_link_as_socket_is_a_failure(tmp_path):
    (tmp_path / "link").symlink_to("/nowhere")
    found = checks.socket(tmp_path / "link", answers=False)
    assert found.verdict == "fail"
    assert "is a symbolic link" in found.message


def nvidia_smi(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "verdict", "message"),
    [
        ("echo '0, Enabled'; echo '1, Enabled'", "ok", "on"),
        ("echo '0, Enabled'; echo '1, Disabled'", "warn", "off on GPU 1"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "fail", "NVIDIA-SMI has failed"),
    ],
)
def test_persistence_mode_is_checked(tmp_path, monkeypatch, script, verdict, message):
    nvidia_smi(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (found,) = driver.persistence_mode()
    assert (found.verdict, found.message) == (verdict, message)


def test_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert checks.compiler().verdict == "warn"


def test_doctor_explains_lost_devices_and_missing_suspend():
    mig = device(tier="mig", can_suspend=False, tier_reason="MIG cannot be suspended.")
    lost = device(1, drained_reason="Xid 79")
    found = checks.devices([mig, lost], "")
    assert [f.verdict for f in found] == ["warn", "fail"]
    assert found[0].todo == "MIG cannot be suspended."
    assert found[1].todo == "not used: Xid 79"


@pytest.mark.parametrize(
    ("where", "target"), [("GPU-1", " --device 1"), ("", "")], ids=["one GPU", "the pool"]
)
def test_paused_gpu_is_a_warning_that_names_the_admin(where, target):
    paused = device(1, uuid="GPU-1", drained_reason="paused by the administrator: new driver")
    order = {"kind": "pause", "device": where, "by": "root", "since": 0.0, "reason": "new driver"}
    (found,) = checks.devices([paused], "", [order])
    assert found.verdict == "warn"
    assert found.todo.startswith("paused by root on 19")
    assert found.todo.endswith(f" (new driver); to give it back: jupyter gpupool resume{target}")


def test_control_group_smaller_than_a_slice_is_a_warning(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    group = tmp_path / "cgroup" / "job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{4 * GiB}\n")
    (group / "memory.current").write_text("0\n")
    here = Host(tmp_path / "cgroup", tmp_path)
    (found,) = checks.memory_limits(load_settings(), [device(memory_capacity=80 * GiB)], here)
    assert (found.verdict, found.name) == ("warn", "memory limit")
    assert found.message == (
        "control group /job may use 4 GiB, and 1 GiB of this must stay free (host_reserve), so a "
        "slice of 4 GiB can never be suspended here"
    )
    assert checks.memory_limits(load_settings(), [device(memory_capacity=2 * GiB)], here) == []


def test_host_memory_below_the_largest_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(checks.Host, "total", lambda _host: 64 * GiB)
    settings = load_settings()
    small = checks.host_memory(settings, [device(memory_capacity=1 << 50)])
    assert small.verdict == "warn"
    assert "c.GPUPool.host_memory" in small.todo
    assert checks.host_memory(settings, [device(memory_capacity=1)]).verdict == "ok"


def test_missing_package_is_a_failure(monkeypatch):
    monkeypatch.setattr(checks, "PACKAGES", {"no-such-package": "nothing"})
    assert checks.packages() == [
        Finding(
            "fail",
            "no-such-package",
            "not installed",
            "This package is needed for nothing: pip install no-such-package",
        )
    ]


def test_reserve_as_large_as_a_gpu_is_a_warning(no_configuration):
    (no_configuration / "jupyter_server_config.py").write_text("c.GPUPool.reserve = '16GiB'")
    (found,) = checks.reserve_fits(load_settings(), [device(0), device(1)])
    assert found.verdict == "warn"
    assert found.message.startswith(
        "reserve is 16 GiB, so the pool can grant no memory of GPU 0 (16 GiB), GPU 1"
    )
    (no_configuration / "jupyter_server_config.py").write_text("c.GPUPool.reserve = '15GiB'")
    assert checks.reserve_fits(load_settings(), [device(0)]) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "12GiB", "priority": "batch"}, ""),
        ({"memry": "12GiB"}, "memry"),
        ({"memory": "much"}, "memory"),
        ({"devices": "two"}, "devices"),
    ],
)
def test_wrong_options_of_pooled_kernelspecs_are_warnings(tmp_path, monkeypatch, options, said):
    folder = tmp_path / "kernels/mine"
    folder.mkdir(parents=True)
    stanza = {"provisioner_name": "gpupool-provisioner", "config": options}
    spec = {"argv": ["python"], "display_name": "M", "metadata": {"kernel_provisioner": stanza}}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    found = [f for f in checks.stanzas() if f.message.startswith("mine:")]
    assert [f.verdict for f in found] == (["warn"] if said else [])
    assert all(said in f.message and str(folder) in f.todo for f in found)
