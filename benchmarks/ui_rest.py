# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time of the user interface's request to a Jupyter server: ``GET pool`` with 50 sessions.

The baseline is ``GET api/status`` of the same server. The two requests alternate. The sessions have
no kernels: this process opens them. The pool has 16 emulated devices, also on a machine with a GPU,
because only the time of the request matters.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path
from typing import Any, Callable

import requests

from .common import budget, summary

ROOT = Path(__file__).parents[1]
SESSIONS, DEVICES = 50, 16


def stage() -> Any:
    """Return the stage of the browser tests. Its method ``open`` starts a broker and a server."""
    # The folder of the browser tests is not a package. So load the module from its file.
    path = ROOT / "labextension" / "ui-tests" / "server.py"
    spec = importlib.util.spec_from_file_location("ui_stage", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Stage()


def milliseconds(ask: Callable[[], Any]) -> float:
    """Return the milliseconds that ``ask`` takes."""
    begun = time.perf_counter()
    ask()
    return (time.perf_counter() - begun) * 1e3


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure; return the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    count = 50 if parser.parse_args(argv).quick else 500
    place = stage()
    try:
        url = place.open()["url"]
        place.do_fresh(emulate=f"{DEVICES}x8GiB,context=64MiB")
        with place.broker.client() as client, requests.Session() as http:
            for i in range(SESSIONS):
                client.call("open", kernel_id=f"bench-{i}", label=f"{i}.ipynb", request={})

            def ask(path: str) -> requests.Response:
                answer = http.get(f"{url}/{path}", timeout=30)
                answer.raise_for_status()
                return answer

            first = ask("gpupool/api/pool")
            shown = first.json()
            if (len(shown["sessions"]), len(shown["devices"])) != (SESSIONS, DEVICES):
                raise RuntimeError("the server shows another pool than was made")
            pool, base = [], []
            for _ in range(count):
                base.append(milliseconds(lambda: ask("api/status")))
                pool.append(milliseconds(lambda: ask("gpupool/api/pool")))
    finally:
        place.end()
    ours, theirs = summary(pool), summary(base)
    return {
        "emulated": True,
        "sessions": SESSIONS,
        "devices": DEVICES,
        "unit": "ms",
        "answer_bytes": len(first.content),
        "pool": ours,
        "baseline_status": theirs,
        "ratio_p50": round(ours["p50"] / theirs["p50"], 2),
        "budgets": [budget("REST snapshot, 50 sessions, 16 devices, p99", ours["p99"], 100, "ms")],
    }
