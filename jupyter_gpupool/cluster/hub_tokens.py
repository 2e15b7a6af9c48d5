# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Credentials by a JupyterHub token: the Hub says whose token it is.

A Hub can revoke a token, so an answer of the Hub is valid for :data:`FRESH` seconds only. The
credential contains the token itself, so an agent that carries the credential could use the token to
act for its user. So choose this method only if all users of the agents' machines may act for each
other anyway, or if MUNGE cannot tell users apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import time
from collections.abc import Callable
from http.client import HTTPException
from threading import Lock
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from .identity import LIFETIME, CheckedCredential, bad, cannot

#: ``FRESH``: seconds for which an answer of the Hub is valid. ``PATIENCE``: time-out in seconds for
#: the answer.
FRESH, PATIENCE = 60.0, 10.0
#: Most tokens whose owners this module remembers.
MOST = 10_000
#: The most bytes that an answer of the Hub may have.
_MOST_BYTES = 1 << 20

#: The variable in which a server that JupyterHub has started finds its token.
TOKEN_VARIABLE = "JUPYTERHUB_API_TOKEN"


#: The Hub always gives this scope to the token of a user's own server. The Hub also makes tokens
#: that a user's browser passes to a service, or to another user's server. These tokens name the
#: user, too, but lack this scope. So this module refuses them.
_OWN = "users:activity"


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect, so that a token goes only to the Hub."""

    def redirect_request(self, *_: object) -> None:
        return None


class HubTokens:
    """Asks a JupyterHub who owns a token.

    Parameters
    ----------
    api:
        The address of the Hub's API, such as ``http://hub:8081/hub/api``.
    clock:
        Returns the time in seconds, for the age of answers.
    """

    def __init__(self, api: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = f"{api.rstrip('/')}/user"
        self._clock = clock
        self._opener = build_opener(ProxyHandler({}), _NoRedirect())
        #: By the hash of a token: the user, and the time of the Hub's answer.
        self._known: dict[str, tuple[str, float]] = {}
        #: By the hash of a used credential: the time until which it must be remembered.
        self._used: dict[str, float] = {}
        #: Several threads check credentials.
        self._lock = Lock()

    def seal(self, text: str) -> str:
        """Return a credential with ``text`` and the token that this process has."""
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise cannot(
                f"This server has no token of a JupyterHub (${TOKEN_VARIABLE}).",
                "Start it from the Hub.",
            )
        values = {"token": token, "text": text, "made": time.time(), "id": os.urandom(16).hex()}
        return json.dumps(values, separators=(",", ":"))

    def check(self, credential: str) -> CheckedCredential:
        """Return the text of a credential and the user of its token. Refuse a second use."""
        try:
            values = json.loads(credential)
            token, text, made = str(values["token"]), str(values["text"]), float(values["made"])
            name = str(values["id"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise bad("its format is wrong") from None
        if not abs(time.time() - made) < LIFETIME:
            raise bad("it is too old, or the clocks of the machines differ")
        user = self._owner(token)
        try:
            uid = pwd.getpwnam(user).pw_uid
        except (KeyError, ValueError):
            raise bad(f"its user {user[:80]!r} has no account on this machine") from None
        self._note_use(hashlib.sha256(f"{token} {name}".encode()).hexdigest())
        return CheckedCredential(uid, text)

    def forget(self) -> None:
        """Forget all answers of the Hub, because it may have revoked some of the tokens."""
        self._known.clear()

    def _note_use(self, mark: str) -> None:
        now = self._clock()
        with self._lock:
            if self._used.get(mark, now) > now:
                raise bad("it was used before")
            if len(self._used) >= MOST:
                self._used = {key: until for key, until in self._used.items() if until > now}
            # A credential is valid from LIFETIME before its date until LIFETIME after its date. So
            # remember a used credential for two times LIFETIME.
            self._used[mark] = now + 2 * LIFETIME

    def _owner(self, token: str) -> str:
        mark, now = hashlib.sha256(token.encode()).hexdigest(), self._clock()
        known = self._known.get(mark)
        if known is not None and now - known[1] < FRESH:
            return known[0]
        self._known.pop(mark, None)
        user = self._ask(token)
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[mark] = user, now
        return user

    def _ask(self, token: str) -> str:
        if not token.isascii() or not token.isprintable():
            raise bad("it has no token")
        request = Request(self._url, headers={"Authorization": f"token {token}"})
        try:
            with self._opener.open(request, timeout=PATIENCE) as answer:
                found = json.loads(answer.read(_MOST_BYTES))
        except HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise bad("the Hub does not know its token, or has revoked it") from None
            raise cannot(f"The Hub answered {error.code} at {self._url}.") from None
        except (URLError, HTTPException, OSError, ValueError) as error:
            raise cannot(f"The Hub does not answer at {self._url}: {error}.") from None
        if not isinstance(found, dict) or found.get("kind") != "user" or not found.get("name"):
            raise bad("its token belongs to no user")
        name, scopes = str(found["name"]), found.get("scopes")
        if not isinstance(scopes, list):
            raise bad(
                "the Hub does not report the scopes of its token",
                "Upgrade the Hub to JupyterHub 2.0 or later, which reports scopes.",
            )
        if not {_OWN, f"{_OWN}!user={name}"}.intersection(map(str, scopes)):
            raise bad(
                f"its token lacks the scope {_OWN}, which the token of a user's own server has",
                "Start the server from the Hub, and use the token that the Hub gives this server.",
            )
        return name
