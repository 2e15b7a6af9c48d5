# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Checks of ``examples/kubernetes`` that need no cluster.

The tests compare the manifests with their schemas, with ``rendered.yaml``, and with the code. The
command ``python -m tests.kubernetes`` writes ``rendered.yaml`` with kubectl.

Two files have the schemas, without descriptions. ``kubernetes-1.34.json`` has strict schemas of the
kinds that the example uses. They come from kubernetes-validate 1.37 (Apache 2.0).
``z2jh-values.json`` has the keys ``hub`` and ``singleuser`` of the schema of Zero to JupyterHub at
48ea50e3 (BSD 3-clause). Its lists of required values are removed, because the chart sets these
values.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from jupyter_gpupool.cli.commands import subcommands
from jupyter_gpupool.cluster.node import HEALTH, raylet_command
from jupyter_gpupool.config import load_settings
from jupyter_gpupool.containers.content import Content
from jupyter_gpupool.endpoint import MACHINE_SOCKET

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "kubernetes"
RENDERED = HERE / "rendered.yaml"
SCHEMA = json.loads((HERE / "kubernetes-1.34.json").read_text())


def rendered():
    """Return the manifests that kustomize makes from the example."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(EXAMPLE)], capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    return done.stdout


def objects():
    return list(yaml.safe_load_all(RENDERED.read_text()))


def check(thing):
    """Fail if an object does not match the schema of its kind, or has an unknown field."""
    schema = {
        "$ref": f"#/definitions/{SCHEMA['kinds'][thing['kind']]}",
        "definitions": SCHEMA["definitions"],
    }
    jsonschema.Draft202012Validator(schema).validate(thing)


def pod(name):
    (found,) = (o for o in objects() if o["metadata"]["name"] == name and o["kind"].endswith("Set"))
    return found["spec"]["template"]["spec"]


def container(name, of):
    return next(c for c in pod(of)["containers"] if c["name"] == name)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_the_rendered_manifests_match_the_example():
    assert rendered() == RENDERED.read_text(), "python -m tests.kubernetes"


def test_each_object_is_valid_in_the_kubernetes_api():
    kinds = [thing["kind"] for thing in objects()]
    assert sorted(kinds) == [
        "ConfigMap", "DaemonSet", "Namespace", "NetworkPolicy", "Service", "StatefulSet",
    ]  # fmt: skip
    for thing in objects():
        check(thing)


def test_a_wrong_field_is_found():
    (daemons,) = (thing for thing in objects() if thing["kind"] == "DaemonSet")
    daemons["spec"]["template"]["spec"]["hostPIDs"] = True
    with pytest.raises(jsonschema.ValidationError, match="hostPIDs"):
        check(daemons)


def test_the_values_are_valid_for_zero_to_jupyterhub():
    schema = json.loads((HERE / "z2jh-values.json").read_text())
    values = yaml.safe_load((EXAMPLE / "hub-values.yaml").read_text())
    check = jsonschema.Draft202012Validator(schema)
    check.validate(values)
    ast.parse(values["hub"]["extraConfig"]["gpupool"])
    values["singleuser"]["extraPodconfig"] = {}
    assert not check.is_valid(values)


def test_only_the_broker_is_privileged_and_it_has_no_token():
    for name in ("gpupool-node", "gpupool-head"):
        for one in pod(name)["containers"]:
            safe = one["securityContext"]
            mounts = {mount["name"] for mount in one["volumeMounts"]}
            if one["name"] == "broker":
                assert safe["privileged"]
                assert "token" not in mounts
            else:
                assert safe["runAsNonRoot"]
                assert not safe["allowPrivilegeEscalation"]
                assert "token" in mounts
    assert pod("gpupool-node")["hostPID"]


def test_the_head_starts_ray_like_the_node_command():
    head = container("head", "gpupool-head")
    assert head["command"][1:] == raylet_command("", 6379, "head")[1:]
    env = {row["name"]: row["value"] for row in head["env"]}
    assert env.items() >= HEALTH.items()
    assert env["RAY_AUTH_MODE"] == "token"


def test_the_commands_exist_and_read_the_configuration(tmp_path, monkeypatch):
    agent = container("agent", "gpupool-node")["command"]
    assert subcommands()["node"].parse_args(agent[2:]).join == "gpupool-head.gpupool.svc:6379"
    (config,) = (thing for thing in objects() if thing["kind"] == "ConfigMap")
    path = tmp_path / "gpupool_config.py"
    path.write_text(config["data"]["gpupool_config.py"])
    monkeypatch.setenv("NODE_NAME", "gpu-b")
    settings = load_settings([path])
    assert settings.cluster_node == "gpu-b"
    assert settings.cluster_node in settings.cluster_nodes
    assert settings.user_sockets
    user = container("agent", "gpupool-node")["securityContext"]["runAsUser"]
    assert settings.cluster_agent == f"uid-{user}"  # this user id has no account


def test_servers_find_the_socket_of_the_broker():
    values = yaml.safe_load((EXAMPLE / "hub-values.yaml").read_text())["singleuser"]
    run = next(v for v in pod("gpupool-node")["volumes"] if v["name"] == "run")
    (volume,), (mount,) = values["storage"].values()
    folder = run["hostPath"]["path"]
    assert volume["hostPath"]["path"] == f"{folder}/users/{{unescaped_username}}"
    assert (mount["mountPath"], mount["readOnly"]) == (str(MACHINE_SOCKET.parent), True)
    path = Content(MACHINE_SOCKET).folder / "share" / "jupyter"
    assert values["extraEnv"]["JUPYTER_PATH"] == str(path)
    assert "hostPID" not in values["extraPodConfig"]
    assert values["nodeSelector"] == pod("gpupool-node")["nodeSelector"]
