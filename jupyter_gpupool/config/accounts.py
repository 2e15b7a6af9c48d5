# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Checks whether the users and Unix groups in the configuration exist on this machine.

All functions here ask the system's name service (NSS), whose answer may take long.
"""

from __future__ import annotations

import grp
import pwd
from pathlib import Path
from typing import Any, Callable, Iterator

from ..text import did_you_mean
from .mistakes import Fault
from .settings import BrokerSettings

NSSWITCH = Path("/etc/nsswitch.conf")

#: Sources of NSS that are files of this machine. If NSS has only these sources, a name that is in
#: none of the files does not exist.
_LOCAL = frozenset({"files", "compat", "db", "systemd", "altfiles", "mymachines", "extrausers"})

#: A fault suggests an existing name instead of a wrong one only if the two names are at least this
#: similar (from 0 to 1). The limit is high, because different short names are often similar.
_LIKENESS = 0.75


def unknown_names(settings: BrokerSettings) -> list[Fault]:
    """Return a fault for each configured user or Unix group that does not exist here.

    The function checks the names in groups, quotas and admins. If :func:`knows_everybody` returns
    False, a name may exist although NSS does not find it. So callers must treat the faults as
    warnings.
    """
    return [
        *_unknown("users", "user", settings, _user_exists, _users),
        *_unknown("unix_groups", "Unix group", settings, _group_exists, _unix_groups),
    ]


def knows_everybody(path: Path = NSSWITCH) -> bool:
    """Return whether all users and Unix groups of this machine are in its own files.

    Return False if NSS also uses a directory service or another module. In this case a name that
    NSS does not find may still exist, for example while the service does not answer.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True  # without this file NSS reads the machine's own files
    for line in lines:
        name, _, sources = line.partition("#")[0].partition(":")
        if name.strip() in ("passwd", "group"):
            words = sources.replace("[", " [").split()
            if {word for word in words if not word.startswith("[")} - _LOCAL:
                return False
    return True


def doubly_in(settings: BrokerSettings) -> Iterator[tuple[str, str, str]]:
    """Yield (user, group, group) for each user who is in two groups with the same ``order``.

    The user must be in both groups through Unix groups. Users whom any group lists by name are left
    out.
    """
    claims: dict[float | None, dict[str, str]] = {}
    named = {user for rule in settings.members.values() for user in rule.users}
    for name, rule in settings.members.items():
        known = claims.setdefault(rule.order, {})
        for unix_group in rule.unix_groups:
            for user in _members(unix_group):
                other = known.setdefault(user, name)
                if other != name and user not in named:
                    yield user, other, name


def _unknown(
    key: str,
    what: str,
    settings: BrokerSettings,
    exists: Callable[[str], bool],
    known: Callable[[], list[str]],
) -> Iterator[Fault]:
    places: list[tuple[str, str, tuple[Any, ...]]] = [
        (name, "groups", (group, key))
        for group, rule in settings.members.items()
        for name in getattr(rule, key)
    ]
    if key == "users":
        places += [(name, "quotas", (name,)) for name in settings.pool.quotas if name != "*"]
        places += [(name, "admins", ()) for name in settings.admins]
    for name, option, keys in places:
        if not exists(name):
            hint = did_you_mean(name, known(), likeness=_LIKENESS)
            text = f"This machine has no {what} {name!r}."
            yield Fault(text, hint or "Check the spelling.", option, keys)


def _user_exists(name: str) -> bool:
    # In the pool, a user id N without an account has the name "uid-N".
    if name.startswith("uid-") and name[4:].isdigit():
        return True
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _group_exists(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _users() -> list[str]:
    return [account.pw_name for account in pwd.getpwall()]


def _unix_groups() -> list[str]:
    return [group.gr_name for group in grp.getgrall()]


def _members(unix_group: str) -> list[str]:
    try:
        found = grp.getgrnam(unix_group)
    except KeyError:
        return []
    first = [account.pw_name for account in pwd.getpwall() if account.pw_gid == found.gr_gid]
    return [*first, *found.gr_mem]
