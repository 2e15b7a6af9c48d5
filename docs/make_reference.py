# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Write ``config.md``, ``cli.md``, ``protocol.md`` and ``errors.md`` from the code.

``python docs/make_reference.py`` writes the pages. The tests in ``tests/docs`` fail while the pages
and the code differ.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from jupyter_gpupool import protocol  # noqa: E402 (needs the path set above)
from jupyter_gpupool.broker import request_fields  # noqa: E402 (needs the path set above)
from jupyter_gpupool.cli import commands  # noqa: E402 (needs the path set above)
from jupyter_gpupool.cli.configtext import markdown_reference  # noqa: E402 (needs the path set above)
from jupyter_gpupool.cli.registry import EXIT_CODES  # noqa: E402 (needs the path set above)
from jupyter_gpupool.config import fixed_options  # noqa: E402 (needs the path set above)
from jupyter_gpupool.errors import Code  # noqa: E402 (needs the path set above)

NOTE = "<!-- Written by docs/make_reference.py; do not edit. -->\n\n"

CONFIG = """\
# Configuration

All options are `c.GPUPool.*` in `jupyter_server_config.py` (or `.json`). `jupyter --paths` lists
the folders where Jupyter looks, under "config"; a folder that is listed earlier wins. The broker
reads the files as the user it runs as, and nobody else does: a notebook or a kernelspec cannot
change what is here.

- `jupyter gpupool generate-config` prints a file with every option, commented out.
- `jupyter gpupool check-config` prints what the files mean: the groups with their bytes, the
  schedules with the next change, and what is different in the running broker.
- An unknown name, a bad value, or values that do not go together are refused, all at once, each
  with its file and line, the nearest valid name and an example; the broker then does not start, or
  keeps what it had on SIGHUP.
- [Groups, budgets and schedules](groups.md) have a page of their own.
- Sizes take bytes or text: `4294967296`, `"4GiB"`, `"512MiB"`, `"1.5 GB"`. KiB, MiB, GiB are
  powers of 1024 and so are K, M, G; kB, MB, GB are powers of 1000.
- Durations take seconds or text: `90`, `"90s"`, `"10m"`, `"2h"`.
"""

CLI = """\
# Commands

Exit codes: 0 done, 1 a problem or a refusal (nothing was changed), 2 wrong usage; `run` and `wait`
have others. Errors are one sentence on stderr. `--json` output is for programs; its sizes are bytes
and its times seconds.

"""

BROKER = """\
## `jupyter gpupool broker`

Run the broker in the foreground. You need it only in a service file: without a machine-wide
broker the first Pooled GPU kernel starts one for you. A broker that is not the machine's ends when
it has had no kernel for `c.GPUPool.linger`. Every option of [the configuration](config.md) can be
given as `--GPUPool.name=value`; `jupyter gpupool broker --help` lists the others.
"""

PROTOCOL = """\
# Wire protocol

This page is for people who write another client. Python programs use
`jupyter_gpupool.client.Client`.

"""

ERRORS = """\
# Error codes

Every refusal and every error has a code, a sentence, what to do next, and the numbers behind it.
Programs compare the code: the text may change. A message of the [wire protocol](protocol.md) has
the code in `code`; the [REST API](server.md) answers with it and the HTTP status that is given
here.

| code | HTTP | meaning |
|---|---|---|
"""


def config_page() -> str:
    names = ", ".join(f"`{name}`" for name in fixed_options())
    fixed = textwrap.fill(
        f"- A running broker reads its files again on SIGHUP, but keeps the old value of {names}.",
        width=100,
        subsequent_indent="  ",
    )
    return f"{NOTE}{CONFIG}{fixed}\n\n{markdown_reference()}"


def cli_page() -> str:
    """Return the page. It does not use format_help(): that text differs between Python versions."""
    parts = [_command(*item) for item in commands.subcommands().items() if item[0] != "broker"]
    return NOTE + CLI + "\n".join([*parts, BROKER])


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage, rows, rest = [f"jupyter gpupool {name}"], [], []
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        value = f" {action.metavar}" if action.metavar and action.option_strings else ""
        names = ", ".join(f"`{option}{value}`" for option in action.option_strings)
        if action.nargs == argparse.REMAINDER:
            rest = ["--", f"{action.metavar} ..."]
        elif not names:
            usage.append(f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar))
        rows.append(f"| {names or f'`{action.metavar}`'} | {action.help} |")
    usage.extend(["[options]"] if "--" in "".join(rows) else [])
    usage.extend(rest)
    table = ["", "| | |", "|---|---|", *rows] if rows else []
    lines = [f"## `jupyter gpupool {name}`", "", str(parser.description), "", "```console"]
    codes = [] if parser.epilog == EXIT_CODES else ["", str(parser.epilog)]
    return "\n".join([*lines, " ".join(usage), "```", *table, *codes]) + "\n"


def protocol_page() -> str:
    rows = ["| message | required | optional |", "|---|---|---|"]
    for name, (required, optional) in request_fields.REQUESTS.items():
        rows.append(f"| `{name}` | {_fields(required)} | {_fields(optional)} |")
    return (
        f"{NOTE}{PROTOCOL}```{{eval-rst}}\n{(protocol.__doc__ or '').strip()}\n```\n\n"
        f"## Requests\n\nThis is version {protocol.VERSION}; a request has at most "
        f"{protocol.MAX_REQUEST} bytes and an answer {protocol.MAX_LINE}.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def _fields(fields: object) -> str:
    assert isinstance(fields, dict)
    return ", ".join(f"`{name}` ({accepted.about})" for name, accepted in fields.items()) or "-"


def errors_page() -> str:
    rows = (f"| `{code}` | {code.status} | {code.about} |" for code in sorted(Code))
    return NOTE + ERRORS + "\n".join(rows) + "\n"


PAGES = {
    "config.md": config_page,
    "cli.md": cli_page,
    "protocol.md": protocol_page,
    "errors.md": errors_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
