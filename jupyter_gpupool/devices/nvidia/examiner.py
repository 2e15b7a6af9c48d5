# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Derive a device's tier, and the reason, from a test with the guard and a test without it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Callable, Mapping, Sequence

from ...errors import GPUPoolError
from ...guard import install
from ...pool.model import Device, Tier
from ...procfs import ProcessId
from ..children import Children
from . import selftest
from .guard_frame import guard_frame
from .operations import Operation
from .sampler import Sampler
from .selftest import Abilities, Frame, Stage

#: Makes an operation on a process of a session.
Operations = Callable[[ProcessId, str], Operation]


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of one device's tests; ``unguarded`` says why the guard does not work on it."""

    verdict: Abilities
    unguarded: str = ""


class Examiner:
    """Tests devices; if ``guard`` is True, it tests each device first with the guard."""

    def __init__(
        self,
        *,
        children: Children,
        env: Mapping[str, str],
        log: logging.Logger,
        sampler: Sampler,
        guard: bool,
    ) -> None:
        self._children = children
        self._env = env
        self._log = log
        self._guard = guard
        self._stage = Stage(sampler)

    async def examine(
        self,
        device: Device,
        peer: str | None,
        everything: Sequence[str],
        operations: Operations,
        *,
        retire: bool = False,
    ) -> Findings:
        """Test ``device`` with the guard; if this test fails, test the device without the guard.

        If the examiner has no guard, only the test without the guard runs. For ``retire``, see
        :func:`selftest.judge`.
        """

        async def judge(frame: Frame, env: Mapping[str, str]) -> Abilities:
            target = self._children.make("selftest", device.uuid, env=env, restart=False)
            return await selftest.judge(
                target,
                lambda root: operations(root, frame.session),
                device.uuid,
                peer,
                everything,
                frame=frame,
                stage=self._stage,
                retire=retire,
            )

        unguarded = ""
        if self._guard:
            try:
                async with guard_frame(device.uuid, device.index, self._env) as frame:
                    verdict = await judge(frame, frame.env)
                if verdict.can_suspend and verdict.tested:
                    return Findings(verdict)
                unguarded = verdict.reason
            except (GPUPoolError, OSError) as error:
                unguarded = _unusable(error)
        verdict = await judge(Frame(), {**self._env, "CUDA_VISIBLE_DEVICES": device.uuid})
        return Findings(verdict, unguarded if verdict.tested else verdict.reason)

    def apply(self, found: Findings, device: Device, limits: str) -> Device:
        """Return ``device`` with the results in ``found``.

        ``limits`` says what the driver cannot do. If the verdict in ``found`` has no reason, the
        reason of the device's tier contains ``limits``.
        """
        verdict = found.verdict
        tier: Tier = "guarded" if self._guard and not found.unguarded else "unguarded"
        unguarded = found.unguarded
        if not verdict.can_suspend:
            tier, unguarded = "none", ""  # the guard's test failed for the same reason
            self._log.warning(
                "%s (%s) cannot suspend: %s", device.name, device.uuid, verdict.reason
            )
        elif unguarded:
            self._log.warning("%s (%s): %s", device.name, device.uuid, unguarded)
        return replace(
            device,
            tier=tier,
            can_suspend=verdict.can_suspend,
            can_migrate=verdict.can_migrate,
            tier_reason=sentences(unguarded, verdict.reason or limits),
            context_bytes=self._stage.found.get(device.uuid, device.context_bytes),
        )

    def trust(self, device: Device, known: Device) -> Device:
        """Return ``device`` with the test results of ``known``, its record by an earlier broker."""
        tier, reason = known.tier, known.tier_reason
        if tier == "guarded":
            try:
                install.library()
            except GPUPoolError as error:
                tier, reason = "unguarded", _unusable(error)
            if not self._guard:
                tier, reason = "unguarded", ""
        elif tier == "unguarded" and self._guard and not reason:
            reason = (
                "This GPU was tested without the guard, and kernels of an earlier broker still use "
                "the GPU. End these kernels and restart the broker, so that it tests the GPU again."
            )
        return replace(
            device,
            tier=tier,
            can_suspend=known.can_suspend,
            can_migrate=known.can_migrate,
            tier_reason=reason,
            context_bytes=known.context_bytes,
            # Do not measure this again: memory that is in use now may belong to sessions. There
            # were no sessions when the earlier broker measured its value.
            memory_reserved=max(device.memory_reserved, known.memory_reserved),
        )

    def guard_problem(self, problem: str, devices: Sequence[Device]) -> str:
        """Return why no device has the tier "guarded"; empty if a device has it."""
        if any(device.tier == "guarded" for device in devices):
            return ""
        if not self._guard:
            return "c.GPUPool.guard is False."
        return sentences(problem, *(d.tier_reason for d in devices)) or "There is no GPU."


def sentences(*texts: str) -> str:
    """Join texts as sentences: add missing full stops, and leave out repeated texts."""
    ended = (text if text.endswith((".", "?")) else f"{text}." for text in texts if text)
    return " ".join(dict.fromkeys(ended))


def _unusable(error: Exception) -> str:
    # Return the error's text without the advice on the next step: the text goes into status and
    # logs. The doctor shows the next step.
    text = error.message if isinstance(error, GPUPoolError) else str(error)
    return f"The guard cannot be used. {text}"
