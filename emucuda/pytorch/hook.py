# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Prepares PyTorch when a program on emulated devices imports it.

When Python starts, a line in ``emucuda.pth`` imports this file. It does so only if
``EMUCUDA_MACHINE`` is set, or if stand-ins for NVIDIA's libraries are installed: PyTorch needs the
stand-ins even without a device. The file is also installed as the module ``_emucuda_pytorch``. So
each start of Python imports only this small module, and not the whole package.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # so that this file does not import typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """Finds ``torch`` as usual, and adds steps before and after the import runs its code."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib passes both
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None or not spec.origin:
            return spec
        load, origin = spec.loader.exec_module, spec.origin

        def exec_module(module: ModuleType) -> None:
            from emucuda.pytorch import stand_ins

            emulated = bool(os.environ.get("EMUCUDA_MACHINE"))
            stand_ins.load(origin, emulated=emulated)
            if emulated:
                stand_ins.name_compiler()
            load(module)
            if emulated and getattr(module.version, "cuda", None):
                from emucuda.pytorch import operators

                operators.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Install the finder, which acts at ``import torch``. If torch is there already, do nothing."""
    if "torch" not in sys.modules and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


install()
