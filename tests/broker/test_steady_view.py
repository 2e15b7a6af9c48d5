# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A figure that only grows with time does not count as a change for the pages that show it."""

from __future__ import annotations

from jupyter_gpupool.server import views

from .kit import wait_until


def test_a_held_slice_alone_changes_nothing_in_the_view(broker, kernel):
    """Otherwise each page would get all sessions with every event: 55 kB for 50 sessions."""
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

    # The first samples may still see the first call, and change the view once or twice.
    wait_until(steady, "two looks without a change", 30)
