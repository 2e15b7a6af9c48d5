# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The service around the pool: effects only, no decisions.

Layout, in the order a message travels::

    listener    the socket's file, its permissions, and the lock against a second broker
    connection  bytes <-> messages of one peer, with its limits
    auth        peer credentials -> Owner; who may see and do what
    handlers    requests -> pool events; answers
    agents      the same, for what kernels' agents say; wishes: for what people ask of a session
    requests    what a message asks for
    homes       the devices that kernels see before they have a slice
    lives       processes that die, agents that go away, waits that end
    runner      the loop: event -> Pool -> journal -> actions
    effects     Attach and Suspend: the agent's consent, then the driver; results -> events
    guarding    what there is only because kernels run under the guard, put together:
    pages         the shared pages, true to the pool's records
    guards        attach and grow, asked by threads that wait at the gate
    activity      who uses its device, read from the pages -> holds
    watchdog      reports, suspends or ends sessions that have more than was granted
    turns         compute shares: whose gate is open
    sessions    what the broker knows about a kernel and the pool must not: pid, token, sockets
    processes   /proc and pidfd: identity, descent, death
    host        host memory that a suspend may take
    monitor     samples of devices and host -> events; foreign processes
    journal     SQLite: current records for a restart, rows for the reports
    ledger      transitions -> rows
    recovery    journal + driver -> the pool as it was before a kill
    status      the snapshot
    metrics     the switch of: figures (for Prometheus), scrape (where they are served)
    app         the process: configuration, signals, start and end; surroundings: its files
"""
