# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""PyTorch links some NVIDIA libraries that cannot run on emulated GPUs. Stand-ins replace them."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from emucuda.build import compiler
from emucuda.pytorch import stand_ins


@pytest.fixture
def stand_in(tmp_path):
    """Return ``make(soname, *names)``, which builds and loads a stand-in with these functions."""

    def make(soname, *names):
        lib = tmp_path / "torch" / "lib"
        lib.mkdir(parents=True)
        bodies = "".join(f"void {name}(void) {{}}\n" for name in names)
        calls = "".join(f"void {name}(void);\n" for name in names)
        calls += f"void use(void) {{ {' '.join(f'{name}();' for name in names)} }}\n"
        for text, target, flags in (
            (bodies, tmp_path / soname, [f"-Wl,-soname,{soname}"]),
            (calls, lib / "libuser.so", [str(tmp_path / soname)]),
        ):
            source = tmp_path / "source.c"
            source.write_text(text)
            command = [*compiler(), "-shared", "-fPIC", str(source), *flags, "-o", str(target)]
            subprocess.run(command, check=True)
        assert stand_ins.build(tmp_path / "torch", tmp_path / "made") == [soname]
        return ctypes.CDLL(str(tmp_path / "made" / soname))

    return make


def test_profiler_stand_in_has_a_text_for_its_error(stand_in, capfd):
    """An error of the stand-in needs a text: without one, PyTorch's profiler ends the program."""
    cupti = stand_in("libcupti.so.12", "cuptiSubscribe", "cuptiGetResultString", "cuptiGetVersion")
    status = cupti.cuptiSubscribe(None, None, None)
    assert status == stand_ins.STATUS["cupti"]
    text = ctypes.c_char_p()
    assert cupti.cuptiGetResultString(status, ctypes.byref(text)) == 0
    assert text.value == b"not emulated"
    assert cupti.cuptiGetVersion(ctypes.byref(ctypes.c_uint())) == 0
    assert "cuptiSubscribe is of a library that is not emulated" in capfd.readouterr().err
