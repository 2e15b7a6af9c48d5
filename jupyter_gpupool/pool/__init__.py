# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pure decisions: events in, actions out, time as data. No clock, no I/O, no configuration.

In the order in which an event travels:

==================  ============================================================================
``machine``         the one door: ``Pool.handle(event)`` returns actions
``events``          what goes in, and what comes out
``model``, ``facts``  frozen values; sessions and the accounts that follow from them
``ledgers``         the accounts of an owner and of a group
``selfcheck``       counts the accounts again, and names the errors in them
``groups``          groups of users: guarantees, weights, caps, daily budgets
``usage``           memory and compute that users and groups have used over time
``updates``         what each event changes in the facts
``requests``        another size, growth, release, keep
``schedule``        the plan: one pass over every session that wants something
``draft``           a copy of the accounts on which the pass tries its plan
``shares``          the order of the queue: guarantees, classes, fair shares, age
``limits``          what a kernel and an owner may have; the words of a refusal
``placement``       what a session needs, and where it fits
``preemption``      which leases may be preempted, when, and for which session
``running``         the same for leases in use
``unsuspendable``   warns about sessions that cannot be suspended while others wait
``residence``       how long an idle lease is protected
``transitions``     the states of a session, and every step between them
``explain``         why a session waits or may lose its slice, as data and in lines
``words``           the sentences for all reasons, and how long a wait may take
``timeslice``       which session computes next on a contended device
``attribution``     which memory belongs to which session, to the driver, to others
==================  ============================================================================
"""
