# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A client that does not know provisioners starts the ``argv`` of a pooled kernelspec."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from harness import IPYKERNEL, private_manager
from scripted_broker import DEVICE, GiB, ScriptedBroker
from test_provisioner import SESSION_GUARD, environ

from jupyter_gpupool.errors import RefusedError
from jupyter_gpupool.guard.install import hide_devices, without_guard
from jupyter_gpupool.kernelspecs import wrap
from jupyter_gpupool.launcher import IPYKERNEL_LAUNCHER, LAUNCHER, has_launcher, kernel_command
from tests.plain_client import SHIPPED, PlainKernel


@pytest.fixture
def start() -> Iterator[Callable[..., PlainKernel]]:
    made: list[PlainKernel] = []
    with tempfile.TemporaryDirectory(prefix="gp") as folder:  # a socket needs a short path

        def start(name: str = SHIPPED, **options: Any) -> PlainKernel:
            made.append(PlainKernel(name, Path(folder), **options))
            return made[-1]

        yield start
        for kernel in made:
            kernel.close()


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernelspec in the sources, because an installed copy may be older."""
    monkeypatch.setenv("JUPYTER_PATH", str(Path(__file__).parents[2] / "share" / "jupyter"))


def opened(broker: ScriptedBroker) -> int:
    return len(broker.seen("open"))


@pytest.mark.parametrize("vscode", [True, False])
def test_launcher_opens_a_session_and_becomes_the_kernel(
    broker: ScriptedBroker, start: Callable[..., PlainKernel], vscode: bool
) -> None:
    kernel = start(vscode=vscode, JPY_SESSION_NAME="/home/me/train.ipynb")
    assert kernel.run("import os; print(os.getpid(), end='')") == str(kernel.pid)
    message = broker.wait_for("open")
    assert (message["label"], message["request"], message["attach"]) == ("train.ipynb", {}, None)
    assert message["kernel_id"] == kernel.file.stem.removeprefix("kernel-")
    assert broker.wait_for("launched")["pid"] == kernel.pid
    assert broker.wait_for("hello")["session"] == "s1"
    env = environ(kernel.pid)
    assert env["CUDA_VISIBLE_DEVICES"] == DEVICE
    assert broker.wait_for("hold")["kind"] == "cell"  # so the agent has connected
    assert "GPU slice" in kernel.run("%gpu")
    assert opened(broker) == 1
    assert "GPU pool" not in kernel.stderr


def test_kernel_without_a_notebook_name_is_labelled_by_folder(
    broker: ScriptedBroker, start: Callable[..., PlainKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    kernel = start(vscode=True)
    folder = Path(f"/proc/{kernel.pid}/cwd").resolve()
    assert broker.wait_for("open")["label"].startswith(f"{folder.name}: Pooled GPU")


def test_an_interrupt_and_a_restart_reach_the_kernel(
    broker: ScriptedBroker, start: Callable[..., PlainKernel]
) -> None:
    kernel = start()
    assert kernel.run("print(1)") == "1\n"
    running = kernel.client.execute("print('begun', flush=True)\nwhile True: pass")
    while "begun" not in str(kernel.client.get_iopub_msg(timeout=60)["content"].get("text")):
        pass
    kernel.process.send_signal(signal.SIGINT)
    reply = kernel.reply(running)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    kernel.close()
    again = start()
    assert again.run("print(2)") == "2\n"
    assert [m["pid"] for m in broker.seen("launched")] == [kernel.pid, again.pid]


def test_kernel_does_not_inherit_ignored_signals(
    broker: ScriptedBroker,
    start: Callable[..., PlainKernel],
    install_spec: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker.attach, broker.env = "lazy", SESSION_GUARD
    name = install_spec("sleeper", ["sleep", "60", "{connection_file}"], language="bash")
    prefix = Path(os.environ["JUPYTER_PATH"])
    # Make a kernelspec without a provisioner, and then a pooled twin of this kernelspec.
    spec = json.loads((prefix / "kernels" / name / "kernel.json").read_text())
    del spec["metadata"]
    spec["argv"] = ["sh", "-c", "sleep 60", "{connection_file}"]
    (prefix / "kernels" / name / "kernel.json").write_text(json.dumps(spec))
    wrap(name, prefix=str(prefix.parent / "twins"))
    monkeypatch.setenv("JUPYTER_PATH", str(prefix.parent / "twins" / "share" / "jupyter"))
    kernel = start("gpupool-sleeper")
    assert broker.wait_for("launched")["pid"] == kernel.pid
    assert broker.wait_for("open")["attach"] == "lazy"
    # The launcher's process executes the kernel a little later. Only then /proc shows the new
    # environment.
    while "GPUPOOL_PAGE" not in environ(kernel.pid):
        assert kernel.process.poll() is None, kernel.stderr
        time.sleep(0.01)
    status = Path(f"/proc/{kernel.pid}/status").read_text()
    ignored = int(next(line.split()[1] for line in status.splitlines() if "SigIgn" in line), 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))
    env = environ(kernel.pid)
    assert env["GPUPOOL_PAGE"] == SESSION_GUARD["GPUPOOL_PAGE"]
    assert env["CUDA_VISIBLE_DEVICES"] == DEVICE


def test_session_gets_the_options_of_the_kernelspec(
    broker: ScriptedBroker, start: Callable[..., PlainKernel], install_spec: Callable[..., str]
) -> None:
    config = {"memory": "2GiB", "priority": "batch", "attach": "manual", "group": "lab"}
    argv = [sys.executable, "-m", LAUNCHER, "--kernel", "mine", "--", "python", *IPYKERNEL]
    kernel = start(install_spec("mine", argv, config))
    assert kernel.run("print(6 * 7)") == "42\n"
    message = broker.wait_for("open")
    assert message["request"] == {"memory": 2 * GiB, "priority": "batch"}
    assert (message["attach"], message["group"]) == ("manual", "lab")
    assert message["label"].endswith(": Test mine")


def test_kernel_environment_does_not_need_this_package(
    broker: ScriptedBroker,
    start: Callable[..., PlainKernel],
    install_spec: Callable[..., str],
    old_python: str,
) -> None:
    argv = [sys.executable, "-m", LAUNCHER, "--kernel", "old", "--", old_python, *IPYKERNEL]
    kernel = start(install_spec("old", argv))
    assert kernel.run("import sys; print(sys.prefix)").strip() == str(Path(old_python).parents[1])
    assert broker.wait_for("hello")["session"] == "s1"
    assert broker.wait_for("launched")["pid"] == kernel.pid


# ------------------------------------------------------------------ under the provisioner


def test_provisioner_starts_the_kernel_without_the_launcher(broker: ScriptedBroker) -> None:
    manager = private_manager(SHIPPED)
    manager.start_kernel()
    try:
        command = Path(f"/proc/{manager.provisioner.pid}/cmdline").read_text().split("\0")
        assert command[:3] == [sys.executable, "-m", "ipykernel_launcher"]
        broker.wait_for("hello")
        assert opened(broker) == 1
    finally:
        manager.shutdown_kernel(now=True)


def test_nested_launcher_opens_no_second_session(
    broker: ScriptedBroker, install_spec: Callable[..., str]
) -> None:
    argv = ["env", sys.executable, "-m", IPYKERNEL_LAUNCHER, "-f", "{connection_file}"]
    manager = private_manager(install_spec("behind", argv))
    manager.start_kernel()
    try:
        assert broker.wait_for("hello")["session"] == "s1"
        assert broker.wait_for("launched")["pid"] == manager.provisioner.pid
        assert opened(broker) == 1
        # If GPUPOOL_OPENED was still set, a kernel that this kernel starts would open no session.
        assert "GPUPOOL_OPENED" not in environ(manager.provisioner.pid)
    finally:
        manager.shutdown_kernel(now=True)


def test_launcher_is_recognised_in_commands() -> None:
    plain = ["python", "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "x"]
    ours = ["python", "-Xfrozen_modules=off", "-m", IPYKERNEL_LAUNCHER, "-f", "x"]
    assert kernel_command(ours) == kernel_command(plain) == plain
    twin = ["/a/bin/python3.11", "-m", LAUNCHER, "--kernel", "k", "--", "R", "-e", "--", "x"]
    assert kernel_command(twin) == ["R", "-e", "--", "x"]
    assert kernel_command([*twin[:6], "python3", "x"]) == ["/a/bin/python3.11", "x"]
    behind = ["conda", "run", "python", "-m", IPYKERNEL_LAUNCHER]
    assert kernel_command(behind) == behind
    assert has_launcher(behind)
    assert not has_launcher(plain)
    assert kernel_command([]) == []


# ------------------------------------------------------------------ no session, no GPU


def test_refused_kernel_runs_without_a_gpu_and_says_why(
    broker: ScriptedBroker, start: Callable[..., PlainKernel]
) -> None:
    def refuse(message: Any) -> None:
        raise RefusedError("Your quota allows no GPU slice.", next_step="Ask your administrator.")

    broker.scripts["open"] = refuse
    why = "Your quota allows no GPU slice. Ask your administrator."
    # The client itself runs inside another pooled kernel, with another session.
    outer = {"GPUPOOL_SESSION": "outer", "GPUPOOL_TOKEN": "t", **SESSION_GUARD}
    outer["LD_PRELOAD"] = ""
    kernel = start(**outer)
    line = f"GPU pool: this kernel runs without a GPU: {why}\n"
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('GPUPOOL_SESSION'))"
    first = kernel.run(show)
    assert sorted(first.splitlines()) == ["-1 None", line.rstrip()]
    assert kernel.run(show) == "-1 None\n"  # the message comes only once
    assert line in kernel.stderr
    assert f"This kernel runs without a GPU: {why}" in kernel.run("%gpu")
    assert broker.seen("hello") == []
    # If this kernel starts a broker or a server, these get the original environment, in which
    # CUDA_VISIBLE_DEVICES is not set.
    assert "GPUPOOL_NO_SESSION" not in kernel.run("%env")
    assert "CUDA_VISIBLE_DEVICES" not in without_guard(environ(kernel.pid))


@pytest.mark.parametrize("before", [None, "", "3"])
def test_hidden_devices_are_restored_for_a_new_session(before: str | None) -> None:
    start = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    env = dict(start)
    hide_devices(env)
    hide_devices(env)  # a child hides them again
    assert env["CUDA_VISIBLE_DEVICES"] == "-1"
    assert without_guard(env) == start


def test_launcher_ignores_a_file_that_is_not_a_socket(
    broker: ScriptedBroker, start: Callable[..., PlainKernel], tmp_path: Path
) -> None:
    fake = tmp_path / "broker.sock"
    fake.write_text("")
    kernel = start(GPUPOOL_SOCKET=str(fake))
    assert "is not a socket, so it is not used." in kernel.run("print(1)")
    assert opened(broker) == 0


def test_wrong_option_of_the_kernelspec_is_named(
    broker: ScriptedBroker, start: Callable[..., PlainKernel], install_spec: Callable[..., str]
) -> None:
    argv = [sys.executable, "-m", LAUNCHER, "--kernel", "mine", "--", "python", *IPYKERNEL]
    kernel = start(install_spec("mine", argv, {"memroy": "2GiB"}))
    assert "sets the option 'memroy'" in kernel.run("print(1)")
    assert opened(broker) == 0


def test_missing_command_is_named_without_a_traceback(
    broker: ScriptedBroker, start: Callable[..., PlainKernel], install_spec: Callable[..., str]
) -> None:
    broker.attach, broker.env = "lazy", SESSION_GUARD
    argv = [sys.executable, "-m", LAUNCHER, "--kernel", "none", "--", "/nowhere/R", "x"]
    kernel = start(install_spec("none", argv, language="R"))
    assert kernel.process.wait(60) == 1
    text = kernel.stderr
    assert "GPU pool: the kernel's command /nowhere/R cannot be started (No such file" in text
    assert "Traceback" not in text
