# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Credentials of real MUNGE daemons, and of a JupyterHub that this process imitates."""

from __future__ import annotations

import json
import os
import pwd
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, BrokenBarrierError, Thread

import pytest

from jupyter_gpupool.cluster import hub_tokens, munge
from jupyter_gpupool.cluster.hub_tokens import FRESH, TOKEN_VARIABLE, HubTokens
from jupyter_gpupool.cluster.identity import LIFETIME, CheckedCredential, order_text, read_order
from jupyter_gpupool.cluster.munge import Munge
from jupyter_gpupool.errors import Code, RefusedError
from tests.broker.test_lies import root_only

from .identities import NOBODY, as_nobody, munge_daemons


@pytest.fixture(scope="module")
def daemons():
    """Two machines of a cluster, and a third machine with another key."""
    with munge_daemons("m0", "m1", "stranger", keys={"stranger": b"another key"}) as found:
        yield found


def refusal(function, *arguments):
    with pytest.raises(RefusedError) as error:
        function(*arguments)
    return error.value


def here(socket):
    return Munge(socket, reader=os.getuid())


def test_a_credential_names_its_user_and_its_order(daemons):
    text = order_text("m1", {"do": "poll"})
    claim = here(daemons["m1"]).check(here(daemons["m0"]).seal(text))
    assert claim.uid == os.getuid()
    assert read_order(claim, "m1") == {"do": "poll", "node": "m1"}


@root_only
def test_the_user_of_a_credential_comes_from_the_daemon(daemons):
    sealed = as_nobody("seal", daemons["m0"], order_text("m1", {"do": "poll", "uid": 0}))
    assert here(daemons["m1"]).check(sealed).uid == NOBODY


def test_a_used_credential_is_refused(daemons):
    sealed = here(daemons["m0"]).seal("{}")
    here(daemons["m1"]).check(sealed)
    found = refusal(here(daemons["m1"]).check, sealed)
    assert found.code == Code.BAD_CREDENTIAL
    assert "it was used before" in str(found)


def test_a_credential_is_refused_on_another_machine(daemons):
    """The credential is valid and unused, but it names another machine."""
    sealed = here(daemons["m0"]).seal(order_text("m1", {"do": "poll"}))
    found = refusal(read_order, here(daemons["m0"]).check(sealed), "m0")
    assert found.code == Code.BAD_CREDENTIAL
    assert "it is for the machine m1, but this machine is m0" in str(found)


@root_only
def test_the_user_of_the_agents_cannot_read_a_credential(daemons):
    sealed = here(daemons["m0"]).seal("secret")
    assert as_nobody("check", daemons["m1"], sealed) == Code.BAD_CREDENTIAL
    assert "secret" not in sealed


def test_a_changed_credential_is_refused(daemons):
    sealed = here(daemons["m0"]).seal("{}")
    middle = len(sealed) // 2
    other = "A" if sealed[middle] != "A" else "B"
    changed = sealed[:middle] + other + sealed[middle + 1 :]
    assert refusal(here(daemons["m1"]).check, changed).code == Code.BAD_CREDENTIAL
    assert refusal(here(daemons["m1"]).check, "nonsense").code == Code.BAD_CREDENTIAL


def test_a_credential_with_another_key_is_refused(daemons):
    sealed = here(daemons["stranger"]).seal("{}")
    assert refusal(here(daemons["m1"]).check, sealed).code == Code.BAD_CREDENTIAL


def test_a_machine_without_munged_reports_no_authenticator(tmp_path):
    munge = here(str(tmp_path / "none.socket"))
    for found in (refusal(munge.seal, "{}"), refusal(munge.check, "MUNGE:AAAA:")):
        assert found.code == Code.NO_AUTHENTICATOR


def test_no_credential_is_made_if_munge_refuses_a_setting(daemons, monkeypatch):
    """The setting names the only reader. Without it, all users could read the credential."""
    monkeypatch.setattr(munge, "_ONLY_UID", 99)
    found = refusal(here(daemons["m0"]).seal, "{}")
    assert found.code == Code.NO_AUTHENTICATOR
    assert "MUNGE cannot be set up" in str(found)


@pytest.mark.parametrize("text", ["", "[]", "7", "{", '{"node": 7}', "[" * 100_000])
def test_text_that_is_not_an_order_is_refused(text):
    assert refusal(read_order, CheckedCredential(0, text), "m1").code == Code.BAD_CREDENTIAL


# ---------------------------------------------------------------------- a JupyterHub

ME = pwd.getpwuid(os.getuid()).pw_name


def user(*scopes):
    """Return the Hub's answer for a token of this user with these scopes."""
    return {"kind": "user", "name": ME, "scopes": list(scopes)}


class Hub:
    """Answers ``GET /hub/api/user`` as JupyterHub does."""

    def __init__(self):
        self.owners = {"mine": user(f"users:activity!user={ME}", f"access:servers!server={ME}/")}
        self.asked = []
        self.status = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.asked.append(self.path)
                scheme, _, token = self.headers.get("Authorization", "").partition(" ")
                owner = hub.owners.get(token) if scheme == "token" else None
                status = hub.status or (403 if owner is None else 200)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                if status == 200:
                    self.wfile.write(json.dumps(owner).encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hub/api/"
        self.thread = Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join(30)
        self.server.server_close()


@pytest.fixture
def hub():
    found = Hub()
    yield found
    found.close()


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def tokens(hub, clock, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "mine")
    return HubTokens(hub.url, clock=lambda: clock[0])


def test_the_hub_names_the_user_of_a_token(tokens, hub):
    assert tokens.check(tokens.seal("{}")) == CheckedCredential(os.getuid(), "{}")
    assert hub.asked == ["/hub/api/user"]


def test_the_answer_of_the_hub_is_reused_for_a_limited_time(tokens, hub, clock):
    for _ in range(3):
        tokens.check(tokens.seal("{}"))
    assert len(hub.asked) == 1
    clock[0] += FRESH
    tokens.check(tokens.seal("{}"))
    assert len(hub.asked) == 2


def test_a_revoked_token_is_refused_after_the_answer_expires(tokens, hub, clock):
    tokens.check(tokens.seal("{}"))
    hub.owners.clear()
    clock[0] += FRESH
    found = refusal(tokens.check, tokens.seal("{}"))
    assert found.code == Code.BAD_CREDENTIAL
    assert "revoked" in str(found)


def test_forget_makes_the_next_check_ask_the_hub_again(tokens, hub):
    tokens.check(tokens.seal("{}"))
    hub.owners.clear()
    tokens.forget()
    assert refusal(tokens.check, tokens.seal("{}")).code == Code.BAD_CREDENTIAL


def test_a_credential_with_a_token_can_be_used_only_once(tokens):
    sealed = tokens.seal("{}")
    tokens.check(sealed)
    assert "it was used before" in str(refusal(tokens.check, sealed))


def test_an_old_credential_with_a_token_is_refused(tokens, monkeypatch):
    sealed = tokens.seal("{}")
    later = time.time() + LIFETIME + 1
    monkeypatch.setattr(hub_tokens.time, "time", lambda: later)
    assert "it is too old" in str(refusal(tokens.check, sealed))


@pytest.mark.parametrize(
    "owner",
    [
        {"kind": "service", "name": ME, "scopes": ["users:activity"]},
        {"kind": "user", "name": "no such user", "scopes": ["users:activity"]},
        *([], {}),
    ],
)
def test_a_token_without_a_user_of_this_machine_is_refused(tokens, hub, owner):
    hub.owners["mine"] = owner
    assert refusal(tokens.check, tokens.seal("{}")).code == Code.BAD_CREDENTIAL


@pytest.mark.parametrize(
    "scopes",
    [
        # Scopes of a browser's token: first for the server of another user, then for a service.
        ["access:servers!server=bob/"],
        ["access:services!service=shop", f"read:users:name!user={ME}"],
        [f"read:users:activity!user={ME}"],
        ["users:activity!user=bob"],
        [],
    ],
)
def test_a_token_that_others_may_have_is_refused(tokens, hub, scopes):
    hub.owners["mine"] = user(*scopes)
    found = refusal(tokens.check, tokens.seal("{}"))
    assert found.code == Code.BAD_CREDENTIAL
    assert "its token lacks the scope users:activity" in str(found)


def test_a_token_with_all_scopes_is_accepted(tokens, hub):
    hub.owners["mine"] = user("admin:users", "users:activity", "users")
    assert tokens.check(tokens.seal("{}")).uid == os.getuid()


def test_a_hub_that_does_not_report_scopes_is_refused(tokens, hub):
    del hub.owners["mine"]["scopes"]
    found = refusal(tokens.check, tokens.seal("{}"))
    assert "does not report the scopes of its token" in str(found)


def test_only_one_of_two_threads_can_use_a_credential(tokens):
    sealed = tokens.seal("{}")
    both = Barrier(2)

    class Slow(dict):
        """Gives both threads time to read before one of them writes."""

        def get(self, *arguments):
            found = super().get(*arguments)
            with suppress(BrokenBarrierError):
                both.wait(0.2)
            return found

    tokens._used = Slow()
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(tokens.check, sealed) for _ in range(2)]
        errors = [each.exception() for each in ended]
    assert sorted(error is None for error in errors) == [False, True]


@pytest.mark.parametrize("status", [302, 500])
def test_a_failing_hub_does_not_make_a_token_invalid(tokens, hub, status):
    hub.status = status
    assert refusal(tokens.check, tokens.seal("{}")).code == Code.NO_AUTHENTICATOR
    assert hub.asked == ["/hub/api/user"]
    hub.status = 0
    assert tokens.check(tokens.seal("{}")).uid == os.getuid()


@pytest.mark.parametrize(
    "credential",
    [
        *("", "{}", "[]", '{"token": "a\\nb"}', "7", "[" * 100_000),
        f'{{"token": "a", "text": "", "id": "", "made": 1{"0" * 400}}}',
    ],
)
def test_text_that_is_not_a_credential_is_refused(tokens, hub, credential):
    assert refusal(tokens.check, credential).code == Code.BAD_CREDENTIAL
    assert hub.asked == []


def test_a_server_without_a_token_makes_no_credential(tokens, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert refusal(tokens.seal, "{}").code == Code.NO_AUTHENTICATOR
