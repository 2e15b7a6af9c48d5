# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Attacks from inside containers, and their effect on a kernel in another user's container.

An attacker is root in its container, and knows the process number, the session and the token of
the other kernel. The short test makes most attacks at the same time. The long test makes each
attack alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import attack
from jupyter_gpupool.procfs import identify
from tests import namespaces
from tests.broker import kit
from tests.broker.kit import LATE, wait_until
from tests.broker.test_neighbours import MOST, MOST_LOG, descriptors, resident

from .kit import running
from .test_containers import CHECK, FILL

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the machine's broker"),
    pytest.mark.skipif(bool(namespaces.refusal()), reason=namespaces.refusal() or "none"),
]

#: The attacks. ``attacks.py`` and ``benchmarks/attack.py`` say what each attack does. The value has
#: the codes that the broker may answer to the attack. The broker may also always answer `busy`.
#: After each attack, :func:`attacked` checks the victim, the broker, and what the attacker has
#: reached.
ATTACKS = {
    # Floods of connections.
    "churn": "",
    "slow": "",
    "descriptors": "",
    # Floods of requests. Some of these attacks read the answers, others do not.
    "ping": "ok",
    "status": "ok",
    "journal": "ok",
    "journal_of_nobody": "ok",
    "acts": "unknown-session",
    "open_close": "ok too-many",
    "opens": "ok too-many",
    "unread": "",
    "unread_pages": "ok",
    "early": "ok abuse not-launched duplicate unknown-session too-many",
    # Malformed lines, and requests that the broker refuses: the refusals could fill the log and the
    # journal.
    "rubbish": "bad-request protocol too-long abuse",
    "unfinished": "",
    "refused": "over-device",
    # A damaged page, and a page that names processes of others.
    "damage": "ok limit no-memory no-page unknown-session",
    "false_processes": "ok",
    # Forged names and tokens.
    "guesses": "bad-token abuse",
    "stolen": "not-yours not-allowed abuse",
    "names_victim": "",
    # Another user's folder, page and notebook.
    "reads": "ok",
}

#: The attacks of each user in the short test. The attacks of one user share a budget of requests,
#: so attacks that need many answers belong to different users.
TEAMS = {
    "mallory": ["status", "journal_of_nobody", "rubbish", "refused"],
    "trudy": ["churn", "open_close", "opens"],
    "eve": ["damage", "false_processes", "unread_pages", "descriptors"],
    "oscar": ["guesses", "stolen", "names_victim", "reads"],
}

#: The name of the victim's notebook.
SECRET = "secret-notebook.ipynb"

#: A kernel may take at most this many seconds to release its slice and get its state back. Without
#: an attack, it takes 0.3 s.
WAIT = 3.0

#: The journal may grow by at most this many bytes during an attack of some seconds. The number
#: includes the journal's log, which the broker empties at 16 MiB.
MOST_JOURNAL = 20_000_000

#: Fields of the victim's session that no attack may change.
KEPT = ("owner", "label", "group", "request", "pid", "guard", "agent", "priority")


@pytest.fixture(scope="module")
def site():
    with running(max_sessions_per_user=20, default_memory=64 * kit.MiB) as found:
        machine = found.started
        for name in ("ada", *TEAMS):
            machine.user(name)
        yield machine


class Victim:
    """A kernel in a container, with bytes on the device."""

    def __init__(self, machine):
        self.machine = machine
        self.kernel = machine.box("ada").kernel(JPY_SESSION_NAME=SECRET)
        self.kernel.run(FILL.replace("250 << 20", "16 << 20") % 7)
        self.session, token = self.kernel.run(
            "import os; print(*(os.environ[f'GPUPOOL_{n}'] for n in ('SESSION', 'TOKEN')))"
        ).split()[-2:]
        self.before = machine.session(self.session)
        pid = self.before["pid"]
        self.known = {"session": self.session, "token": token, "secret": SECRET, "pid": pid,
                      "start_time": identify(pid).start_time}  # fmt: skip

    def live(self):
        """Release the slice, take a slice again and check each byte; return how long this takes."""
        begun = time.monotonic()
        self.kernel.run("%gpu release")
        wait_until(
            lambda: self.machine.session(self.session)["suspended_bytes"],
            "its state is on the host",
        )
        self.kernel.run(CHECK % 7)
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def victim(site):
    return Victim(site)


@pytest.fixture
def machine(site):
    """The machine. After the test, this fixture closes the attackers' containers."""
    kept = [*site.boxes]
    yield site
    for box in site.boxes:
        if box not in kept:
            box.close()


def begin(machine, user, kinds, victim):
    """Start attacks in a container."""
    box = machine.box(user, uid=0)
    for file in (Path(attack.__file__), Path(__file__).with_name("attacks.py")):
        shutil.copy(file, box.shared)
    process = box.start(
        str(box.shared / "attacks.py"), *kinds,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    tell(process, json.dumps(victim.known))
    return process


def tell(process, line):
    process.stdin.write(line + "\n")
    process.stdin.flush()


def peak(machine):
    """Return the broker's highest resident memory so far, in bytes."""
    text = Path(f"/proc/{machine.process.pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def journal(machine):
    return sum(file.stat().st_size for file in (machine.folder / "state").glob("journal*"))


def attacked(machine, victim, teams, *, rounds, seconds):
    """Let teams attack the machine, and check that the attacks do no harm.

    The attacks last at least ``seconds``, and until the victim has had ``rounds`` slices. If the
    broker does not serve the victim, the test does not end.
    """
    victim.live()
    quiet, log, rows = resident(machine), machine.log.stat().st_size, journal(machine)
    open_files = descriptors(machine)
    attacks = [begin(machine, user, kinds, victim) for user, kinds in teams.items()]
    begun, waits = time.monotonic(), []
    while len(waits) < rounds or time.monotonic() - begun < seconds:
        waits.append(victim.live())  # this checks the victim's bytes
        with suppress(subprocess.TimeoutExpired):
            attacks[0].wait(0.1)
    assert [process.poll() for process in attacks] == [None] * len(attacks), "they go on"
    for process in attacks:
        tell(process, "end")
    said = [process.communicate(timeout=60)[0] for process in attacks]
    assert [process.returncode for process in attacks] == [0] * len(attacks), "".join(said)
    seen = {one["kind"]: one for text in said for one in map(json.loads, text.splitlines())}
    assert seen.keys() == {kind for kinds in teams.values() for kind in kinds}

    assert [kind for kind, one in seen.items() if not one["sent"] and not one["codes"]] == []

    # The attackers reached nothing, and the broker gave only answers that ATTACKS allows.
    assert {kind: one["reached"] for kind, one in seen.items() if one["reached"]} == {}
    wrong = {kind: {*one["codes"]} - {*ATTACKS[kind].split(), "busy"} for kind, one in seen.items()}
    assert {kind: codes for kind, codes in wrong.items() if codes} == {}
    # The victim waited only a short time, and its session has not changed. A slow machine may add
    # LATE to the wait.
    assert 0 < max(waits) < WAIT + LATE, waits
    after = machine.session(victim.session)
    assert {name: after[name] for name in KEPT} == {name: victim.before[name] for name in KEPT}
    assert [s["granted_bytes"] for s in after["slices"]] == [64 * kit.MiB]
    # The broker used little memory and disk, and it has freed the attackers' files and sessions.
    assert peak(machine) < MOST
    assert machine.log.stat().st_size - log < MOST_LOG * len(seen)
    assert journal(machine) - rows < MOST_JOURNAL
    assert "Traceback" not in machine.log.read_text()
    wait_until(lambda: descriptors(machine) <= open_files + 5, "the attackers' files are closed")
    wait_until(
        lambda: [s["owner"] for s in machine.status()["sessions"]] == ["ada"],
        "the end of the attackers' sessions",
    )
    assert resident(machine) < quiet + 20_000_000


def test_all_attacks_at_once_do_not_harm_another_container(machine, victim):
    attacked(machine, victim, TEAMS, rounds=3, seconds=0)


@pytest.mark.long
@pytest.mark.parametrize("kind", ATTACKS)
def test_no_attack_harms_another_container(machine, victim, kind):
    attacked(machine, victim, {"mallory": [kind]}, rounds=20, seconds=5.0)


def test_long_queue_of_one_container_does_not_delay_another(machine, victim):
    """When the victim asks for a slice, both GPUs are busy and six kernels wait."""
    attackers = begin(machine, "mallory", ["queue"], victim)
    said = attackers.stdout.readline()
    assert said == "holds\n", said
    client = victim.kernel.client
    cell = client.execute(CHECK % 7)
    wait_until(lambda: queue(machine) == ["ada", *["mallory"] * 6], "the victim is the first")
    (last,) = machine.rows()[-1:]
    tell(attackers, "give one back")
    reply = client.get_shell_msg(timeout=120)
    assert (reply["parent_header"]["msg_id"], reply["content"]["status"]) == (cell, "ok")
    served = [row for row in machine.rows("attach", "resume") if row["seq"] > last["seq"]]
    assert served[0]["owner"] == "ada"


def queue(machine):
    """Return the owners of the waiting sessions, in the order of the queue."""
    found = [s for s in machine.status()["sessions"] if s["state"] == "queued"]
    return [s["owner"] for s in sorted(found, key=lambda s: s["queue_position"])]
