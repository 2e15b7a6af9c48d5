# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``docs/server.md`` lists all routes, metrics, events and options of the server extension."""

from __future__ import annotations

import re
from pathlib import Path

from jupyter_gpupool.server import openapi
from jupyter_gpupool.server import server_metrics as metrics
from jupyter_gpupool.server.extension import SCHEMA_ID, SCHEMAS, GPUPoolExtension

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()

#: A parameter in the path of a route. For ``{kernel_id}``, the page has KERNEL.
PARAMETER = re.compile(r"{(\w+?)(?:_id)?}")


def table(heading):
    """Return the cells of the first column of a section's table."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [row.strip("`") for row in re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)]


def test_page_lists_all_routes():
    paths = openapi.document("/")["paths"]
    wanted = {
        f"{method.upper()} {PARAMETER.sub(lambda name: name[1].upper(), path[1:])}"
        for path, item in paths.items()
        for method in item
        if method != "parameters"
    }
    assert set(table("REST")) == wanted


def test_page_lists_all_metrics():
    names = {metric.describe()[0].name for metric in metrics.ALL}
    assert set(table("Metrics")) == names


def test_page_lists_all_events():
    kinds = {path.parent.name for path in SCHEMAS.glob("*/v1.yaml")}
    assert set(table("Events")) == {SCHEMA_ID.format(kind) for kind in kinds}
    for path in SCHEMAS.glob("*/v1.yaml"):
        assert f'"$id": {SCHEMA_ID.format(path.parent.name)}\n' in path.read_text()
        assert "personal-data: false" in path.read_text()


def test_page_lists_all_options():
    own = {
        name: trait.default()
        for name, trait in GPUPoolExtension.class_own_traits(config=True).items()
    }
    section = PAGE.split("\n## Options\n")[1]
    found = re.findall(r"`c\.GPUPoolExtension\.(\w+)` \| ([\d.]+) \|", section)
    assert {name: float(value) for name, value in found} == own
