# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker that runs Python as its users, even if only root may enter Python's folder."""

from __future__ import annotations

import os
import sys

from jupyter_gpupool.broker import hosting
from jupyter_gpupool.broker.app import main
from tests.users import as_user


def switch_with_setpriv(account):
    return (as_user(account.uid), {}) if os.geteuid() == 0 else ([], {})


if __name__ == "__main__":
    hosting.switch_to = switch_with_setpriv
    sys.exit(main())
