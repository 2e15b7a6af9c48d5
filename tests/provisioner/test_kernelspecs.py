# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pooled twins of kernelspecs, and the kernelspec that the package installs."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import private_manager
from ipykernel.kernelspec import RESOURCES
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.provisioning import KernelProvisionerFactory
from scripted_broker import ScriptedBroker

from jupyter_gpupool.cluster.kernel_host import KernelFiles, command_of, kernelspec
from jupyter_gpupool.kernelspecs import KernelSpecError, list_pooled, unwrap, wrap
from jupyter_gpupool.remote_provisioner import GPUPoolRemoteProvisioner

SHIPPED = Path(__file__).parents[2] / "share/jupyter/kernels/gpupool-python3"


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    return str(tmp_path)


def install(prefix: str, name: str, **spec: Any) -> Path:
    folder = Path(prefix) / "share" / "jupyter" / "kernels" / name
    folder.mkdir(parents=True)
    whole = {"argv": ["R", "--args", "{connection_file}"], "display_name": "R", **spec}
    (folder / "kernel.json").write_text(json.dumps(whole))
    (folder / "logo-svg.svg").write_text("<svg/>")
    return folder


def test_twin_keeps_all_other_fields_of_its_kernelspec(prefix: str) -> None:
    install(
        prefix,
        "ir",
        env={"R_HOME": "{resource_dir}"},
        interrupt_mode="message",
        metadata={"debugger": True},
    )
    folder = wrap("ir", prefix=prefix)
    assert folder.name == "gpupool-ir"
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec == {
        "argv": [
            *(sys.executable, "-m", "jupyter_gpupool.launcher", "--kernel", "gpupool-ir"),
            *("--", "R", "--args", "{connection_file}"),
        ],
        "display_name": "R (Pooled GPU)",
        "env": {"R_HOME": "{resource_dir}"},
        "interrupt_mode": "message",
        "metadata": {
            "debugger": True,
            "kernel_provisioner": {"provisioner_name": "gpupool-provisioner", "config": {}},
            "gpupool": {"wraps": "ir"},
        },
    }
    assert (folder / "logo-svg.svg").read_text() == "<svg/>"
    (twin,) = [kernel for kernel in list_pooled() if kernel.wraps]
    assert (twin.name, twin.display_name, twin.wraps) == ("gpupool-ir", "R (Pooled GPU)", "ir")
    wrap("ir", prefix=prefix, display_name="R, pooled")  # a second wrap replaces the first twin
    assert json.loads((folder / "kernel.json").read_text())["display_name"] == "R, pooled"
    unwrap("gpupool-ir")
    assert not folder.exists()
    assert "ir" in KernelSpecManager().find_kernel_specs()


def test_a_twin_of_the_native_kernel_runs(prefix: str, broker: ScriptedBroker) -> None:
    folder = wrap("python3", prefix=prefix, new_name="My.Twin")
    assert folder.name == "my.twin"
    manager = private_manager("my.twin")
    manager.start_kernel()
    try:
        broker.wait_for("hello")
    finally:
        manager.shutdown_kernel(now=True)


def test_the_native_kernel_needs_no_kernelspec(prefix: str, monkeypatch) -> None:
    folder = Path(RESOURCES)
    assert not (folder / "kernel.json").exists()
    monkeypatch.setattr(KernelSpecManager, "find_kernel_specs", lambda _: {"python3": str(folder)})
    monkeypatch.setattr(KernelSpecManager, "_find_spec_directory", lambda *_: str(folder))
    twin = json.loads((wrap("python3", prefix=prefix) / "kernel.json").read_text())
    assert twin["argv"][0] == sys.executable
    assert "ipykernel_launcher" in twin["argv"]


def test_wrapped_remote_kernel_uses_the_remote_provisioner(prefix: str) -> None:
    folder = wrap("python3", prefix=prefix, remote=True)
    assert folder.name == "gpupool-remote-python3"
    manager = KernelManager(kernel_name=folder.name)
    factory = KernelProvisionerFactory.instance()
    found = factory.create_provisioner_instance("k", manager.kernel_spec, parent=manager)
    assert type(found) is GPUPoolRemoteProvisioner
    assert manager.kernel_spec.display_name.endswith(" (Pooled GPU of the cluster)")
    # The machine of the cluster that hosts the kernel reads the same kernelspec, and finds the
    # kernel's own command in it.
    assert command_of(kernelspec({"kernel": folder.name}, "m1"), KernelFiles("k"), "m1")[:3] == [
        *(sys.executable, "-m", "ipykernel_launcher")
    ]
    assert folder.name in [kernel.name for kernel in list_pooled()]
    with pytest.raises(KernelSpecError, match="uses the GPU pool already"):
        wrap(folder.name, prefix=prefix)
    unwrap(folder.name)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ir", {"remote": True}, "'ir' does not say that its kernel can encrypt messages"),
        ("pyton3", {}, "There is no kernelspec 'pyton3'. Did you mean 'python3'?"),
        ("gpupool-python3", {}, "uses the GPU pool already."),
        (
            "remote",
            {},
            (
                "'k8s-provisioner' starts the kernels of the kernelspec 'remote', but only kernels "
                "that start on this machine"
            ),
        ),
        ("ir", {"new_name": "a b"}, "'a b' is not a kernelspec name."),
        ("ir", {"new_name": "python3"}, "The kernelspec 'python3' exists already"),
        ("ir", {"new_name": "gpupool-python3"}, "wrap` did not make it"),
        ("broken", {}, "cannot be read"),
    ],
)
def test_unsuitable_kernelspec_is_refused_with_the_reason(
    prefix: str, name: str, options: dict[str, Any], message: str
) -> None:
    install(prefix, "ir")
    install(
        prefix, "remote", metadata={"kernel_provisioner": {"provisioner_name": "k8s-provisioner"}}
    )
    (install(prefix, "broken") / "kernel.json").write_text("{")
    before = sorted(KernelSpecManager().find_kernel_specs())
    with pytest.raises(KernelSpecError) as caught:
        wrap(name, prefix=prefix, **options)
    assert message in str(caught.value)
    assert sorted(KernelSpecManager().find_kernel_specs()) == before


def test_folder_without_write_permission_is_named(prefix: str) -> None:
    install(prefix, "ir")
    with pytest.raises(KernelSpecError, match="could not be written"):
        wrap("ir", prefix="/proc/nowhere")


@pytest.mark.parametrize("name", ["nothing", "ir", "gpupool-python3"])
def test_only_twins_can_be_unwrapped(prefix: str, name: str) -> None:
    install(prefix, "ir")
    with pytest.raises(KernelSpecError):
        unwrap(name)
    assert "ir" in KernelSpecManager().find_kernel_specs()


def test_shipped_kernelspec_has_its_name_command_and_logos() -> None:
    spec = json.loads((SHIPPED / "kernel.json").read_text())
    assert spec["display_name"] == "Pooled GPU"
    manager = KernelManager(kernel_name="gpupool-python3")
    assert manager.format_kernel_cmd()[0] == sys.executable
    for size in (32, 64):
        data = (SHIPPED / f"logo-{size}x{size}.png").read_bytes()
        assert struct.unpack(">II", data[16:24]) == (size, size)
    assert "<svg" in (SHIPPED / "logo-svg.svg").read_text()
