# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pure decisions: events in, actions out, time as data. No clock, no I/O, no configuration.

The modules, in the order in which an event passes through them:

==================  ============================================================================
``machine``         the one door: ``Pool.handle(event)`` returns actions
``events``          what goes in, and what comes out
``model``, ``groups``  frozen values: sessions, devices, settings; the tree of groups
``session``         one session: its record, lease, wait and past
``facts``, ``ledgers``  all sessions, and the accounts that follow from them
``metering``        what users and groups have used over time
``updates``         what each event changes in the facts
``requests``        changes of size, growth, release, keep
``recall``          an admin takes a slice back at a time, or ends a session
``schedule``        the plan: one pass over every session that wants something
``recheck``         when the clock alone next changes the plan
``limits``          what a kernel and an owner may have; the words of a refusal
``guarantees``      which sessions ask for no more than their groups are guaranteed
``shares``          who goes first: guarantees, budgets, classes, fair shares, age
``placement``       what a session needs, and where it fits
``draft``           the copy of the accounts on which a pass tries its plan
``preemption``      which leases may be preempted, when, and for which session
``victims``         which of them make room for a session, and where it goes
``reach``           which requests of a long queue need no search, because they must fail
``running``         which leases in use may be preempted: bursts, guarantees, classes, turns
``unsuspendable``   warns and ends sessions that cannot be suspended while others wait
``residence``       how long an idle lease is protected
``transitions``     the states of a session, and every step between them
``explain``         why a session waits or keeps its slice, as data
``offers``          the size with which a waiting session would start now
``why``             why a session waits or keeps its slice, in lines for its owner
``evidence``        what past waits and cells teach about the next one
``estimate``        how long a session will probably wait
``words``           the sentences for reasons
``news``            informs waiting sessions of their place and their expected wait
``selfcheck``       counts the accounts once more, and reports errors
``timeslice``       which session computes next on a contended device
``attribution``     which memory belongs to which session, to the driver, to others
==================  ============================================================================
"""
