# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Real brokers that share a group's guarantee.

Only one machine at a time uses the guarantee to put the group's sessions first in its queue.
"""

from __future__ import annotations

import os
import pwd

import pytest

from tests.broker.kit import Kernel, MiB, remove, short_folder, wait_until

from .kit import Cluster

ME = pwd.getpwuid(os.geteuid()).pw_name
GROUPS = {
    # The sizes are for all machines together, so they may exceed the memory of one machine.
    "lab": {"users": [ME], "guarantee": "300MiB", "cap": "3GiB"},
    "rest": {"users": "*"},
}
FIRST = (
    "A guarantee of its group lab covers what it asks for, so it goes before all kernels without "
    "a guarantee."
)
BEYOND = (
    "With this request, group lab would have more than its guarantee of 0 B on this machine "
    "(300 MiB on all machines), so the guarantee does not put the kernel first in the queue."
)


class Member(Kernel):
    """A session of the group ``group``."""

    def __init__(self, cluster, machine, group, mib):
        self.group = group
        super().__init__(cluster.brokers[machine], memory=mib * MiB)
        cluster.kernels.append(self)

    def open_fields(self):
        return {"group": self.group}

    def wait(self):
        self.do("ask", hold="cell")
        self.wait_state("queued")
        return self

    def lines(self):
        with self.broker.client() as client:
            return client.call("why", session=self.session)["lines"]


@pytest.fixture
def cluster():
    folder = short_folder()
    found = Cluster(folder, quotas={}, groups=GROUPS, preempt=[])
    found.start().wait_serving()
    yield found
    found.close()
    print(found.logs())
    remove(folder)


def fill(cluster, machine):
    """Fill the GPU of a machine with one session, and let a second session wait for the GPU."""
    Member(cluster, machine, "rest", 900).attach()
    Member(cluster, machine, "rest", 300).wait()


def test_a_groups_guarantee_counts_once_for_all_machines(cluster):
    for machine in ("m0", "m1"):
        fill(cluster, machine)
    first = Member(cluster, "m0", "lab", 300).wait()
    wait_until(lambda: FIRST in first.lines(), "the guarantee on the first machine")
    second = Member(cluster, "m1", "lab", 300).wait()
    wait_until(lambda: BEYOND in second.lines(), "the reason on the second machine")
    assert FIRST in first.lines()
    # When the first session ends, the second session gets the guarantee.
    first.close()
    wait_until(lambda: FIRST in second.lines(), "the guarantee on the second machine")
    # The guarantee stays in force while no ledger answers.
    cluster.ledger.kill()
    wait_until(lambda: cluster.losses()["m1"], "the loss to be noticed")
    assert FIRST in second.lines()
