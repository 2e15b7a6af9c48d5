# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs programs as other users, for tests that run as root."""

from __future__ import annotations

import shutil


def as_user(user):
    """Return the command prefix with which root runs a program as another user id.

    The interpreter may be in a folder that only root may enter. The capability to read everything
    lets the user start it, and does not change which user the broker and the Linux kernel see.
    """
    setpriv = shutil.which("setpriv")
    assert setpriv, "setpriv (util-linux) is needed to run programs as other users"
    return [
        *(setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups"),
        *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
    ]
