# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The provisioner with jupyter_client's managers, and with a scripted broker."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from harness import IPYKERNEL, private_manager
from jupyter_client import AsyncKernelManager, KernelManager
from scripted_broker import DEVICE, GiB, ScriptedBroker
from traitlets.config import Config

from jupyter_gpupool import launcher
from jupyter_gpupool.errors import GPUPoolError, RefusedError
from jupyter_gpupool.launcher import agent_folder, merge_environment, runs_ipykernel
from jupyter_gpupool.provisioner import GPUPoolProvisioner, KernelNotStarted


def environ(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(e.decode().split("=", 1) for e in entries if b"=" in e)


def execute(manager: Any, code: str) -> str:
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        text: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                text.append(message["content"]["text"])

        reply = client.execute_interactive(code, timeout=60, output_hook=hook)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(text)
    finally:
        client.stop_channels()


def test_provisioner_opens_and_closes_the_session(broker: ScriptedBroker, monkeypatch: Any) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/train.ipynb")
    manager = private_manager("gpupool-python3")
    manager.start_kernel()
    try:
        opened = broker.wait_for("open")
        assert opened["kernel_id"] == manager.kernel_id
        assert opened["label"] == "train.ipynb"
        assert opened["request"] == {}
        assert opened["attach"] is None
        pid = manager.provisioner.pid
        assert broker.wait_for("launched")["pid"] == pid
        assert broker.wait_for("hello")["session"] == "s1"
        env = environ(pid)
        assert env["CUDA_VISIBLE_DEVICES"] == DEVICE
        assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        assert env.get("PYTHONPATH") == os.environ.get("PYTHONPATH")  # PYTHONPATH is unchanged
        assert execute(manager, "print(6 * 7)") == "42\n"
    finally:
        manager.shutdown_kernel()
    assert broker.wait_for("close")["session"] == "s1"
    assert broker.sessions == {}


def test_a_restart_ends_the_session_and_keeps_the_request(broker: ScriptedBroker) -> None:
    config = Config({"GPUPoolProvisioner": {"memory": "2GiB"}})
    manager = private_manager("gpupool-python3", config=config)
    manager.start_kernel()
    try:
        assert broker.wait_for("open")["request"] == {"memory": 2 * GiB}
        execute(manager, "%gpu memory 6GiB --limit 8GiB")
        provisioner = manager.provisioner
        manager.restart_kernel()
        assert manager.provisioner is provisioner
        again = broker.wait_for("open", count=2)["request"]
        assert (again["memory"], again["limit"]) == (6 * GiB, 8 * GiB)
        kinds = [m["type"] for m in broker.messages if m["type"] in ("open", "close")]
        assert kinds == ["open", "close", "open"]
        assert execute(manager, "print('x' in globals())") == "False\n"
    finally:
        manager.shutdown_kernel(now=True)
    broker.wait_for("close", count=2)
    manager.provisioner is None or manager.cleanup_resources()
    assert len(broker.seen("close")) == 2  # a second cleanup changes nothing


def test_restart_keeps_the_request_when_the_broker_dies(broker: ScriptedBroker) -> None:
    manager = private_manager("gpupool-python3")
    manager.start_kernel()
    try:
        execute(manager, "%gpu memory 6GiB --limit 8GiB")

        def die(_message: Any) -> None:
            del broker.scripts["request"]
            broker.hang_up()

        broker.scripts["request"] = die
        manager.restart_kernel()
        assert "request" not in broker.scripts, "the provisioner asked for the request"
        again = broker.wait_for("open", count=2)["request"]
        assert (again["memory"], again["limit"]) == (6 * GiB, 8 * GiB)
    finally:
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("now", [False, True], ids=["shutdown", "kill"])
def test_kernel_is_suspended_before_its_end_on_unsafe_drivers(
    broker: ScriptedBroker, now: bool
) -> None:
    broker.retire = True
    manager = private_manager("gpupool-python3")
    manager.start_kernel()
    broker.scripts["retire"] = lambda _message: {"safe": True}
    manager.shutdown_kernel(now=now)
    broker.wait_for("close")
    kinds = [m["type"] for m in broker.messages if m["type"] in ("retire", "close")]
    assert kinds == ["retire", "close"]


def test_shutdown_sends_no_retire_message_on_safe_drivers(broker: ScriptedBroker) -> None:
    manager = private_manager("gpupool-python3")
    manager.start_kernel()
    manager.shutdown_kernel(now=True)
    broker.wait_for("close")
    assert broker.seen("retire") == []


def test_asynchronous_manager_opens_and_closes_a_session(broker: ScriptedBroker) -> None:
    async def scene() -> None:
        manager = private_manager("gpupool-python3", AsyncKernelManager)
        await manager.start_kernel()
        info = await manager.provisioner.get_provisioner_info()
        assert info["gpupool_session"] == "s1"
        assert info["gpupool_socket"] == str(broker.path)
        os.killpg(manager.provisioner.pgid, signal.SIGKILL)
        await manager.restart_kernel(now=True)
        broker.wait_for("open", count=2)
        await manager.shutdown_kernel(now=True)
        broker.wait_for("close", count=2)

    asyncio.run(scene())


def test_persisted_fields_are_enough_to_end_the_session(broker: ScriptedBroker) -> None:
    async def scene() -> None:
        manager = private_manager("gpupool-python3", AsyncKernelManager)
        await manager.start_kernel()
        info = await manager.provisioner.get_provisioner_info()
        other = GPUPoolProvisioner(kernel_id="x", kernel_spec=manager.kernel_spec, parent=None)
        await other.load_provisioner_info(info)
        await other.cleanup()
        assert broker.wait_for("close")["session"] == "s1"
        await manager.shutdown_kernel(now=True)

    asyncio.run(scene())


def test_request_has_the_options_of_the_kernelspec(
    broker: ScriptedBroker, install_spec: Callable[..., str]
) -> None:
    asked = {
        "memory": "12GiB",
        "limit": "20GiB",
        "devices": 2,
        "compute": 50,
        "priority": "batch",
    }
    name = install_spec(
        "asking", [sys.executable, *IPYKERNEL], {**asked, "attach": "manual", "group": "lab"}
    )
    manager = private_manager(name)
    manager.start_kernel()
    manager.shutdown_kernel(now=True)
    opened = broker.wait_for("open")
    assert opened["request"] == {
        "memory": 12 * GiB,
        "limit": 20 * GiB,
        "devices": 2,
        "compute": 50,
        "priority": "batch",
    }
    assert (opened["attach"], opened["group"]) == ("manual", "lab")
    assert opened["label"] == "Test asking"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"slice_memory": "4G"}, "Did you mean 'memory'?"),
        ({"device": 2}, "Did you mean 'devices'?"),
        ({"memory": "12 parsecs"}, "'12 parsecs' is not a size."),
        ({"attach": "autmatic"}, "the policies are lazy, cell, manual."),
        ({"compute": 101}, "should not be greater than 100"),
        ({"broker_socket": "here.sock"}, "must be absolute"),
    ],
)
def test_wrong_option_prevents_the_start_of_the_kernel(
    broker: ScriptedBroker, install_spec: Callable[..., str], config: Any, message: str
) -> None:
    name = install_spec("bad", [sys.executable, *IPYKERNEL], config)
    manager = private_manager(name)
    with pytest.raises(GPUPoolError) as caught:
        manager.start_kernel()
    assert message in str(caught.value)
    assert not manager.has_kernel
    assert broker.seen("open") == []


def test_refused_session_prevents_the_start_of_the_kernel(broker: ScriptedBroker) -> None:
    def refuse(message: Any) -> None:
        raise RefusedError("You asked for 99 GiB and may have 16 GiB.", next_step="Ask for less.")

    broker.scripts["open"] = refuse
    manager = private_manager("gpupool-python3")
    with pytest.raises(
        KernelNotStarted, match=r"99 GiB and may have 16 GiB\. Ask for less\."
    ) as no:
        manager.start_kernel()
    assert not manager.has_kernel
    # Jupyter Server's kernels API shows the text of an error only if the error has this type.
    assert (no.value.status_code, no.value.log_message) == (
        400,
        "You asked for 99 GiB and may have 16 GiB. Ask for less.",
    )


def test_kernel_ends_if_it_cannot_be_registered(broker: ScriptedBroker) -> None:
    pids: list[int] = []

    def refuse(message: Any) -> None:
        pids.append(message["pid"])
        raise RefusedError("There is no such process.")

    broker.scripts["launched"] = refuse
    manager = private_manager("gpupool-python3")
    with pytest.raises(KernelNotStarted):
        manager.start_kernel()
    broker.wait_for("close")
    manager.provisioner.process.wait(60)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_kernel_can_end_after_the_death_of_the_broker(broker: ScriptedBroker) -> None:
    manager = private_manager("gpupool-python3")
    manager.start_kernel()
    broker.wait_for("launched")
    broker.die()
    manager.shutdown_kernel(now=True)
    assert not manager.has_kernel


def test_a_kernel_of_another_environment_gets_the_agent(
    broker: ScriptedBroker, install_spec: Callable[..., str], old_python: str
) -> None:
    name = install_spec("elsewhere", [old_python, *IPYKERNEL])
    manager = private_manager(name)
    manager.start_kernel()
    try:
        assert broker.wait_for("hello")["session"] == "s1"
        text = execute(manager, "import jupyter_gpupool.kernel, sys; print(sys.path)")
        assert "gpupool" in text
        assert broker.wait_for("hold")["kind"] == "cell"
        folder = environ(manager.provisioner.pid)["PYTHONPATH"].split(os.pathsep)[0]
        assert [p.name for p in Path(folder).iterdir()] == ["jupyter_gpupool"]
    finally:
        manager.shutdown_kernel(now=True)


#: Environment variables that a broker with the guard gives to a session's processes. The tests in
#: this folder only compare them: no test loads the library that they name.
SESSION_GUARD = {
    "LD_PRELOAD": "/run/pool/gpupool-guard/libcuda.so.1",
    "LD_LIBRARY_PATH": "/run/pool/gpupool-guard:/emulator",
    "GPUPOOL_PAGE": "/run/pool/s1",
}


def started(manager: KernelManager) -> dict[str, str]:
    """Start the kernel, end it, and return the environment that it had."""
    manager.start_kernel()
    try:
        return environ(manager.provisioner.pid)
    finally:
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize(
    ("config", "attach", "guard", "asked", "visible", "warned"),
    [
        ({}, "lazy", True, "lazy", DEVICE, ""),
        ({"attach": "cell"}, "lazy", True, "lazy", DEVICE, ""),
        ({}, "cell", False, "lazy", "-1", "and this pool runs without the guard"),
        ({"attach": "manual"}, "manual", True, "manual", "-1", "with attach policy 'manual'"),
    ],
    ids=["guard", "no-cells", "no-guard", "manual"],
)
def test_kernel_without_agent_uses_the_guard_or_sees_no_device(
    broker: ScriptedBroker,
    install_spec: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    attach: str,
    guard: bool,
    asked: str,
    visible: str,
    warned: str,
) -> None:
    broker.attach = attach
    broker.env = SESSION_GUARD if guard else {}
    name = install_spec("shell", ["sleep", "60"], config, language="bash")
    manager = private_manager(name)
    manager.log.propagate = True
    assert started(manager)["CUDA_VISIBLE_DEVICES"] == visible
    assert broker.wait_for("open")["attach"] == asked
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(warned)
    if warned:
        assert "Test shell runs without a GPU: it is not an ipykernel" in warnings[0]
        assert warned in warnings[0]


def test_guard_comes_before_the_emulator_and_user_libraries(
    broker: ScriptedBroker, install_spec: Callable[..., str]
) -> None:
    broker.attach, broker.env = "lazy", SESSION_GUARD
    mine = {"LD_PRELOAD": "/none/jemalloc.so", "LD_LIBRARY_PATH": "/mine:/emulator"}
    env = started(private_manager(install_spec("shell", ["sleep", "60"], env=mine)))
    assert env["LD_PRELOAD"] == f"{SESSION_GUARD['LD_PRELOAD']}:/none/jemalloc.so"
    assert env["LD_LIBRARY_PATH"] == "/run/pool/gpupool-guard:/emulator:/mine"


@pytest.mark.parametrize("inner", [SESSION_GUARD, {}], ids=["guard", "no-guard"])
def test_kernel_does_not_inherit_the_page_of_the_outer_session(
    broker: ScriptedBroker,
    install_spec: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    inner: dict[str, str],
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/run/outer/gpupool-guard/libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/run/outer/gpupool-guard:/mine")
    monkeypatch.setenv("GPUPOOL_PAGE", "/run/outer/s7")
    monkeypatch.setenv("GPUPOOL_VISIBLE", "GPU-outer")
    broker.env = inner
    env = started(private_manager(install_spec("shell", ["sleep", "60"])))
    assert env.get("LD_PRELOAD") == inner.get("LD_PRELOAD")
    paths = inner.get("LD_LIBRARY_PATH", "")
    assert env["LD_LIBRARY_PATH"] == (f"{paths}:/mine" if paths else "/mine")
    assert env.get("GPUPOOL_PAGE") == inner.get("GPUPOOL_PAGE")
    assert "GPUPOOL_VISIBLE" not in env


def test_guard_paths_come_first_and_user_choices_stay() -> None:
    env = {
        "LD_LIBRARY_PATH": "/mine:/emulator",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "CUDF_PANDAS_RMM_MODE": "pool",
        "CUDA_VISIBLE_DEVICES": "7",
    }
    merge_environment(
        env,
        {
            "LD_LIBRARY_PATH": "/emulator",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            "CUDF_PANDAS_RMM_MODE": "async",
            "CUDA_VISIBLE_DEVICES": DEVICE,
        },
    )
    assert env == {
        "LD_LIBRARY_PATH": "/emulator:/mine",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "CUDF_PANDAS_RMM_MODE": "pool",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "CUDA_VISIBLE_DEVICES": DEVICE,
    }


def test_ipykernel_is_recognised_in_commands() -> None:
    assert runs_ipykernel(["python", "-m", "ipykernel_launcher", "-f", "x"])
    assert runs_ipykernel(["/opt/conda/bin/python", "-Xfrozen_modules=off", "-m", "ipykernel"])
    assert runs_ipykernel(["python", "/usr/lib/ipykernel_launcher.py"])
    assert not runs_ipykernel(["R", "--slave", "-e", "IRkernel::main()"])
    assert not runs_ipykernel(["python", "-m", "bash_kernel", "-f", "ipykernel.json"])


def test_folder_of_the_agent_must_be_private(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(launcher, "user_runtime_dir", lambda: tmp_path / "gpupool")
    folder = agent_folder()
    assert (folder / "jupyter_gpupool" / "kernel" / "cells.py").exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert agent_folder() == folder
    (folder / "jupyter_gpupool").unlink()
    (folder / "jupyter_gpupool").symlink_to(tmp_path)
    assert (agent_folder() / "jupyter_gpupool" / "kernel").exists()
    folder.chmod(0o777)
    with pytest.raises(GPUPoolError, match="that no other user can change"):
        agent_folder()


def test_every_option_is_described() -> None:
    options = GPUPoolProvisioner.class_own_traits(config=True)
    assert set(options) == set(launcher.OPTIONS)
    for trait in options.values():
        assert "Example:" in trait.help


def test_bad_configuration_names_the_option(broker: ScriptedBroker) -> None:
    config = Config({"GPUPoolProvisioner": {"memory": "lots"}})
    manager = private_manager("gpupool-python3", config=config)
    with pytest.raises(KernelNotStarted, match=r"GPUPoolProvisioner\.memory: 'lots' is not a size"):
        manager.start_kernel()
