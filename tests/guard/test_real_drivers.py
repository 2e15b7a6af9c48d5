# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compares the answers of NVIDIA's own libraries with the guard's lists and the guard's answers.

The repository does not have these libraries. tests/driver_records has their exports and their
answers to cuGetProcAddress, and these tests make a driver from such a record.
"""

import json
import re

import pytest

from jupyter_gpupool.guard import _generate as generator
from jupyter_gpupool.guard import build as guard_build
from tests.driver_records import procaddr
from tests.driver_records.record import functions, records

PLAIN, PER_THREAD = range(2)

#: The exported functions that the guard does not replace. A debugger finds them by name in the
#: debugged process, to call them or to set breakpoints. It needs the driver's own functions.
OF_DEBUGGERS = {
    "cudbgApiAttach", "cudbgApiDetach", "cudbgApiInit", "cudbgMain", "cudbgReportDriverApiError",
    "cudbgReportDriverInternalError",
}  # fmt: skip


@pytest.fixture(scope="module")
def entries():
    return {entry.symbol: entry for entry in generator.read(guard_build.ENTRIES)}


@pytest.fixture(scope="module", params=records(), ids=lambda record: record["driver"])
def record(request):
    return request.param


@pytest.fixture(scope="module")
def driver(record):
    """Return what the record says about a driver.

    ``answers`` has two lists for each function: one for the default flags, and one for the flag of
    per-thread streams. Each item of a list names a variant of the function, such as ``_v2``, and
    the first CUDA version for which the driver returns it.
    """
    table = record["procaddr"]
    return {
        "cuda": record["cuda"],
        "refused": record["procaddr_refused_from"],
        "exports": sorted(functions(record)),
        "nvml": record["nvml_functions"],
        "answers": {
            name: [
                procaddr.steps(procaddr.entry(table, name, flags), name)
                for flags in (procaddr.DEFAULT, procaddr.PER_THREAD)
            ]
            for name in table
        },
    }


def test_part_of_a_record_is_enough_to_build_the_driver(record, driver):
    """The part of a record that the fixture ``driver`` leaves out adds no information."""
    given = {form for pair in driver["answers"].values() for steps in pair for _, form in steps}
    assert given <= set(driver["exports"])
    assert len(given) > 580
    for name in record["procaddr"]:
        default, legacy, _ = (
            procaddr.entry(record["procaddr"], name, flags) for flags in procaddr.FLAGS
        )
        assert default == legacy
    assert record["procaddr_older_form_differs"] == []


def test_every_exported_function_is_an_entry(driver, entries):
    assert set(driver["exports"]) - set(entries) == OF_DEBUGGERS


def test_every_function_of_nvml_is_an_entry(driver):
    text = guard_build.NVML_ENTRIES.read_text()
    assert set(driver["nvml"]) <= set(re.findall(r"^nvml\w+", text, re.MULTILINE))


def test_entries_name_the_first_driver_version_of_each_form(driver, entries):
    for base, sides in driver["answers"].items():
        for side, steps in enumerate(sides):
            for since, form in steps:
                entry = entries[form]
                assert (entry.base, entry.since) == (base, since)
                assert side == PER_THREAD or not entry.per_thread
    given = {form for pair in driver["answers"].values() for steps in pair for _, form in steps}
    for symbol in set(driver["exports"]) & set(entries) - given:
        assert entries[symbol].since == 0, symbol


def _source(driver, inner):
    """Return a driver's C source.

    With ``inner``, cuGetProcAddress returns functions that the driver does not export.
    """
    own = ("cuInit", "cuDriverGetVersion", "cuGetProcAddress", "cuGetProcAddress_v2")
    head = (
        '#include <stddef.h>\n#include <string.h>\n#define X __attribute__((visibility("default")))'
    )
    lines = [head, "X int cuInit(unsigned flags) { return flags ? 1 : 100; }"]
    lines += [f"X int cuDriverGetVersion(int *out) {{ *out = {driver['cuda']}; return 0; }}"]
    lines += ["X int cuGetProcAddress(const char *, void **, int, unsigned long long);"]
    lines += ["X int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);"]
    for number, name in enumerate(driver["exports"]):
        if name not in own:
            lines.append(f"X int {name}(void) {{ return {number}; }}")
        if inner and name not in own:
            lines.append(f"static int inner_{name}(void) {{ return -{number + 1}; }}")
    lines.append(
        "static const struct { const char *name; unsigned side, since; void *at; } all[] = {"
    )
    for base, sides in driver["answers"].items():
        for side, steps in enumerate(sides):
            for since, form in steps:
                at = f"inner_{form}" if inner and form not in own else form
                lines.append(f'{{"{base}", {side}, {since}, (void *){at}}},')
    # NEWEST is the largest version that the driver accepts. If the record has no bound, NEWEST is
    # the largest int. As in NVIDIA's driver, the comparison is signed, so version -1 is accepted.
    lines.append(f"{{0}}}};\nenum {{ NEWEST = {(driver['refused'] or 2**31) - 1} }};")
    lines.append(
        """static int find(const char *name, unsigned version, unsigned side, void **out)
{
    int status = 1;
    for (int i = 0; all[i].name; i++)
        if (all[i].side == side && !strcmp(name, all[i].name)) {
            if (all[i].since <= version)
                *out = all[i].at;
            status = all[i].since <= version ? 0 : status ? 2 : 0;
        }
    return status;
}
int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags,
                        int *status)
{
    int found;
    if (flags > 3 || version > NEWEST)
        return 1;
    *out = NULL;
    found = find(name, (unsigned)version, flags >> 1 & 1, out);
    if (status)
        *status = found;
    return 0;
}
int cuGetProcAddress(const char *name, void **out, int version, unsigned long long flags)
{
    if (flags > 3 || version > NEWEST)
        return 1;
    return find(name, (unsigned)version, flags >> 1 & 1, out) ? 500 : 0;
}"""
    )
    return "\n".join(lines) + "\n"


#: A program that reads questions from a file and asks cuGetProcAddress each question. For the
#: address of a function, it prints the name of the function.
ASK = """
import ctypes, json, sys
C = ctypes.CDLL("libcuda.so.1")
names, questions = json.load(open(sys.argv[1]))
symbol = {ctypes.cast(getattr(C, n), ctypes.c_void_p).value: n for n in names}
def ask(name, version, flags, five, with_status):
    out, status = ctypes.c_void_p(77), ctypes.c_int(77)
    args = [name.encode(), ctypes.byref(out), version, ctypes.c_uint64(flags)]
    call = C.cuGetProcAddress_v2 if five else C.cuGetProcAddress
    error = call(*args, *[ctypes.byref(status) if with_status else None] * five)
    return error, symbol.get(out.value, out.value), status.value
print(json.dumps([ask(*question) for question in questions]))
"""


#: The tests ask for every name at these versions. The last two are newer than all recorded drivers.
ANY = (0, -1, 13000, 13010, 2**31 - 1)


def _questions(driver, names):
    """Yield each question with NVIDIA's answer."""
    for name in names:
        for flags in (0, 1, 2, 3):
            steps = driver["answers"].get(name, [[], []])[flags >> 1]
            for version in {*ANY, *(v for since, _ in steps for v in (since - 1, since))}:
                form = [form for since, form in steps if since <= version % 2**32][-1:]
                missing = 2 if steps else 1
                for five, with_status in ((True, True), (True, False), (False, False)):
                    if driver["refused"] and version >= driver["refused"]:
                        answer = [1, 77, 77]
                    elif form:
                        answer = [0, form[0], 0 if with_status else 77]
                    else:
                        answer = (
                            [0, None, missing if with_status else 77] if five else [500, 77, 77]
                        )
                    yield (name, version, flags, five, with_status), answer


@pytest.mark.parametrize("inner", [False, True], ids=["as exported", "other addresses"])
def test_guard_answers_like_nvidia_but_with_its_own_functions(
    driver, inner, session, entries, compile_c, tmp_path
):
    source = tmp_path / "driver.c"
    source.write_text(_source(driver, inner))
    flags = ("-shared", "-fPIC", "-fvisibility=hidden", "-O0", "-g0", "-Wno-unused-function")
    library = compile_c(tmp_path / "driver.so", source, flags=flags)
    names = sorted({*driver["answers"], *(entry.base for entry in entries.values()), "cuNo", ""})
    asked, answers = zip(*_questions(driver, names), strict=True)
    path = tmp_path / "questions"
    path.write_text(json.dumps([sorted(entries), asked]))
    for variables in ({}, {"GPUPOOL_PAGE": None}):
        said = session.python(ASK, path, GPUPOOL_REAL_LIBCUDA=str(library), **variables)
        both = zip(asked, json.loads(said), answers, strict=True)
        assert [item for item in both if item[1] != item[2]] == []
