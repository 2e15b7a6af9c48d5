# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Waits that end within a time-out, and that can be cancelled at any instant."""

from __future__ import annotations

import ast
import asyncio

import pytest

from jupyter_gpupool.deadlines import within

from .test_architecture import MODULES, PACKAGE, parsed


def started(work):
    """Start ``work`` as a task; return the task when it has begun to wait."""

    async def turn():
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    return turn()


@pytest.mark.parametrize("fails", [False, True])
def test_wait_is_cancelled_if_its_work_ends_at_the_same_time(fails):
    async def scenario():
        answer = asyncio.get_running_loop().create_future()
        task = await started(within(answer, 60))
        if fails:
            answer.set_exception(ValueError())
        else:
            answer.set_result(1)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(scenario())


def test_result_and_error_of_the_work_are_passed_on():
    async def scenario():
        assert await within(asyncio.sleep(0, "done"), 60) == "done"
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await within(answer, 60)

    asyncio.run(scenario())


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_late_work_is_cancelled_before_the_time_out_is_raised(seconds):
    over = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            over.append(True)

    async def scenario():
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        with pytest.raises(asyncio.TimeoutError):
            await within(task, seconds)
        assert over
        assert task.cancelled()

    asyncio.run(scenario())


def test_cancelled_wait_first_ends_its_work():
    over = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            over.append(True)

    async def scenario():
        task = await started(within(work(), 60))
        task.cancel()
        await asyncio.wait({task})
        assert over
        assert task.cancelled()

    asyncio.run(scenario())


def test_no_module_uses_asyncio_wait_for():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]
    assert found == []
