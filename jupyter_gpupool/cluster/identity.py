# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Credentials: a credential carries an order to another machine's broker, and proves who made it.

The agents of the cluster carry credentials. With ``munge`` an agent cannot read a credential,
cannot change it, and cannot use it on another machine. ``hub_tokens`` does not protect against the
agents: they can read the token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import Code, RefusedError

#: Seconds for which a credential is valid. The machines' clocks must differ by less than this.
LIFETIME = 120


@dataclass(frozen=True, slots=True)
class CheckedCredential:
    """A checked credential: the user who made it, and what it contains."""

    uid: int
    text: str


class Authenticator(Protocol):
    """Makes credentials for the user of this process, and checks credentials of other users.

    Both methods may block for seconds, so call them in a thread.
    """

    def seal(self, text: str) -> str:
        """Return a credential with ``text``, made by the user of this process."""

    def check(self, credential: str) -> CheckedCredential:
        """Return who made a credential, and its text.

        Raises
        ------
        RefusedError
            With code ``bad-credential`` if the credential is not valid. With code
            ``no-authenticator`` if this machine cannot check credentials now.
        """


def bad(why: str, next_step: str = "") -> RefusedError:
    """Return the refusal of a credential."""
    return RefusedError(
        f"The credential of this request is not valid: {why}.",
        code=Code.BAD_CREDENTIAL,
        next_step=next_step,
    )


def cannot(why: str, next_step: str = "") -> RefusedError:
    """Return the refusal that says why credentials cannot be made or checked now."""
    return RefusedError(why, code=Code.NO_AUTHENTICATOR, next_step=next_step)


def order_text(node: str, order: Mapping[str, Any]) -> str:
    """Return an order as text that only the broker of the machine ``node`` accepts.

    A machine remembers the credentials that it has seen, so it accepts a credential only once. But
    it does not know which credentials other machines have seen. So the text names the one machine
    that may accept the credential.
    """
    return json.dumps({**order, "node": node}, separators=(",", ":"))


def read_order(claim: CheckedCredential, node: str) -> dict[str, Any]:
    """Return the order in a checked credential. Refuse an order that is not for ``node``.

    Raises
    ------
    RefusedError
        With code ``bad-credential``.
    """
    try:
        order = json.loads(claim.text)
    except (ValueError, RecursionError):
        order = None
    if not isinstance(order, dict):
        raise bad("it contains no order")
    if order.get("node") != node:
        asked = str(order.get("node"))[:80]
        raise bad(f"it is for the machine {asked}, but this machine is {node}")
    return order
