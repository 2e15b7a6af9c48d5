# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A page of a user interface gets no update if only the seconds of a lease grow."""

from __future__ import annotations

from jupyter_gpupool.server import views

from .kit import wait_until


def test_view_does_not_change_while_a_session_holds_a_slice(broker, kernel):
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

    # The first samples may still show the first call, so the view may change once or twice.
    wait_until(steady, "two looks without a change", 30)
