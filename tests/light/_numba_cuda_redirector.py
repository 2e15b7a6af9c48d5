# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Hides numba-cuda's module of the same name, and runs it only when a program imports numba."""

import sys


class _Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "numba":
            sys.meta_path.remove(cls)
            _redirect()


def _redirect():
    import importlib.util
    import pathlib

    for folder in sys.path:
        file = pathlib.Path(folder, "_numba_cuda_redirector.py")
        if file.is_file() and not file.samefile(__file__):
            spec = importlib.util.spec_from_file_location("_numba_cuda_redirector_itself", file)
            # numba-cuda's module puts its own finder before all other finders.
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


sys.meta_path.insert(0, _Finder)
