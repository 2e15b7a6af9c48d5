# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Whether this machine has a real NVIDIA driver."""

import errno
import os

import pytest

from jupyter_gpupool.devices import vendor
from jupyter_gpupool.devices.nvidia import driver


@pytest.fixture
def machine_with(monkeypatch):
    """Return a function that fakes which files exist, and how open of /dev/nvidiactl ends."""

    def have(files, opened=errno.ENOENT):
        def open_it(path, flags):
            assert path == "/dev/nvidiactl"
            if opened:
                raise OSError(opened, os.strerror(opened))
            return os.dup(2)

        monkeypatch.setattr(driver.os.path, "exists", lambda path: path in files)
        monkeypatch.setattr(driver.os, "open", open_it)

    return have


@pytest.mark.parametrize("file", ["/proc/driver/nvidia/version", "/dev/dxg"])
def test_real_driver_is_recognised_by_its_files(machine_with, file):
    machine_with([file])
    assert vendor.driver_present()


@pytest.mark.parametrize("opened", [0, errno.EACCES, errno.EPERM])
def test_real_driver_is_recognised_by_its_device_file(machine_with, opened):
    machine_with([], opened)
    assert vendor.driver_present()


@pytest.mark.parametrize("opened", [errno.ENOENT, errno.ENXIO, errno.ENODEV])
def test_device_file_without_a_device_shows_no_driver(machine_with, opened):
    """NVIDIA's library creates the file when root uses it, even if no kernel driver is loaded.

    So the file alone does not show that the machine has a driver.
    """
    machine_with(["/dev/nvidiactl"], opened)
    assert not vendor.driver_present()
