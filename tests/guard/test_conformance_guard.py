# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The emulated driver's conformance program under the guard: only results about the slice differ.

All processes of the program are in one session, and the gate of this session stays open.
"""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "emulator" / "conformance"

#: Cases that cannot succeed under the guard, and the reasons.
LEFT_OUT = {
    "managed_memory": "it is refused: a session that has some cannot be suspended",
    "graph_out_of_memory": "too large a graph is refused when it is made executable already",
    "restore_without_room": "a session cannot take the device's last bytes",
}
#: Cases that fail under the guard, because they expect that a suspend adds free bytes to
#: cuMemGetInfo. Under the guard, cuMemGetInfo shows the free part of the session's slice. A
#: suspended process keeps its share of the slice.
OF_THE_SLICE = {"state_machine", "graph_memory_suspended"}


def test_only_results_about_the_slice_differ_under_the_guard(make_session, compiled):
    session = make_session()
    session.grant(session.uuids, each=1 << 30)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    program = compiled(SOURCE, "-ldl", output="conformance")
    done = session.run(program, *LEFT_OUT, check=False)
    results = re.findall(r"^(ok|not ok) \d+ - (\w+)( # SKIP by request)?$", done.stdout, re.M)
    assert len(results) >= 40, done.stdout
    assert {name for _, name, skipped in results if skipped} == set(LEFT_OUT)
    assert {name for result, name, _ in results if result == "not ok"} == OF_THE_SLICE, done.stdout
    # Once, the program tries to allocate more than the device has. The guard then asks the broker
    # for growth, and the broker refuses.
    assert [message["type"] for message in session.broker.messages] == ["grow"]
