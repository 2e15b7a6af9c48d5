# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The device processes run in a separate Python, because only that one has NVIDIA's packages."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from jupyter_gpupool import demo
from jupyter_gpupool.devices.nvidia import interpreter
from jupyter_gpupool.errors import GPUPoolError
from tests import marks

from .kit import KERNEL_NAME

ROOT = Path(__file__).parents[2]

#: A ``sitecustomize`` module: each Python process runs it at its start if its folder is on
#: PYTHONPATH. In such a process, all imports of NVIDIA's packages fail.
BLOCK = """
import sys

class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("cuda", "pynvml", "numba_cuda"):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Blocker)
"""

#: A program that runs two notebooks on a GPU that has room for only one. The tests of this file run
#: it in a Python without NVIDIA's packages.
NOTEBOOKS = """
import sys, tempfile
from jupyter_client import KernelManager

for name in ("cuda", "pynvml"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can be imported here")

CELL = '''
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
def setup(number):
    global address, context, data
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    data = bytes([number]) * (16 << 20)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
    call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
def check():
    back = ctypes.create_string_buffer(len(data))
    call("cuMemcpyDtoH_v2", back, address, ctypes.c_size_t(len(data)))
    assert back.raw[:-1] == data[:len(back.raw) - 1]
'''

def run(client, code):
    reply = client.execute_interactive(code, timeout=60, allow_stdin=False)
    assert reply["content"]["status"] == "ok", reply["content"]

def start():
    file = tempfile.mkdtemp(prefix="gpk") + "/k.json"
    manager = KernelManager(kernel_name=sys.argv[1], transport="ipc", connection_file=file)
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    return manager, client

kernels = [start() for _ in range(2)]
try:
    for number, (_, client) in enumerate(kernels):
        run(client, CELL)
        run(client, f"setup({number + 1})")
    for _, client in kernels:
        run(client, "check()")
    run(kernels[0][1], "import sys; assert not {'cuda.core', 'pynvml'} & {*sys.modules}")
finally:
    for manager, client in kernels:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
print("all bytes are right")
"""


@pytest.fixture
def folder():
    with marks.short_folder() as folder:
        yield folder


@pytest.fixture
def blocked(folder):
    """Return ``configure(**options)``, which writes a configuration and returns variables.

    With these variables, a process cannot import NVIDIA's packages.
    """
    (folder / "block").mkdir()
    (folder / "block" / "sitecustomize.py").write_text(BLOCK)
    (folder / "config").mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith("GPUPOOL_")}
    paths = [str(folder / "block"), str(ROOT), env.get("PYTHONPATH", "")]
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        marks.MARK: str(folder),
        "GPUPOOL_SOCKET": str(folder / "b.sock"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "XDG_DATA_HOME": str(folder / "data"),
    }

    def configure(**options):
        found = {
            "emulate": "1x512MiB,context=32MiB",
            "default_memory": "320MiB",
            "state_dir": str(folder / "state"),
            "idle_timeout": 3600,
            "sample_interval": 0.2,
            "resume_headroom": 0,
            "linger": 0,
            **options,
        }
        text = json.dumps({"GPUPool": found})
        (folder / "config" / "jupyter_server_config.json").write_text(text)
        return env

    return configure


def second_environment(folder: Path) -> Path:
    """Make an environment that can import this environment's packages; return its interpreter."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "tested.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def notebooks(env):
    return subprocess.run(
        [sys.executable, "-c", NOTEBOOKS, KERNEL_NAME],
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_only_device_processes_need_nvidia_packages(installed, folder, blocked):
    env = blocked()
    second_environment(folder / "data" / "gpupool" / "devices")
    done = notebooks(env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all bytes are right\n")
    doctor = subprocess.run(
        [sys.executable, "-m", "jupyter_gpupool.cli", "doctor", "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    findings = {f["name"]: f for f in json.loads(doctor.stdout)}
    assert findings["device python"]["verdict"] == "ok"
    assert str(folder) in findings["device python"]["message"]
    assert "cuda-bindings" in findings["NVIDIA packages"]["message"]
    (journal,) = (folder / "state").glob("*.sqlite")
    with sqlite3.connect(journal) as database:
        kinds = [row[0] for row in database.execute("SELECT kind FROM events")]
    assert min(kinds.count("suspend"), kinds.count("resume")) >= 2, kinds


def test_kernel_names_the_command_for_missing_packages(installed, folder, blocked):
    done = notebooks(blocked())
    assert done.returncode
    assert "nvidia-ml-py" in done.stderr
    assert "Run: jupyter gpupool install-devices" in done.stderr


def test_wrong_path_of_device_python_is_named_in_the_error(installed, folder, blocked):
    done = notebooks(blocked(device_python="/nowhere/bin/python"))
    assert done.returncode
    assert "c.GPUPool.device_python is /nowhere/bin/python" in done.stderr


def test_device_processes_run_in_the_configured_python(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert interpreter.choose() == sys.executable
    of_user = second_environment(tmp_path / "data" / "gpupool" / "devices")
    assert interpreter.choose() == str(of_user)
    of_prefix = second_environment(tmp_path / "prefix" / "share" / "gpupool" / "devices")
    assert interpreter.choose() == str(of_prefix)
    assert interpreter.choose(str(of_user)) == str(of_user)
    of_prefix.unlink()  # as if somebody had removed this interpreter
    assert interpreter.choose() == str(of_user)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cuda-bindings": "12.9.4"}, "cuda-bindings is 12.9.4 and must be >=13.0.2"),
        ({"cuda-bindings": "13.3.0"}, "cuda-bindings is 13.3.0 and must be"),
        ({"cuda-bindings": "14.0.0"}, "cuda-bindings is 14.0.0 and must be"),
        ({"cuda-core": "0.7.0"}, "cuda-core is 0.7.0 and must be >=1.0"),
        ({"cuda-core": "", "nvidia-ml-py": ""}, "cuda-core and nvidia-ml-py are not installed."),
        ({"cuda-bindings": "13.0.2"}, ""),
        ({"cuda-bindings": "13.10.0.post1"}, ""),
    ],
)
def test_unsuitable_versions_are_named(wrong, said):
    good = {"cuda-core": "1.2.2", "cuda-bindings": "13.5.0", "nvidia-ml-py": "13.580.65"}
    assert interpreter.problem(good) == ""
    assert interpreter.problem({**good, **wrong}).startswith(said)
    assert bool(interpreter.problem({**good, **wrong})) == bool(said)


def test_message_describes_an_interpreter_that_does_not_work(tmp_path):
    assert interpreter.ask("/nowhere/python").problem.startswith("It cannot be started")
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'no such library' >&2\nexit 1\n")
    script.chmod(0o755)
    assert interpreter.ask(str(script)).problem == "It does not work: no such library."


def test_requirements_of_devices_are_the_same_in_all_files():
    """Compare the requirements of device processes in four places.

    These are the extra ``devices`` of the package, the lock file, the input of the lock file, and
    the check of the device processes.
    """
    text = (ROOT / "pyproject.toml").read_text()
    wanted = [name + spec for name, spec in interpreter.RANGES.items()]
    assert f"devices = {json.dumps(wanted)}" in text
    assert (ROOT / "requirements" / "devices.in").read_text().split() == wanted
    base = text.partition("\ndependencies = [")[2].partition("]")[0]
    assert "cuda" not in base
    assert "nvidia" not in base
    locked = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    pinned = interpreter.REQUIREMENTS.read_text().splitlines()
    for line in pinned:
        assert line in locked or line.startswith(("numpy", "cuda-pathfinder", "backports")), line
    for name in interpreter.RANGES:
        assert any(line.startswith(f"{name}==") for line in pinned)


@pytest.mark.parametrize(
    ("present", "asked", "variable", "machine", "said"),
    [
        (False, "", "", "2x16GiB", "No NVIDIA driver here: emulating 2x16GiB (EMULATED"),
        (True, "", "", "", "Using the NVIDIA driver of this machine."),
        (False, "", "1x8GiB", "1x8GiB", "Emulating 1x8GiB (EMULATED"),
        (
            True,
            "",
            "1x8GiB",
            "1x8GiB",
            "because GPUPOOL_EMULATE asks for it. This machine's NVIDIA",
        ),
        (True, "1x4GiB", "1x8GiB", "1x4GiB", "because --emulate asks for it. This machine's"),
    ],
)
def test_the_demo_says_why_it_emulates(monkeypatch, present, asked, variable, machine, said):
    monkeypatch.setattr(demo.vendor, "driver_present", lambda: present)
    monkeypatch.setenv("GPUPOOL_EMULATE", variable)
    found, text = demo.choose_machine(asked)
    assert found == machine
    assert said in text
    assert ("No NVIDIA driver" in text) == (not present and not asked and not variable)


def test_demo_names_packages_that_its_notebooks_lack(monkeypatch):
    def version(name):
        raise demo.PackageNotFoundError(name)

    monkeypatch.setattr(demo, "version", version)
    with pytest.raises(GPUPoolError, match="cuda-core, cuda-bindings, numpy") as error:
        demo.run_demo()
    assert "pip install 'jupyter_gpupool[devices]'" in error.value.next_step
