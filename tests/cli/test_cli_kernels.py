# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``list``, ``wrap``, ``unwrap``: their output, and the files that they write and remove."""

from __future__ import annotations

import json

import pytest

from jupyter_gpupool.cli import main


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Make a data folder with an R kernel; return the folder of kernelspecs."""
    folder = tmp_path / "data" / "kernels"
    for name in ("ir", "gpupool-python3"):
        (folder / name).mkdir(parents=True)
    stanza = {"kernel_provisioner": {"provisioner_name": "gpupool-provisioner"}}
    spec = {"argv": ["python", "-m", "ipykernel_launcher"], "display_name": "P", "language": "p"}
    (folder / "gpupool-python3/kernel.json").write_text(json.dumps({**spec, "metadata": stanza}))
    ir = folder / "ir"
    (ir / "kernel.json").write_text(
        json.dumps({"argv": ["R", "{connection_file}"], "display_name": "R", "language": "R"})
    )
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_PATH", "")
    return folder


def test_wrapped_kernel_is_listed_until_it_is_unwrapped(kernels, capsys):
    assert main(["wrap", "python3", "--user", "--name", "mine", "--display-name", "Mine"]) == 0
    twin = kernels / "mine"
    out = capsys.readouterr().out
    assert out == f"Kernel 'mine' uses the pool: {twin}\n"
    assert json.loads((twin / "kernel.json").read_text())["display_name"] == "Mine"

    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KERNEL", "SHOWN", "AS", "WRAPS", "FOLDER"]
    row = next(line for line in lines if line.startswith("mine "))
    assert row.split() == ["mine", "Mine", "python3", str(twin)]

    assert main(["unwrap", "mine"]) == 0
    assert capsys.readouterr().out == "Removed 'mine'. Open kernels keep running.\n"
    assert not twin.exists()


def test_wrap_says_when_an_r_kernel_gets_a_slice(kernels, capsys):
    assert main(["wrap", "ir", "--user", "--name", "pooled-r"]) == 0
    assert capsys.readouterr().out == (
        f"Kernel 'pooled-r' uses the pool: {kernels / 'pooled-r'}\n"
        "Note: this is not an IPython kernel, so it has no %gpu. The guard asks for a slice at the "
        "kernel's first CUDA call.\n`jupyter gpupool doctor` says whether this pool has the guard. "
        "In a pool without the guard, this kernel runs without a GPU.\n"
    )


def test_wrap_writes_to_the_given_prefix(kernels, tmp_path, capsys):
    assert main(["wrap", "python3", "--name", "mine", "--prefix", str(tmp_path / "p")]) == 0
    assert (tmp_path / "p/share/jupyter/kernels/mine/kernel.json").exists()


def test_wrap_for_a_cluster_says_each_machine_needs_the_kernel(kernels, capsys):
    assert main(["wrap", "python3", "--user", "--remote"]) == 0
    twin = kernels / "gpupool-remote-python3"
    assert capsys.readouterr().out == (
        f"Kernel 'gpupool-remote-python3' uses the pool: {twin}\n"
        "Every machine of the cluster needs this kernel under this name, too.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["wrap", "irr"],
            "There is no kernelspec 'irr'. Did you mean 'ir'? `jupyter kernelspec list` shows all.",
        ),
        (
            ["wrap", "ir", "--name", "a b"],
            ("'a b' is not a kernelspec name. Use letters, digits, dots, hyphens and underscores."),
        ),
        (
            ["wrap", "gpupool-python3"],
            (
                "The kernelspec 'gpupool-python3' uses the GPU pool already. "
                "`jupyter gpupool list` shows all pooled kernelspecs."
            ),
        ),
        (
            ["unwrap", "ir"],
            "`jupyter gpupool wrap` did not make the kernelspec 'ir', so it is not removed.",
        ),
    ],
)
def test_impossible_request_is_refused_and_changes_no_file(kernels, capsys, arguments, message):
    before = sorted(kernels.rglob("*"))
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"jupyter gpupool: {message}\n"
    assert sorted(kernels.rglob("*")) == before
