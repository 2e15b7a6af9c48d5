# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernel"))

from agent_fixtures import old_python  # noqa: F401
from scripted_broker import ScriptedBroker


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedBroker]:
    """A scripted broker that provisioners find through an environment variable."""
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:
        broker = ScriptedBroker(Path(folder) / "broker.sock").start()
        monkeypatch.setenv("GPUPOOL_SOCKET", str(broker.path))
        yield broker
        broker.die()
        assert broker.problems == []


@pytest.fixture
def install_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that installs a kernelspec with our provisioner, for one test only."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))

    def install(
        name: str, argv: list[str], config: dict[str, Any] | None = None, **more: Any
    ) -> str:
        folder = tmp_path / "kernels" / name
        folder.mkdir(parents=True)
        spec = {
            "argv": argv,
            "display_name": f"Test {name}",
            "language": "python",
            "metadata": {
                "kernel_provisioner": {
                    "provisioner_name": "gpupool-provisioner",
                    "config": config or {},
                }
            },
            **more,
        }
        (folder / "kernel.json").write_text(json.dumps(spec))
        return name

    return install


@pytest.fixture
def in_background() -> Iterator[Callable[..., None]]:
    """Return a function that runs another function in a thread.

    If that function raises an exception, the test fails.
    """
    with ThreadPoolExecutor() as threads:
        futures: list[Any] = []

        def run(function: Callable[..., None], *args: Any) -> None:
            futures.append(threads.submit(function, *args))

        yield run
        for future in futures:
            future.result(60)
