# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs programs as other users, for tests that run as root."""

from __future__ import annotations

import shutil


def as_user(user):
    """Return the words that root writes before a command to run it as ``user``.

    The interpreter may be in a folder that only root may enter. So the process gets the capability
    to read every file. For the broker and for Linux, it is still a process of ``user``.
    """
    setpriv = shutil.which("setpriv")
    assert setpriv, "setpriv (util-linux) is needed to run programs as other users"
    return [
        *(setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups"),
        *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
    ]
