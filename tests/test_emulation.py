# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Whether this machine has an NVIDIA driver of its own."""

import errno
import os

import pytest

from jupyter_gpupool import emulation


@pytest.fixture
def machine_with(monkeypatch):
    """Return a function that lets the machine have these files, and say so when one is opened."""

    def have(files, opened=errno.ENOENT):
        def open_it(path, flags):
            assert path == "/dev/nvidiactl"
            if opened:
                raise OSError(opened, os.strerror(opened))
            return os.dup(2)

        monkeypatch.setattr(emulation.os.path, "exists", lambda path: path in files)
        monkeypatch.setattr(emulation.os, "open", open_it)

    return have


@pytest.mark.parametrize("file", ["/proc/driver/nvidia/version", "/dev/dxg"])
def test_a_real_driver_is_known_by_its_files(machine_with, file):
    machine_with([file])
    assert emulation.real_driver_present()


@pytest.mark.parametrize("opened", [0, errno.EACCES, errno.EPERM])
def test_a_real_driver_is_known_by_its_device(machine_with, opened):
    machine_with([], opened)
    assert emulation.real_driver_present()


@pytest.mark.parametrize("opened", [errno.ENOENT, errno.ENXIO, errno.ENODEV])
def test_a_device_file_that_cannot_be_opened_is_no_driver(machine_with, opened):
    """NVIDIA's library makes the file for root, whether or not the kernel has the driver."""
    machine_with(["/dev/nvidiactl"], opened)
    assert not emulation.real_driver_present()
