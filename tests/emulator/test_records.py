# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compares the emulated driver's answers without a device with records of NVIDIA's libraries."""

import copy
import ctypes
import json
import os
import signal

import pytest

from emucuda import library_dir
from tests.driver_records import calls, child, libraries, procaddr, process
from tests.driver_records.record import RECORDS, functions, records, without_device, written
from tests.emulator import parity


def _record(*options, **variables):
    env = {**{k: v for k, v in os.environ.items() if k != "EMUCUDA_MACHINE"}, **variables}
    done = process.run(str(library_dir()), *options, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def newest():
    return records()[-1]


@pytest.fixture(scope="module")
def newest_without_device():
    return [record for record in records() if without_device(record)][-1]


@pytest.fixture(scope="module")
def alone(libraries):
    """Return the record of the emulated driver, made without an emulated device."""
    return _record()


def _excused(found):
    return [difference for difference in found if any(r.covers(difference) for r in parity.REASONS)]


def test_driver_without_a_machine_answers_like_nvidia(newest, newest_without_device, alone):
    found = list(parity.differences(newest, alone))
    found += parity.differences_without_device(newest_without_device, newest, alone)
    excused = _excused(found)
    assert [str(difference) for difference in found if difference not in excused] == []
    # Each reason must explain a difference. An unused reason could hide a new difference later.
    idle = [r for r in parity.REASONS if not any(r.covers(difference) for difference in found)]
    assert idle == []


def test_a_record_does_not_differ_from_itself(newest):
    assert list(parity.differences(newest, newest)) == []


def test_emulated_driver_has_only_functions_of_nvidia(newest, alone):
    """The emulated driver has the version of the newest record, and none but its functions.

    Clients conclude from the version which functions exist.
    """
    assert alone["cuda"] == newest["cuda"]
    assert functions(alone) <= functions(newest)
    assert {*alone["nvml_functions"]} <= {*newest["nvml_functions"]}
    common = functions(alone) & functions(newest)
    assert len(common) > 250
    assert len(alone["procaddr"].keys() & newest["procaddr"].keys()) > 200


def test_driver_has_the_same_names_and_errors_with_a_machine(newest, emulated):
    machine = emulated("1x64MiB,context=1MiB")
    found = list(parity.differences(newest, _record("--anywhere", "--quick", **machine.env)))
    assert [str(d) for d in found if d not in _excused(found)] == []


def test_records_say_whether_there_was_a_device():
    found = records()
    assert [record["device"] for record in found] == [False, False, False, None]
    assert len({record["driver"] for record in found}) == len(found)
    for record in found:
        assert without_device(record) == any(calls.AFTER in kind for kind in record["calls"])
        assert record["driver"].split(".")[0].isdigit()
        path = RECORDS / f"nvidia-{record['driver']}.json"
        assert path.read_text() == written(record)
        assert path.stat().st_size < 80_000


def _forms_are_only_added(older, newer):
    for name in older["procaddr"]:
        for flags in procaddr.FLAGS:
            text = procaddr.entry(older["procaddr"], name, flags)
            assert procaddr.entry(newer["procaddr"], name, flags).startswith(text)


@pytest.mark.parametrize("oldest", [0, 1])
def test_drivers_without_a_device_agree(oldest, newest_without_device):
    """NVIDIA's drivers give the same answers to single questions, except to the three below.

    A later driver only adds forms to a name for cuGetProcAddress. It changes no older form.
    """
    older, newer = records()[oldest], newest_without_device
    differ = {k for k in newer["arguments"] if newer["arguments"][k] != older["arguments"][k]}
    assert differ <= {
        "cuDriverGetVersion after a failed cuInit",
        "after a failed cuInit, in a forked child: cuInit(0), then a count",
        "threads before and after a failed cuInit",
    }
    assert newer["nvml_arguments"] == older["nvml_arguments"]
    _forms_are_only_added(older, newer)


def test_newest_driver_refuses_versions_above_its_own(newest, newest_without_device):
    older = newest_without_device
    differ = {k for k in newest["arguments"] if newest["arguments"][k] != older["arguments"][k]}
    assert {k.rpartition(" at ")[2] for k in differ} == {"99000", "2147483647"}
    assert all(newest["arguments"][k] == [1, *["untouched"] * (1 + ("v2" in k))] for k in differ)
    assert newest["procaddr_refused_from"] == newest["cuda"] + procaddr.VERSIONS.step
    assert older["procaddr_refused_from"] is None
    differ = {
        k for k, answer in newest["nvml_arguments"].items() if answer != older["nvml_arguments"][k]
    }
    assert differ == {"nvmlShutdown before nvmlInit"}
    _forms_are_only_added(older, newest)


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("arguments", lambda r: r["arguments"].update({"cuInit(1)": [0]})),
        ("cuda_errors", lambda r: r["cuda_errors"].update({"2": ["CUDA_ERROR", "out of memory"]})),
        ("cuda_errors", lambda r: r["cuda_errors"].update({"5": r["cuda_errors"]["others"]})),
        ("nvml_errors", lambda r: r["nvml_errors"].pop("3")),
        ("procaddr", lambda r: r["procaddr"].update({"cuInit": "2010:~"})),
        ("procaddr", lambda r: r["procaddr"].update({"cuCtxCreate": "2000:~ 3020:~_v2"})),
        ("procaddr", lambda r: r["procaddr_older_form_differs"].append("cuInit 2000 0")),
        ("procaddr", lambda r: r.update({"procaddr_refused_from": None})),
        ("calls: before init, zero", lambda r: r["calls"]["before init, zero"]["1"].clear()),
        (
            "calls: before init, buffer but for one",
            lambda r: r["calls"]["before init, buffer but for one"].clear(),
        ),
        (
            "nvml_calls: before init, buffer",
            lambda r: r["nvml_calls"]["before init, buffer"].update({"0": ["nvmlShutdown"]}),
        ),
    ],
)
def test_a_changed_answer_is_a_difference(section, change, newest):
    other = copy.deepcopy(newest)
    change(other)
    assert section in {difference.section for difference in parity.differences(newest, other)}


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("arguments", lambda r: r["arguments"].update({"cuInit(0) at first": [999]})),
        (
            "nvml_arguments",
            lambda r: r["nvml_arguments"].update(
                {"nvmlInitWithFlags(0x0), nvmlShutdown()": [0, 0]}
            ),
        ),
        (
            "calls: after a failed init, zero",
            lambda r: r["calls"]["after a failed init, zero"].clear(),
        ),
    ],
)
def test_changed_answer_in_a_record_without_device_is_reported(
    section, change, newest, newest_without_device
):
    other = copy.deepcopy(newest_without_device)

    def sections():
        found = parity.differences_without_device(newest_without_device, newest, other)
        return [difference.section for difference in found].count(section)

    before = sections()
    change(other)
    assert sections() > before


def test_checks_made_before_cuinit_are_also_made_if_it_fails(newest, newest_without_device):
    """A check that the later driver makes before cuInit is also expected after a failed cuInit."""
    older = newest_without_device
    found = parity.differences_without_device(older, newest, older)
    real = {difference.question: difference.real for difference in found}
    assert (real["cuCtxGetDevice"], real["cuKernelGetName"]) == ("1", "400")
    assert "cuInit" not in real  # the later driver's record has no answer for this call


# ---------------------------------------------------------------------- the recorder


def _end():
    os.kill(os.getpid(), signal.SIGSEGV)


def _leave():
    os._exit(3)


def _never():
    signal.pause()


def _fail():
    raise ValueError("this")


def test_the_recorder_records_crashes_and_rejects_hangs(capfd):
    assert child.ask(_end) == "signal 11"
    assert child.ask(_leave) == "exit 3"
    assert child.ask(lambda: [os.write(1, b"noise"), None]) == [5, None]
    with pytest.raises(RuntimeError, match=r"_fail.*ValueError\('this'\)"):
        child.ask(_fail)
    with pytest.raises(child.Hung, match="_never"):
        child.ask(_never, bound=0.1)
    assert capfd.readouterr() == ("", "")


def _address_and_text():
    at = calls.zeroed()
    return [at, ctypes.string_at(at, 1 << 16).hex()]


def test_the_zeroed_buffer_has_a_fixed_address():
    """Some calls read the buffer's address as a count. So a record depends on this address."""
    (at, text), second = child.ask(_address_and_text), child.ask(_address_and_text)
    assert second == [at, text]
    assert text == "00" * (1 << 16)
    assert ctypes.c_int32(at).value > 0


def test_debugger_functions_are_listed_and_never_called(newest):
    listed = {name for name in functions(newest) if name.startswith("cudbg")}
    assert "cudbgApiInit" in listed
    assert listed <= {*newest["never_given"]}
    kinds = [kind for kind in newest["calls"] if calls.asked("cuCtxGetCurrent", kind)]
    assert kinds == [*newest["calls"]]
    assert not any(calls.asked(name, kind, anywhere=False) for kind in kinds for name in listed)


def test_text_of_forms_maps_each_driver_version_to_a_symbol():
    text = "2000:~ 3020:~_v2 12000:cuOther"
    found = [procaddr.forms_at(text, "cuX", v) for v in (1990, 2000, 3010, 3020, 11990, 12000)]
    assert found == ["0/2", "cuX", "cuX", "cuX_v2", "cuX_v2", "cuOther"]


def test_the_recorder_reports_a_library_it_cannot_load(tmp_path):
    for name in (libraries.CUDA, libraries.NVML):
        (tmp_path / name).write_bytes(b"no library")
    done = process.run(str(tmp_path), env={**os.environ}, timeout=30)
    assert done.returncode == 1
    assert "libcuda.so.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_recorder_refuses_a_driver_with_a_device(emulated):
    machine = emulated("1x64MiB,context=1MiB")
    done = process.run(str(library_dir()), env={**os.environ, **machine.env}, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cuInit does not answer 100" in done.stderr
