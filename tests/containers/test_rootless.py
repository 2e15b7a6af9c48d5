# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Containers that users start without root, and that mount the folder of the broker."""

from __future__ import annotations

import os
import secrets
import subprocess

import pytest

from tests import namespaces
from tests.broker import kit
from tests.broker.kit import wait_until
from tests.hub.kit import HUB
from tests.hub.test_hub import CHECK, FILL
from tests.service.kit import CELLS, PYTHON, UserCells

from .kit import Box, running

#: User ids that have no accounts.
ADA, BOB = 21_003, 21_004


def as_account(uid):
    """Return the prefix that makes a command run as this user, without privileges."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]


def refusal():
    """Return why users cannot make containers on this machine, or "" if they can."""
    if os.geteuid() or namespaces.refusal():
        return namespaces.refusal() or "only root can be two accounts, and run the machine's broker"
    if not (HUB / ".ready").exists():
        return "run make test-containers, which installs what every account can run"
    done = subprocess.run(
        [*as_account(ADA), "unshare", "--user", "--map-root-user", "true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stderr.strip()


pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "none"),
    pytest.mark.timeout(600),
]


class RootlessBox(Box):
    """A container that an account starts. Inside the container, the account is root."""

    def __init__(self, machine, uid):
        super().__init__(machine, uid=uid)
        self._spec = {"uid": None, "users_from": 0}
        self._as = as_account(uid)

    def start(self, *arguments, env=None, **options):
        place = str(self.machine.place)
        root = self.machine.folder / f"root-{secrets.token_hex(4)}"
        root.mkdir()
        spec = {
            **self._spec,
            "root": str(root),
            "mounts": [(str(kit.ROOT), str(kit.ROOT), False), (place, place, True)],
            "links": [],
            "command": [str(PYTHON), *arguments],
            "env": {
                "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1",
                "GPUPOOL_SOCKET": f"{place}/broker.sock", **(env or {}),
            },
        }  # fmt: skip
        return self._launch(self._as, ("--user", "--map-root-user"), PYTHON, spec, options)


@pytest.fixture
def machine():
    with running(emulate=kit.ONE, default_memory=250 * kit.MiB) as found:
        found.kind = RootlessBox
        yield found.started


def test_accounts_share_one_gpu_from_their_own_containers(machine):
    def cells(uid):
        return UserCells(machine.box(uid).start(str(CELLS), stdout=subprocess.PIPE), machine.tail)

    ada, bob = cells(ADA), cells(BOB)
    assert ada.run("import os; print(os.getuid(), os.getpid() < 20)") == "0 True"
    ada.run("%gpu 300MiB")
    ada.run(FILL % 7)
    bob.run(FILL % 9)  # the GPU has room for one kernel, so the broker suspends ada's kernel
    found = {session["owner"]: session for session in machine.status()["sessions"]}
    # The broker names each owner by the user id on the machine, not by the user id inside the
    # container.
    assert found.keys() == {f"uid-{ADA}", f"uid-{BOB}"}
    assert found[f"uid-{ADA}"]["suspended_bytes"] > 0
    machine.kill()
    assert machine.started
    ada.run(CHECK % 7)
    bob.run(CHECK % 9)
    ada.close()
    wait_until(lambda: len(machine.status()["sessions"]) == 1, "the end of the first container")
    bob.close()
