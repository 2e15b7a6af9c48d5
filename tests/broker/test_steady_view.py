# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Figures that only grow with time are no news for the pages that show them."""

from __future__ import annotations

from jupyter_gpupool.server import views

from .kit import wait_until


def test_a_held_slice_alone_changes_nothing_in_the_view(broker, kernel):
    """Each page would else get all sessions in full with every event: 55 kB for 50 sessions."""
    holder = kernel()
    holder.attach()

    def view():
        return views.visible(broker.status(), lambda _: True, ())

    old = view()

    def steady():
        nonlocal old
        before, old = old, view()
        (was,), (now,) = before["sessions"], old["sessions"]
        grown = now["attached_seconds_total"] > was["attached_seconds_total"]
        return grown and views.delta(before, old) is None

    # What a sample sees of the first call may change it once or twice.
    wait_until(steady, "two looks without a change", 30)
