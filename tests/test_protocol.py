# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool import protocol
from jupyter_gpupool.broker.request_fields import READS, REQUESTS, check_request
from jupyter_gpupool.errors import ProtocolError, RefusedError
from jupyter_gpupool.protocol import (
    MAX_LINE,
    decode,
    encode,
    error_message,
    raise_for,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda k: k not in ("v", "type")), json_values))
def test_encoded_message_is_one_line_and_decodes_unchanged(fields):
    line = encode({"type": "ping", **fields})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == {"v": 1, "type": "ping", **fields}


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_a_protocol_error(line):
    try:
        check_request(decode(line))
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"x", "not JSON"),
        (b"[1]", "JSON object"),
        (b'{"v":1}', "text field 'type'"),
        (b'{"v":2,"type":"ping"}', "version 2"),
        (b'{"type":"ping"}', "version None"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (MAX_LINE + 1), "at most"),
    ],
)
def test_error_for_a_bad_line_says_what_is_wrong(line, words):
    with pytest.raises(ProtocolError, match=words):
        decode(line)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "fly"}, "no message type 'fly'"),
        ({"type": "ping", "id": 0}, "'id'"),
        ({"type": "ping", "id": True}, "'id'"),
        ({"type": "ping", "id": "1"}, "'id'"),
        ({"type": "launched", "session": "s"}, "needs the field 'pid'"),
        ({"type": "launched", "session": "s", "pid": "1"}, "'pid'"),
        ({"type": "launched", "session": "s", "pid": True}, "'pid'"),
        ({"type": "keep", "seconds": True}, "'seconds'"),
        ({"type": "request", "memory": 1.5}, "'memory'"),
    ],
)
def test_error_for_a_bad_request_names_the_field(message, words):
    with pytest.raises(ProtocolError, match=words):
        check_request(message)


@pytest.mark.parametrize("kind", sorted(k for k, (required, _) in REQUESTS.items() if required))
def test_a_request_without_its_required_fields_is_refused(kind):
    with pytest.raises(ProtocolError, match="needs the field"):
        check_request({"type": kind})


def test_unknown_fields_of_a_newer_peer_are_ignored():
    assert check_request({"type": "ping", "id": 3, "colour": "red"})["id"] == 3


def test_error_stays_the_same_over_the_wire():
    sent = RefusedError("No.", code="over-quota", next_step="Ask.", details={"asked": 3})
    with pytest.raises(RefusedError) as caught:
        raise_for(decode(encode(error_message(sent, 7))))
    got = caught.value
    assert (got.code, got.message, got.next_step, got.details) == (
        "over-quota",
        "No.",
        "Ask.",
        {"asked": 3},
    )


def test_docstring_of_the_protocol_names_all_read_requests():
    words = (protocol.__doc__ or "").partition(" are *reads*")[0].rpartition("\n\n")[2]
    assert {word.strip("`, ") for word in words.replace(" and ", " ").split()} == READS
