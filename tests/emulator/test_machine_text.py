# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A machine's description as text, and the variables with which a process uses the machine."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from emucuda import (
    EmulatorError,
    EmulatorNotBuilt,
    Machine,
    environment,
    library_dir,
    parse_machine,
    remove_state,
    specification,
)

GIB = 1 << 30

GOOD = {
    "2x16GiB": Machine(2, 16 * GIB),
    "1x1TiB": Machine(1, 1 << 40),
    "64x80G": Machine(64, 80 * GIB),
    "2x1.6GiB": Machine(2, 1717567488),
    "2x16GB": Machine(2, 15999172608),
    "1x500000kB": Machine(1, 499122176),
    "02x16GiB": Machine(2, 16 * GIB),
    "1x17179869184": Machine(1, 16 * GIB),
    "1x17179869184B": Machine(1, 16 * GIB),
    "1x128M,context=16MiB": Machine(1, 128 << 20, context=16 << 20),
    "2x16GiB,context=256MiB,bandwidth=8GB/s": Machine(2, 16 * GIB, 256 << 20, 8 * 10**9),
    "2x16GiB,bandwidth=1MB/s": Machine(2, 16 * GIB, bandwidth=10**6),
    "2x16GiB,bandwidth=0": Machine(2, 16 * GIB),
    "2x16GiB,bandwidth=1.5GiB": Machine(2, 16 * GIB, bandwidth=3 * GIB // 2),
    "2x16GiB,reserved=512MiB,context=0": Machine(2, 16 * GIB, 0, 0, 512 << 20),
    "1x0.125GiB,context=1": Machine(1, 128 << 20, 1),
    "2x16GiB,profile=h100": Machine(2, 16 * GIB, profile="h100"),
    "2x16GiB,profile=cpu": Machine(2, 16 * GIB),
    "1x16GiB,profile=rtx4090,bandwidth=8GB/s": Machine(
        1, 16 * GIB, bandwidth=8 * 10**9, profile="rtx4090"
    ),
}
BAD = [
    "",
    "2",
    "2x",
    "x16GiB",
    "0x1GiB",
    "65x1GiB",
    "999x1GiB",
    "99999999999999999999x1GiB",
    "-1x1GiB",
    " 2x16GiB",
    "2x16GiB ",
    "2 x 16GiB",
    "2X16GiB",
    "2x16parsec",
    "2x16gib",
    "2x16 GiB",
    "2x.5GiB",
    "2x1.GiB",
    "2x1.1234567891GiB",
    "2x1e3GiB",
    "2x-16GiB",
    "2xGiB",
    "2x0",
    "2x1MiB",
    "2x64MiB",
    "1x2TiB",
    "64x1TiB",
    "1x9999999999999999999",
    "2x16GiB,",
    "2x16GiB,context",
    "2x16GiB,context=",
    "2x16GiB,context=16GiB",
    "2x16GiB,context=1/s",
    "2x16GiB,contxt=1MiB",
    "2x16GiB,context=1MiB,context=1MiB",
    "2x16GiB,reserved=15GiB,context=1GiB",
    "2x16GiB,bandwidth=fast",
    "2x16GiB,bandwidth=8",
    "2x16GiB,bandwidth=999kB/s",
    "2x16GiB,profile",
    "2x16GiB,profile=",
    "2x16GiB,profile=h10",
    "2x16GiB,profile=h1000",
    "2x16GiB,profile=cpu,profile=cpu",
    "2x16GiB;context=1MiB",
    "2x١GiB",
]

PARSE_IN_C = """
import ctypes, json, sys
parse = ctypes.CDLL("libcuda.so.1").emucuda_parse
found = []
for text in json.load(sys.stdin):
    out = (ctypes.c_uint64 * 6)()
    found.append(None if parse(text.encode(), out) else list(out))
print(json.dumps(found))
"""


@pytest.mark.parametrize("text", GOOD)
def test_machine_text_is_read_and_written(text):
    machine = parse_machine(text)
    assert machine == GOOD[text]
    assert parse_machine(str(machine)) == machine


@pytest.mark.parametrize("text", BAD)
def test_bad_machine_text_is_refused_with_an_example(text):
    with pytest.raises(EmulatorError) as info:
        parse_machine(text)
    message = str(info.value)
    assert message.endswith((".", "?"))
    assert any(word in message for word in ("Write", "write", "Ask", "mean"))


def test_a_misspelt_option_suggests_the_nearest():
    with pytest.raises(EmulatorError, match="Did you mean 'bandwidth'"):
        parse_machine("2x16GiB,bandwith=8GB/s")


def test_c_and_python_read_the_same_machines(emulated):
    texts = [*GOOD, *BAD]
    done = subprocess.run(
        [sys.executable, "-c", PARSE_IN_C],
        input=json.dumps(texts),
        env=emulated().env,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    names = list(specification.PROFILES)
    want = [
        [*dataclasses.astuple(GOOD[t])[:-1], names.index(GOOD[t].profile)] if t in GOOD else None
        for t in texts
    ]
    found = json.loads(done.stdout)
    assert dict(zip(texts, found, strict=True)) == dict(zip(texts, want, strict=True))


def test_the_environment_keeps_the_library_path(tmp_path):
    base = {"LD_LIBRARY_PATH": "/opt/one::/opt/two"}
    env = environment("2x16GiB", tmp_path / "state", base)
    folder = str(library_dir())
    assert env == {
        "LD_LIBRARY_PATH": f"{folder}:/opt/one:/opt/two",
        "EMUCUDA_MACHINE": "2x16GiB",
        "EMUCUDA_STATE": str(tmp_path / "state"),
    }
    assert environment(Machine(2, 16 * GIB), tmp_path / "state", env) == env
    assert base == {"LD_LIBRARY_PATH": "/opt/one::/opt/two"}


def test_missing_libraries_name_the_build_command(monkeypatch, tmp_path):
    monkeypatch.setattr(specification, "__file__", str(tmp_path / "specification.py"))
    with pytest.raises(EmulatorNotBuilt, match=r"python -m emucuda\.build"):
        library_dir()


INIT = """
from cuda.bindings import driver as D
import pynvml
try:
    pynvml.nvmlInit()
    nvml = 0
except pynvml.NVMLError as error:
    nvml = error.value
print(int(D.cuInit(0)[0]), nvml)
"""


def test_without_a_machine_there_is_no_device(emulated):
    machine = emulated()
    assert machine.run(INIT, EMUCUDA_MACHINE="") == "100 9"


def test_the_driver_reports_bad_machine_text(emulated):
    done = subprocess.run(
        [sys.executable, "-c", INIT],
        env={**emulated().env, "EMUCUDA_MACHINE": "2x16parsec"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == "100 9"
    assert "'16parsec' is not a size" in done.stderr


def test_one_state_directory_holds_only_one_machine_at_a_time(emulated):
    machine = emulated("2x1GiB")
    child = machine.target()
    assert child.do("context(); _ = 1") == 1
    assert machine.run(INIT, EMUCUDA_MACHINE="2x2GiB") == "803 18"
    child.kill()
    # No process has used the old machine.
    assert machine.run(INIT, EMUCUDA_MACHINE="2x2GiB") == "0 0"


UUIDS = """
import pynvml
pynvml.nvmlInit()
print([pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(2)])
"""


def test_state_directory_determines_the_uuids(emulated):
    one, two = emulated(), emulated()
    first = one.run(UUIDS)
    remove_state(one.state_dir)
    assert not Path(one.state_dir).exists()
    assert one.run(UUIDS) == first
    assert two.run(UUIDS) != first
