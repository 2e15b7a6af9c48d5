# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Every public exception: a stable ``code``, a sentence, the next step, the numbers.

Standard library only; imports nothing of this package.
"""

from __future__ import annotations

from typing import Any, Mapping


class GPUPoolError(Exception):
    """Base of all errors of this package.

    Attributes
    ----------
    code:
        Stable word for programs, such as ``"over-quota"``.
    message:
        What was asked and why it can not be, in one sentence.
    next_step:
        What to do about it; may be empty.
    details:
        The numbers behind the sentence, JSON values.
    """

    code = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        next_step: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.next_step = next_step
        self.details = dict(details or {})

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}".rstrip()


class RefusedError(GPUPoolError):
    """The broker understood and said no (quota, impossible request, unknown session)."""

    code = "refused"


class BrokerUnavailable(GPUPoolError):
    """There is no broker at the socket, or it went away; the message names the socket."""

    code = "broker-unavailable"


class ProtocolError(GPUPoolError):
    """The other side sent something that is not a message of this protocol."""

    code = "protocol"


class ConfigError(GPUPoolError):
    """The admin's configuration has an unknown name or a bad value."""

    code = "config"


class DriverError(GPUPoolError):
    """The CUDA driver or NVML is missing, too old, or failed."""

    code = "driver"
