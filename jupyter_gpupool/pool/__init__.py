# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Makes the decisions of the pool: it takes events, and returns actions.

The package reads no clock, because each event carries its time. It does no I/O, and reads no
configuration file.

The modules, in the order in which an event passes through them:

==================  ============================================================================
``machine``         the only entry point: ``Pool.handle(event)`` returns actions
``events``          the events that go in, and the actions that come out
``model``, ``groups``  frozen values: sessions, devices, settings; the tree of groups
``session``         one session: its record, its lease, its wait and its past
``facts``, ``ledgers``  all sessions, and the accounts that are computed from them
``metering``        what users and groups have used over time
``updates``         what each event changes in the facts
``requests``        what users ask for: a new size, growth, release, keep
``recall``          an admin takes a slice back at a set time, or ends a session
``schedule``        the plan: one pass over every session that wants something
``recheck``         when the plan next changes because time passes, without an event
``limits``          what a kernel and an owner may have; the text of a refusal
``guarantees``      which requests lie within the guarantees of their groups
``shares``          the order of service: guarantees, budgets, classes, fair shares, age
``placement``       what a session needs, and where it fits
``draft``           the copy of the accounts on which a pass tries its plan
``preemption``      which leases may be preempted, when, and for which session
``victims``         which leases a session preempts to get room, and on which devices
``reach``           which requests of a long queue need no search for victims: it would fail
``running``         which leases in use may be preempted: bursts, guarantees, classes, turns
``unsuspendable``   warns and ends sessions that cannot be suspended and that others wait for
``residence``       how long an idle lease is protected
``transitions``     the states of a session, and every step between them
``explain``         why a session waits or keeps its slice, as data
``offers``          the size with which a waiting session would start now
``why``             why a session waits or keeps its slice, in lines for its owner
``session_view``    what status shows of each session
``evidence``        records of past waits and cells, from which estimates are made
``estimate``        how long a session will probably wait
``words``           the sentences for reasons
``news``            informs waiting sessions of their place and their expected wait
``selfcheck``       computes the accounts again, and reports errors
``timeslice``       which session computes next on a contended device
``attribution``     which memory belongs to which session, to the driver, to others
==================  ============================================================================
"""
