# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The OpenAPI document describes the server: schemathesis makes requests from it, and checks the
answers.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from jupyter_gpupool.pool.transitions import TRANSITIONS
from jupyter_gpupool.server import openapi
from jupyter_gpupool.server.extension import ROUTES

from .kit import TOKEN


def all_checks():
    """Return the checks for each answer.

    No check demands that a correct request succeeds: it may be refused (409), or name an unknown
    kernel (404). The imports are in this function because they take 0.9 s, and each test worker
    imports this module.
    """
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as openapi_checks

    return [
        checks.not_a_server_error,
        openapi_checks.status_code_conformance,
        openapi_checks.content_type_conformance,
        openapi_checks.response_schema_conformance,
        openapi_checks.negative_data_rejection,
        openapi_checks.unsupported_method,
        openapi_checks.ignored_auth,
    ]


OPERATIONS = [
    (path, method)
    for path, item in openapi.document("/")["paths"].items()
    for method in ("get", "patch", "post")
    if method in item
]


def test_document_names_every_route_and_no_other():
    named = {
        re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path) for path in openapi.document("/")["paths"]
    }
    routes = {path for path, _ in ROUTES if path not in ("/events", "(?:/.*)?")}
    assert named == routes
    handlers = dict(ROUTES)
    for path, method in OPERATIONS:
        route = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
        assert method in vars(handlers[route])
    states = openapi.document("/")["components"]["schemas"]["State"]["enum"]
    assert set(states) == {state for step in TRANSITIONS for state in step}


def test_server_serves_the_document(server):
    found = server.api("/openapi.json")
    assert found == openapi.document("/")
    assert found["openapi"].startswith("3.1")


@pytest.fixture(scope="module")
def kernel_id(server):
    """A kernel with a session, for requests that need one."""
    name = server.start_kernel()
    yield name
    server.stop_kernel(name)


def fields_of(schema):
    return openapi.document("/")["components"]["schemas"][schema]["properties"]


def test_document_has_every_field_of_a_session_and_no_other(server, kernel_id):
    elsewhere = {"machine", "gpus", "unreachable"}  # only kernels on other machines have these
    assert server.api(f"/sessions/{kernel_id}").keys() == fields_of("Session").keys() - elsewhere


def test_other_users_see_these_fields_of_a_session_and_no_other():
    """Names the fields once more, so that an edit of the document cannot show one by mistake."""
    assert set(openapi.fields_of_others()) == {
        *("id", "state", "granted_bytes", "device", "devices", "slices", "queue_position"),
        *("priority", "asks", "waits_for", "queued_at", "mine", "here"),
        *("owner", "label"),  # only on an admin's server
    }


def test_document_marks_fields_only_with_known_keys():
    found = {key for field in fields_of("Session").values() for key in field if key[:2] == "x-"}
    assert found == {"x-grows", "x-time"}
    assert {str(fields_of("Session")[name]["type"]) for name in openapi.marked("x-time")} == {
        "number",
        "['number', 'null']",
    }
    assert not any(key[:2] == "x-" for field in fields_of("OtherSession").values() for key in field)


#: The tests send these orders only for unknown sessions and GPUs. An order for a real session would
#: end the session, and an order for a real GPU would pause the GPU.
ORDERS = {path for path, _ in OPERATIONS if path.startswith("/admin/")}


@pytest.mark.parametrize(
    ("path", "method", "real"),
    [
        pytest.param(path, method, real, id=f"{method}-{path}-{'a-kernel' if real else 'any-text'}")
        for path, method in OPERATIONS
        for real in (True, False)
        if not (real and path in ORDERS)
    ],
)
def test_server_does_what_the_document_says(server, kernel_id, path, method, real):
    import schemathesis
    from schemathesis import GenerationMode

    document = openapi.document("/")
    if real:
        known = {**document["components"]["parameters"]["KernelId"], "schema": {"const": kernel_id}}
        components = {**document["components"], "parameters": {"KernelId": known}}
        document = {**document, "components": components}
    operation = schemathesis.openapi.from_dict(document)[path][method.upper()]
    seen = ask(server, operation.as_strategy(GenerationMode.POSITIVE))
    # A generated patch can name a priority class that does not exist. Then the answer is 400.
    right = {200, 400, 409} if method == "patch" else {200, 409}
    missing = {409} if "{device}" in path else {404}
    assert seen <= (right if real or "{" not in path else missing)
    if "requestBody" in document["paths"][path][method] and (real or path in ORDERS):
        seen = ask(server, operation.as_strategy(GenerationMode.NEGATIVE))
        assert 400 in seen
        assert seen <= {400, 403, 404}, "wrong bodies, tokens and paths"


def ask(server, cases):
    """Send many requests; return the set of status codes."""
    headers = {"Authorization": f"token {TOKEN}"}
    seen, wanted = set(), all_checks()

    @given(case=cases)
    @settings(
        max_examples=15,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case):
        answer = case.call_and_validate(
            base_url=f"{server.url}/gpupool/api", headers=headers, checks=wanted
        )
        seen.add(answer.status_code)

    send()
    return seen
