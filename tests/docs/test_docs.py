# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The documentation matches the code: names, links, generated pages, and a clean build."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from jupyter_gpupool.cli.commands import COMMANDS
from jupyter_gpupool.config import GPUPool
from jupyter_gpupool.config.reading import QUOTA_KEYS
from jupyter_gpupool.kernel.advice import advice
from jupyter_gpupool.kernel.command import SUBCOMMANDS
from jupyter_gpupool.kernel.guard_state import MemoryFigures
from jupyter_gpupool.kernelspecs import PROVISIONER
from jupyter_gpupool.launcher import OPTIONS
from jupyter_gpupool.pool.transitions import TRANSITIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("[A-Z]*.md"))]

sys.path.insert(0, str(DOCS))
import make_reference  # noqa: E402 (needs the path set above)


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize("name", sorted(make_reference.PAGES))
def test_generated_pages_are_up_to_date(name):
    assert text_of(name) == make_reference.PAGES[name](), "run: python docs/make_reference.py"


def test_documented_options_exist():
    options = set(GPUPool.class_traits(config=True))
    headings = re.findall(r"^## `c\.GPUPool\.(\w+)`$", text_of("config.md"), re.MULTILINE)
    assert set(headings) == options
    named = [*PAGES, *(ROOT / "examples").glob("*.py")]
    for path in named:
        found = set(re.findall(r"c\.GPUPool\.(\w+)", path.read_text()))
        assert found <= options | {"name", "idle_timout"}, path


def test_every_quota_is_documented():
    for key in QUOTA_KEYS:
        assert key in text_of("config.md").split("## `c.GPUPool.quotas`")[1].split("\n## ")[0]


def test_documented_commands_exist():
    headings = re.findall(r"^## `jupyter gpupool ([\w-]+)`$", text_of("cli.md"), re.MULTILINE)
    assert set(headings) == set(COMMANDS)
    for path in PAGES:
        found = set(re.findall(r"`?jupyter[ -]gpupool ([a-z][\w-]*)", path.read_text()))
        assert found <= set(COMMANDS), path


def test_every_gpu_command_is_documented():
    text = text_of("users.md")
    for name, (usage, _) in SUBCOMMANDS.items():
        assert any(f"`{part.strip()}`" in text for part in usage.split(", or ")), name


def test_out_of_memory_example_equals_the_kernels_message():
    """By default a kernel may grow to the whole GPU."""
    assert GPUPool().default_limit is None
    gib = 1 << 30
    figures = MemoryFigures(used=int(11.8 * gib), granted=12 * gib, limit=24 * gib, waiting=0)
    link = SimpleNamespace(limits={"memory": 24 * gib})
    line = advice(link, "CUDA out of memory", figures)
    assert f"\n{line}\n" in (DOCS / "users.md").read_text()


def test_options_of_a_kernelspec_are_documented():
    text = text_of("admins.md")
    assert PROVISIONER in text
    for option in OPTIONS:
        assert f"`{option}`" in text, option


def anchors(path: Path) -> set[str]:
    """Return a page's explicit anchors, and the anchors that MyST and GitHub make of headings."""
    found = set(re.findall(r"^\(([\w-]+)\)=$", path.read_text(), re.MULTILINE))
    for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found.add(slug)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_have_a_target(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        assert page.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors(page), f"{path.name} links to {target}"


def test_files_named_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## Where do I change")[1].split("\n## ")[0]
    for name in re.findall(r"`([\w/]+(?:\.py)?)`", table):
        if "/" in name or name.endswith(".py"):
            assert (ROOT / "jupyter_gpupool" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("path", sorted(DOCS.glob("images/*.svg")), ids=lambda p: p.name)
def test_pictures_are_well_formed_and_load_nothing_else(path):
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")


def test_the_documentation_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="the docs extra is not installed")
    pytest.importorskip("myst_parser", reason="the docs extra is not installed")
    pytest.importorskip("pydata_sphinx_theme", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, str(DOCS), str(tmp_path / "html"), "-d", str(tmp_path / "trees")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode == 0


def test_drawn_states_match_the_table_of_transitions():
    pytest.importorskip("docutils", reason="the docs extra is not installed")
    import state_diagram

    drawn = state_diagram.steps(text_of("states.md"))
    assert set(drawn) == {step for step in TRANSITIONS if step[1] != "ended"}
    assert state_diagram.svg(drawn).count("marker-end") == len(drawn)


def test_state_without_a_place_in_the_drawing_is_an_error():
    pytest.importorskip("docutils", reason="the docs extra is not installed")
    import state_diagram

    with pytest.raises(ValueError, match="has no place for the state 'new'"):
        state_diagram.steps("active --> new")


def test_residence_page_matches_its_figures():
    import make_residence

    assert text_of("residence.md") == make_residence.page(make_residence.latest()), (
        "run: python docs/make_residence.py"
    )


def test_modules_and_functions_of_the_call_paths_exist():
    """Check that the modules and names in the two call paths of developers.md exist."""
    table = text_of("developers.md").split("<!-- Paths:")[1].split("<!-- End of paths")[0]
    steps = re.findall(r"^\| `([\w/.]+)` \| `(\w+)` \|", table, re.MULTILINE)
    assert len(steps) > 30
    for module, name in steps:
        source = (ROOT / "jupyter_gpupool" / module).read_text()
        defined = rf"^(?:\s*(?:async )?(?:def|class) {name}\b|\w[\w \*]*\b{name}\()"
        assert re.search(defined, source, re.MULTILINE), f"{module} has no {name}"


def test_files_named_in_pages_exist():
    """Look for each path in backquotes in the repository, in the package, and beside the page."""
    for page in [*PAGES, ROOT / "benchmarks" / "README.md"]:
        for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|c|h|ts|tsx|yaml))`", page.read_text()):
            tops = (ROOT, ROOT / "jupyter_gpupool", ROOT / "labextension", page.parent)
            assert any((top / name).exists() for top in tops), f"{page.name}: {name}"


@pytest.mark.parametrize(
    "package", ["pool", "broker", "cluster", "devices", "kernel", "server", "cli", "config"]
)
def test_map_of_a_package_names_all_its_modules(package):
    top = ROOT / "jupyter_gpupool" / package
    shown = ast.get_docstring(ast.parse((top / "__init__.py").read_text())) or ""
    names = {name.rpartition("/")[2] for name in re.findall(r"``([\w/]+)``", shown)}
    # The broker's map lists the modules of its subfolders, too. In other packages, a subfolder may
    # have its own map.
    deep = top.rglob("*.py") if package == "broker" else top.glob("*.py")
    assert {path.stem for path in deep if not path.stem.startswith("__")} <= names
