# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The limit on how much one cause may write to the log."""

from __future__ import annotations

import logging

import pytest

from jupyter_gpupool.broker import ratelimit
from jupyter_gpupool.broker.ratelimit import LogLimit


class Written(logging.Handler):
    def __init__(self, clock):
        super().__init__()
        self.lines = []
        self.addFilter(LogLimit(clock))

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def log(clock):
    made = logging.Logger("test")
    made.addHandler(Written(lambda: clock[0]))
    return made


def lines(log):
    return log.handlers[0].lines


def test_log_of_one_cause_is_bounded_and_counts_dropped_lines(log, clock):
    for number in range(1000):
        log.warning("Kernel %d is odd", number)
    assert len(lines(log)) == ratelimit.MOST
    clock[0] = ratelimit.PERIOD
    log.warning("Kernel %d is odd", 1)
    missing = 1000 - ratelimit.MOST
    assert lines(log)[-1] == f"Kernel 1 is odd ({missing} more of these were not logged)"


def test_another_cause_is_still_logged(log):
    for _ in range(1000):
        log.warning("One")
    log.warning("Two")
    assert lines(log)[-1] == "Two"


def test_one_user_does_not_hide_the_log_lines_of_another(log):
    for _ in range(1000):
        log.warning("Closed: %d", 1, extra={"cause": 1})
    log.warning("Closed: %d", 2, extra={"cause": 2})
    assert len(lines(log)) == ratelimit.MOST_CAUSED + 1


def test_tracebacks_are_bounded(log):
    for _ in range(1000):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            log.exception("Failed")
    assert len(lines(log)) == ratelimit.MOST_CAUSED


def test_number_of_remembered_causes_is_bounded(log):
    for number in range(5 * ratelimit.MAX_CAUSES):
        log.warning(f"Cause {number}")
    limit = log.handlers[0].filters[0]
    assert len(limit._causes) <= ratelimit.MAX_CAUSES
