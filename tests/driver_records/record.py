# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Makes, writes and reads the record of a driver; the package's docstring lists its fields."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from . import calls, errors, libraries, procaddr, questions
from .child import ask

#: The committed records.
RECORDS = Path(__file__).parent / "records"


def record(
    cuda: str, nvml: str, *, device: bool | None = False, every: bool = True
) -> dict[str, Any]:
    """Return the record of two libraries.

    Pass ``device`` None for ``--anywhere``. If ``every`` is False, the record leaves out the calls
    of single functions.

    Raises
    ------
    Hung
        If a question has no answer.
    LookupError
        If ``device`` is False and cuInit does not report a missing device.
    RuntimeError
        If a question to a library fails.
    """
    missing = device is False
    if missing and ask(calls.call, cuda, "", "cuInit", "zero") != 100:
        raise LookupError("cuInit does not answer 100 (CUDA_ERROR_NO_DEVICE)")
    strings = ask(libraries.names_in, cuda, "cu", "cudbg")
    functions = ask(libraries.exported, cuda, strings)
    names = sorted({*strings, *map(libraries.base, functions)})
    refused = ask(procaddr.refused_from, cuda)
    tables = [
        ask(procaddr.forms, cuda, functions, names, flags, refused) for flags in procaddr.FLAGS
    ]
    nvml_functions = ask(libraries.exported, nvml, ask(libraries.names_in, nvml, "nvml"))
    return {
        "driver": libraries.driver_version(cuda),
        "cuda": ask(libraries.cuda_version, cuda),
        "device": device,
        "cuda_errors": errors.without_commonest(ask(errors.cuda_errors, cuda, errors.CODES)),
        "arguments": questions.answers(cuda, questions.of_cuda(missing)),
        "calls": calls.calls(cuda, functions, "cuInit" if missing else "") if every else {},
        "procaddr": procaddr.together(tables),
        "procaddr_refused_from": refused,
        "procaddr_older_form_differs": ask(procaddr.older_form, cuda, list(tables[0])),
        "never_given": sorted(set(functions) - procaddr.given(tables)),
        "nvml_errors": errors.without_commonest(ask(errors.nvml_errors, nvml, errors.CODES)),
        "nvml_arguments": questions.answers(nvml, questions.of_nvml(missing)),
        "nvml_calls": calls.calls(nvml, nvml_functions, "nvmlInit_v2" if missing else "")
        if every
        else {},
        "nvml_functions": nvml_functions,
    }


def functions(found: dict[str, Any]) -> set[str]:
    """Return the functions that the libcuda.so.1 of a record exports."""
    table = found["procaddr"]
    tables = [
        {name: procaddr.entry(table, name, flags) for name in table} for flags in procaddr.FLAGS
    ]
    return procaddr.given(tables) | set(found["never_given"])


def without_device(found: dict[str, Any]) -> bool:
    """Return whether the record's driver found no device."""
    return found["device"] is False


def records() -> list[dict[str, Any]]:
    """Return the committed records, the oldest driver first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS.glob("*.json")]
    return sorted(found, key=lambda one: one["cuda"])


def written(found: dict[str, Any]) -> str:
    """Return a record as readable JSON: one entry per line, and line breaks in long lists."""
    text = json.dumps(found, indent=1, ensure_ascii=False)

    def joined(match: re.Match[str]) -> str:
        return json.dumps(json.loads(match[0]), ensure_ascii=False)

    def filled(match: re.Match[str]) -> str:
        names, lines = json.loads(match[0]), [""]
        for name in names:
            if len(lines[-1]) + len(name) > 92:
                lines.append("")
            lines[-1] += f'"{name}", '
        return "[\n    " + "\n    ".join(map(str.rstrip, lines)).rstrip(",") + "]"

    # Change only lists that contain no list. First wrap long lists of names, then join each short
    # list to one line.
    text = re.sub(r'\[(\s*"[\w ]+",){4,}\s*"[\w ]+"\s*\]', filled, text)
    for _ in range(2):
        text = re.sub(r"\[\n[^\[\]{}]{,300}?\]", joined, text)
    return text + "\n"
