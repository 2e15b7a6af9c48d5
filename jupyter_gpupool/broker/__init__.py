# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The service around the pool: effects only, no decisions.

In the order in which a message travels:

``transport/``
    the socket's file, connections, turns between users, access
``messages/``
    inbound messages by who sends them (provisioner, agent, guard, people), and the answers
``runner``
    the loop: an event -> the pool -> the journal -> the pool's actions
``gpu/``
    the pool's actions on GPUs (attach, suspend, end), samples, failed GPUs, maintenance
``pages/``
    what the broker shares with the guard in a kernel's processes
``store/``
    the journal, what a restart recovers from it, and the files that are kept
"""
