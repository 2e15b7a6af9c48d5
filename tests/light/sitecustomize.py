# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Gives suspend workers ``cuda.core.checkpoint`` without loading the rest of cuda.core."""

import sys


class _Checkpoint:
    """A finder that makes ``cuda.core`` a package without the code of its real ``__init__``."""

    def find_spec(self, name, path=None, target=None):
        if name != "cuda.core":
            return None
        from importlib.machinery import ModuleSpec, PathFinder
        from pathlib import Path

        from cuda import bindings

        sys.meta_path.remove(self)
        found = PathFinder.find_spec(name, path)
        if found is None:
            return None
        folder = Path(found.origin).parent
        version = folder / f"cu{bindings.__version__.split('.')[0]}"
        if not (version / "checkpoint.py").exists():
            return found
        light = ModuleSpec(name, None, is_package=True)
        light.submodule_search_locations = [str(version), str(folder)]
        return light


_forks = sys.orig_argv[1:3] == ["-m", "tests.broker.forks"] and "brokers" in sys.orig_argv
_worker = "worker" in sys.orig_argv and any(a.endswith("devices/child.py") for a in sys.orig_argv)
if _worker or _forks:
    sys.meta_path.insert(0, _Checkpoint())
