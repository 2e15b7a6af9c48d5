# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sizes and durations as people write them. Standard library only (the kernel agent uses it)."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, Mapping

_SIZES = {
    "": 1,
    "b": 1,
    **{u: 1 << (10 * n) for n, s in enumerate("kmgt", 1) for u in (s, s + "ib")},
    **{s + "b": 1000**n for n, s in enumerate("kmgt", 1)},
}
_PRINTED = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*$")

#: All GPU work needs more memory than this. If a user asks for less, the user has probably meant
#: another unit than bytes.
LEAST_BYTES = 1 << 20


def parse_bytes(text: str | int) -> int:
    """Return the bytes that ``text`` names: ``"12GiB"``, ``"512M"``, ``"1.5 GB"``.

    ``K M G T`` and ``KiB ...`` are powers of 1024, ``kB MB GB TB`` powers of 1000. An int is bytes.
    Text needs a unit: a user who types ``12`` means GiB, and would otherwise get 12 bytes.

    Raises
    ------
    ValueError
        With a sentence for people, if ``text`` is not a positive size.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"A size must be a number of bytes or text like 12GiB, not {text!r}.")
    match = _NUMBER.match(str(text))
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _SIZES:
        raise ValueError(
            f"{str(text)!r} is not a size. Write a number and a unit, like 12GiB or 512MiB."
        )
    value = int(float(match.group(1)) * _SIZES[unit])
    if value <= 0:
        raise ValueError(f"{str(text)!r} is not a size above zero. Write one like 12GiB or 512MiB.")
    if isinstance(text, str) and not unit:
        raise ValueError(f"{text!r} has no unit. Write 12GiB or 512MiB.")
    if value >= 1 << 60:
        raise ValueError(f"{str(text)!r} is more than any machine has. Write a size like 12GiB.")
    return value


def format_bytes(value: int, *, rounding: Literal["near", "up", "down"] = "near") -> str:
    """Return ``value`` bytes with a binary unit and at most one decimal: ``"5.5 GiB"``.

    If a message says that a required size is larger than a free size, round the required size
    ``up`` and the free size ``down``: the two texts then differ. JupyterLab rounds as "near"
    (``labextension/src/__tests__/sizes.json``).
    """
    power = 0
    while True:
        unit = 1 << (10 * power)
        extra = {"near": unit // 2, "up": unit - 1, "down": 0}[rounding]
        tenths = (abs(value) * 10 + extra) // unit
        if tenths < 10240 or power == len(_PRINTED) - 1:
            break
        power += 1
    whole, tenth = divmod(tenths, 10)
    text = f"{whole}.{tenth}" if tenth else f"{whole}"
    return f"{'-' if value < 0 else ''}{text} {_PRINTED[power]}"


def guaranteed_bytes(session: Mapping[str, Any]) -> int:
    """Return how many bytes of all slices of a session are guaranteed.

    ``session`` is an entry of the broker's ``status``.
    """
    memory = (session.get("request") or {}).get("memory")
    granted = [piece["granted_bytes"] for piece in session.get("slices") or ()]
    if not isinstance(memory, int) or not granted:
        return int(session.get("granted_bytes") or 0)
    return sum(min(size, memory) for size in granted)


def format_grant(granted: int, guaranteed: int) -> str:
    """Return the size of a slice: ``"9 GiB, 4 guaranteed"`` if it has grown, else ``"4 GiB"``.

    JupyterLab prints the same text (``labextension/src/__tests__/sizes.json``).
    """
    text, least = format_bytes(granted), format_bytes(guaranteed)
    if guaranteed >= granted or text == least:
        return text
    if text.split()[1] == least.split()[1]:
        least = least.split()[0]
    return f"{text}, {least} guaranteed"


def typed_bytes(value: int) -> str:
    """Return ``value`` bytes as people type them, in whole GiB or MiB: ``"12GiB"``.

    The result is rounded down to whole MiB.
    """
    mib = value >> 20
    return f"{mib}MiB" if mib % 1024 else f"{mib >> 10}GiB"


def parse_seconds(text: str | float) -> float:
    """Return the seconds that ``text`` names: ``"10m"``, ``"1.5h"``, ``"90"``, ``45``.

    Raises
    ------
    ValueError
        With a sentence for people, if ``text`` is not a duration above zero.
    """
    match = _NUMBER.match(str(text))
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _SECONDS:
        raise ValueError(f"{str(text)!r} is not a duration. Write one like 90s, 10m or 2h.")
    value = float(match.group(1)) * _SECONDS[unit]
    if value <= 0 or not math.isfinite(value):
        raise ValueError(f"{str(text)!r} is not a duration above zero. Write one like 10m.")
    return value


#: People see an expected wait as a range, such as 20 to 60 s. Both ends of the range are in this
#: list of seconds, or are whole days. A more exact estimate is not possible.
_STEPS = (
    *(0, 5, 10, 15, 20, 30, 40, 60, 90, 120, 180, 300, 600, 900, 1200, 1800, 2700, 3600),
    *(5400, 7200, 10800, 18000, 28800, 43200, 86400),
)
_DAY = 86400


def format_range(least: float, most: float) -> str:
    """Return two durations as text: ``"20 to 60 s"``, ``"up to 5 min"``.

    The shorter duration is rounded down, and the longer duration is rounded up. JupyterLab prints
    the same text (``labextension/src/__tests__/waits.json``).
    """
    low, high = range_ends(least, most)
    text, other = _step(high), _step(low)
    if not low:
        return f"up to {text}"
    return f"{other.split()[0] if other.split()[1] == text.split()[1] else other} to {text}"


def range_ends(least: float, most: float) -> tuple[int, int]:
    """Return the two ends that :func:`format_range` prints, in seconds."""
    low = max(step for step in _STEPS if step <= max(0.0, least))
    high = next((step for step in _STEPS if step >= max(1.0, most)), 0)
    high = high or -int(-most // _DAY) * _DAY
    return (_STEPS[_STEPS.index(low) - 1] if low == high and low in _STEPS else low), high


def _step(seconds: int) -> str:
    if seconds <= 90:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def format_clock(seconds: float) -> str:
    """Return a countdown as the chip shows it: ``"0:42"``, ``"12:05"``, ``"1:02:05"``."""
    minutes, left = divmod(max(0, math.ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def format_waited(seconds: float) -> str:
    """Return how long a wait has lasted; "" in its first second.

    The text changes every second in the first ten seconds, then every ten seconds, and after one
    minute only every minute.
    """
    step = 1 if seconds < 10 else 10 if seconds < 60 else 60
    waited = seconds // step * step
    return format_seconds(waited) if waited >= 1 else ""


def format_wait(waited: float, left: tuple[float, float] | None = None) -> str:
    """Return the text that people read about how long a wait will last, or has lasted.

    ``left`` is the shortest and the longest time that the wait will probably still last: the text
    is ``"20 to 60 s left"``. If ``left`` is None, or the longest time is over, the text is
    ``"waiting for 40 s, no estimate yet"``, or ``"no estimate yet"`` in the first second.
    """
    if left is not None and left[1] > 0:
        return f"{format_range(*left)} left"
    text = format_waited(waited)
    return f"waiting for {text}, no estimate yet" if text else "no estimate yet"


def wait_of(session: Mapping[str, Any], now: float) -> str:
    """Return the text of :func:`format_wait` for a session in the broker's status at ``now``."""
    expected, since = session.get("expected"), session.get("queued_at")
    left = None
    if expected is not None:
        left = max(0.0, expected["since"] - now), expected["until"] - now
    return format_wait(now - since if since is not None else 0.0, left)


def idle_of(session: Mapping[str, Any], now: float) -> float | None:
    """Return how many seconds ``session`` has been idle; None if it is not idle, or if unknown."""
    since = session.get("idle_since")
    return None if since is None else max(0.0, now - since)


def format_seconds(value: float) -> str:
    """Return ``value`` seconds as people say them: ``"40 s"``, ``"3 min"``, ``"2.5 h"``."""
    if 0 < value < 0.95:
        return f"{max(0.1, value):.1f} s"
    if value < 90:
        return f"{value:.0f} s"
    if value < 5400:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f}".removesuffix(".0") + " h"
