# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Checks, in the source, that each part imports only the parts that its row in ALLOWED names."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jupyter_gpupool"

#: Modules that every part may import. They import only each other and the standard library.
LEAVES = ("cgroups", "deadlines", "errors", "procfs", "states", "text", "threads", "units")

#: part -> the parts that it may import. Each part may also import itself, the leaves and the
#: standard library.
ALLOWED: dict[str, str] = {
    # ``__init__`` imports ``programs`` inside a function, so the import of the package does not
    # load ``programs``. A test below checks this.
    "__init__": "programs",
    "local_machine": "",
    "endpoint": "local_machine",
    "durations": "",
    "protocol": "",
    "client": "endpoint protocol",
    "pool": "",
    "guard": "",
    "containers": "guard",
    "cluster": "client config endpoint launcher local_machine pool.groups pool.model protocol",
    "config": "emulation endpoint guard local_machine pool.groups pool.model",
    "devices": "guard local_machine pool.model pool.attribution",
    "startrecord": "endpoint local_machine",
    "startfailures": "startrecord",
    "daemon": "guard startrecord",
    "starting": "__init__ client daemon endpoint guard startfailures startrecord",
    "broker": "__init__ cluster config daemon devices durations emulation endpoint guard "
    "containers local_machine pool protocol startfailures startrecord",
    "kernel": "__init__ client endpoint guard.page protocol startfailures startrecord",
    "launcher": "client config endpoint guard starting startrecord",
    "ipykernel_launcher": "launcher",
    "provisioner": "__init__ client config endpoint guard kernelspecs "
    "launcher protocol starting startrecord",
    "remote_provisioner": "client cluster launcher provisioner",
    # While no broker runs, the server learns from ``devices`` whether the machine has a driver, and
    # from ``emulation`` whether it has an emulated driver.
    "server": "__init__ client config devices durations emulation endpoint protocol starting "
    "startrecord",
    "kernelspecs": "launcher",
    "programs": "client guard kernel launcher local_machine startrecord",
    "emulation": "",
    "demo": "__init__ client devices endpoint starting timeline",
    "timeline": "",
    "cli": "__init__ broker client cluster config containers demo devices emulation endpoint guard "
    "kernelspecs launcher pool.groups pool.residence programs protocol provisioner starting "
    "startrecord timeline",
}

#: The third-party packages that each part may import; other parts may import none.
THIRD_PARTY = {
    "durations": {"prometheus_client"},
    "cluster": {"ray"},
    "config": {"traitlets", "jupyter_core"},
    "devices": {"pynvml", "cuda"},
    "broker": {"prometheus_client", "tornado", "traitlets", "jupyter_core"},
    "kernel": {"IPython", "traitlets", "ipykernel"},
    "provisioner": {"jupyter_client", "tornado", "traitlets"},
    "remote_provisioner": {"jupyter_client", "traitlets", "zmq"},
    "server": {
        *("jupyter_core", "jupyter_server", "prometheus_client", "tornado", "traitlets", "yaml"),
    },
    "kernelspecs": {"jupyter_client", "jupyter_core", "ipykernel"},
    "emulation": {"emucuda"},
    "demo": {"nbclient", "nbformat", "jupyter_client", "traitlets"},
    "launcher": {"jupyter_core"},
    "cli": {"traitlets", "jupyter_core", "jupyter_client"},
}

#: Optional libraries that the agent may use if the user has loaded them.
USERS_OWN = {"kernel": {"torch", "cupy"}}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path):
    """Yield two names for each import: the top-level package, and the name of a module of ours.

    The second name is "" if the import is not from our package.
    """
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(parsed(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*here[: len(here) - node.level], *filter(None, [base])])
            names = [base]
            if base == PACKAGE.name:
                names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            yield top, rest if top == PACKAGE.name else ""


MODULES = sorted(p for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_only_what_its_part_may_import(path):
    part = part_of(path)
    assert part in ALLOWED or part in LEAVES, f"{part} is a new part: say here what it may import"
    for top, inner in imports(path):
        if top == PACKAGE.name:
            target = inner.split(".")[0] if inner else "__init__"
            if not (PACKAGE / target).exists() and not (PACKAGE / f"{target}.py").exists():
                # ``inner`` is a name that the package itself defines, for example __version__.
                target = "__init__"
            allowed = [*LEAVES, *ALLOWED.get(part, "").split()]
            assert (
                target == part
                or target in allowed
                or any(inner.startswith(a) for a in allowed if "." in a)
            ), f"{part} must not import {inner}"
        elif top not in sys.stdlib_module_names:
            allowed = THIRD_PARTY.get(part, set()) | USERS_OWN.get(part, set())
            assert top in allowed, f"{part} must not import {top}"


def test_emulated_driver_imports_only_the_standard_library():
    for path in (ROOT / "emucuda").rglob("*.py"):
        outside = {top for top, _ in imports(path)} - {"emucuda"} - sys.stdlib_module_names
        assert outside <= ({"torch"} if path.parent.name == "pytorch" else set()), path


def test_tests_of_the_emulated_driver_do_not_import_the_product():
    files = [ROOT / "tests" / "conftest.py", ROOT / "tests" / "longruns.py"]
    for folder in ("emulator", "driver_records"):
        files += (ROOT / "tests" / folder).glob("*.py")
    for path in files:
        assert PACKAGE.name not in {top for top, _ in imports(path)}, path
        # Some tests send code to child processes as text, so check the text of the file, too.
        assert f"from {PACKAGE.name}" not in path.read_text(), path


def test_only_two_modules_import_the_emulated_driver():
    """One of the two is a module of the product, the other is a module of the tests.

    The tests in ``tests/emulator`` are an exception: they test the emulated driver itself.
    """
    users = {
        str(path.relative_to(ROOT))
        for folder in (PACKAGE, ROOT / "tests")
        for path in folder.rglob("*.py")
        if path.parent != ROOT / "tests" / "emulator"
        if "emucuda" in path.read_text()
        if any(top == "emucuda" for top, _ in imports(path))
    }
    assert users == {"jupyter_gpupool/emulation.py", "tests/emulated.py"}


def names(path: Path):
    """Yield the dotted name of everything that a module imports from our package."""
    here = path.relative_to(PACKAGE).parts
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*here[: len(here) - node.level], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def test_only_the_devices_package_chooses_the_gpu_vendor():
    """A new vendor needs only a folder in ``devices`` and a choice in ``devices/__init__.py``."""
    devices = PACKAGE / "devices"
    public = {node.value for node in ast.walk(ast.parse((devices / "__init__.py").read_text()))
              if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
    for path in MODULES:
        found = {name for name in names(path) if name.startswith("devices.")}
        if devices not in path.parents:
            assert {name.removeprefix("devices.") for name in found} <= public, path
        elif path.parent == devices and path.name != "__init__.py":
            assert not {name for name in found if "nvidia" in name}, path
            assert not {top for top, _ in imports(path)} & THIRD_PARTY["devices"], path


#: Modules of ``cluster`` that only decide, like the pool. They read no clock and do no I/O.
PURE = [
    PACKAGE / "cluster" / f"{name}.py"
    for name in (
        "messages",
        "ledger_events",
        "ledger_nodes",
        "queues",
        "ledger",
        "budgets",
        "overlay",
    )
]


def test_the_pool_and_the_ledger_read_no_clock_and_do_no_io():
    forbidden = {"time", "asyncio", "os", "random", "logging", "socket", "subprocess", "threading"}
    for path in (*(PACKAGE / "pool").rglob("*.py"), *PURE):
        assert not forbidden & {top for top, _ in imports(path)}, path


def test_import_of_the_package_loads_none_of_its_modules():
    ours = "[name for name in sys.modules if name.startswith('jupyter_gpupool.')]"
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import jupyter_gpupool; print({ours})"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_commands_for_programs_do_not_import_asyncio():
    """The import of asyncio took a third of the start time of each of these commands."""
    modules = ("cli.commands", "programs.execution", "programs.detached", "client")
    code = "import sys, " + ", ".join(f"{PACKAGE.name}.{name}" for name in modules)
    code += "; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


#: Part -> the names of its variables that hold plain records, and what each record is. All code of
#: the part may set the fields of these records.
PLAIN_DATA = {
    "broker": {
        "session": "what the broker knows of a kernel (sessions.LiveSession)",
        "speaker": "the same",
        "use": "how a session uses its devices (sessions.Use)",
        "account": "one user's budgets (transport.dispatch.Account)",
        "counters": "what the broker has seen (transport.connection.Counters)",
        "row": "a row of the journal (store.journal.Row)",
        "landing": "a process on its way (gpu.landing)",
        "record": "a record of the log (logging.LogRecord)",
    },
    "cli": {"top": "the state of the screen (top_keys.Top)", "question": "a question on it"},
    "cluster": {
        "node": "a machine as the ledger knows it",
        **dict.fromkeys(
            ("free", "munge_ctx_create", "munge_ctx_strerror", "munge_strerror"),
            "a function of a library in C, whose types are declared",
        ),
    },
    "config": {"trait": "an option of traitlets that is being declared"},
    "devices": {"package": "a module that is being loaded by its path"},
    "errors": {"code": "a member of the enum that is being made"},
    "kernel": {
        "kernel": "ipykernel's kernel, whose methods the agent wraps",
        "session": "its messages, which the agent counts",
        "shell": "IPython's shell",
        "completer": "IPython's completer",
        "environ": "this process's environment",
        "running": "an execute request (call_waits.RunningRequest)",
        "wait": "a request for a slice (link.HoldWait)",
    },
    "remote_provisioner": {"manager": "jupyter_client's manager, which keeps a kernel's keys"},
    "programs": {"place": "what blocks of the same process share (inscript)"},
    "server": {"seen": "a session at its last count (kernel_history)"},
}


def attribute_targets(tree: ast.AST):
    """Yield the node of each attribute that a statement assigns to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        else:
            continue
        for target in targets:
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            yield from (part for part in parts if isinstance(part, ast.Attribute))


#: All modules except those of the pool. In the pool, functions change records (``pool/facts.py``).
WIRED = [path for path in MODULES if part_of(path) != "pool"]


def test_no_object_sets_attributes_of_another_object():
    """An object gets everything that it uses in its constructor, and no other code sets it later.

    ``broker/assembly.py`` makes the objects of the broker in the right order.
    """
    found = []
    for path in WIRED:
        records = PLAIN_DATA.get(part_of(path), {})
        for target in attribute_targets(parsed(path)):
            owner = target.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name not in ("self", *records):
                found.append(f"{path.relative_to(PACKAGE)}:{target.lineno} {ast.unparse(target)}")
    assert found == []


def is_own(node: ast.AST) -> bool:
    """Return whether an expression is ``self.name``."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.value.id == "self"


def test_no_object_asserts_that_its_attributes_are_set():
    """If code needs such an assertion, it uses the object before the object is complete."""
    found = []
    for path in MODULES:
        for function in ast.walk(parsed(path)):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            nodes = [*ast.walk(function)]
            taken = [n.targets for n in nodes if isinstance(n, ast.Assign) and is_own(n.value)]
            own = {name.id for names in taken for name in names if isinstance(name, ast.Name)}
            for node in nodes:
                if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
                    left = node.test.left
                    if is_own(left) or (isinstance(left, ast.Name) and left.id in own):
                        found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert found == []


#: Two modules that import each other, but only for types: a session has connections, and a
#: connection has a session.
KNOWN_PAIR = {"transport.connection", "sessions"}


def test_imports_in_the_broker_have_no_cycle():
    """The test counts imports for types, too: they also show that a module calls another one."""
    broker = PACKAGE / "broker"
    modules = {".".join(p.relative_to(broker).with_suffix("").parts): p for p in
               broker.rglob("*.py")}  # fmt: skip
    left = {}
    for module, path in modules.items():
        found = {name.removeprefix("broker.") for name in names(path)}
        found |= {name.rpartition(".")[0] for name in found}
        left[module] = (found & modules.keys()) - {module}
        if module in KNOWN_PAIR:
            left[module] -= KNOWN_PAIR
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"a cycle of imports among {sorted(left)}"
