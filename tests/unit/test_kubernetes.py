"""deploy/kubernetes: what Kubernetes would take (its own schemas, strictly), and that what names another thing names one
that is there: labels, ports, volumes, cards, folders of the image, flags and variables of RoQ's programs.

Not covered: a cluster that runs on it; the image's side is in tests/failure/test_image.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from hcm.host import STOP_SECONDS
from roq.cli.main import app
from roq.config import ENVIRONMENT_PREFIX, GcmConfig, HcmConfig, load
from roq.runtime.security import load_card
from roq.wire.card import CardRole, Right
from tests.harness.documented import block

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.31", "1.34", "1.37")  # of Kubernetes: the oldest that is meant, and what the validator knows last
OPERATORS = {"monitoring.coreos.com/v1"}  # kinds that Kubernetes itself has no schema of
SLACK_SECONDS = 10.0  # of an HCM that ends, beside what its processes have
Manifest = dict[str, Any]


@cache
def manifests() -> dict[str, Manifest]:
    """Those that kustomize would send, by kind and name."""
    found: dict[str, Manifest] = {}
    for kustomization in sorted(DEPLOY.glob("*/kustomization.yaml")):
        described = yaml.safe_load(kustomization.read_text())
        listed = {kustomization.parent / name for name in described["resources"]}
        assert listed == set(kustomization.parent.glob("*.yaml")) - {kustomization}, (
            "every file is listed, every listed one is there"
        )
        for path in sorted(listed):
            for each in yaml.safe_load_all(path.read_text()):
                name = f"{each['kind']}/{each['metadata']['name']}"
                assert name not in found
                found[name] = each
    return found


def workloads() -> dict[str, Manifest]:
    return {name: each for name, each in manifests().items() if each["kind"] in ("Deployment", "StatefulSet")}


def pod(workload: Manifest) -> Manifest:
    specification: Manifest = workload["spec"]["template"]["spec"]
    return specification


def containers(workload: Manifest) -> list[Manifest]:
    return [*pod(workload).get("initContainers", ()), *pod(workload)["containers"]]


def daemons() -> Iterator[tuple[str, Manifest]]:
    """RoQ's own containers that stay."""
    for name, workload in workloads().items():
        yield from ((name, one) for one in pod(workload)["containers"] if one["image"] == "roq")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [name for name, each in manifests().items() if each["apiVersion"] not in OPERATORS])
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    kubernetes_validate.validate(manifests()[name], version, strict=True)


def test_the_validator_finds_a_field_that_is_none() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(manifests()["StatefulSet/roq-host"]))
    pod(wrong)["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_selectors_find_the_pods_they_mean() -> None:
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in workloads().values()]
    for name, each in manifests().items():
        selectors = []
        if each["kind"] == "Service":
            selectors = [each["spec"]["selector"]]
        elif each["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor"):
            selectors = [each["spec"]["selector"]["matchLabels"]]
        for spread in pod(each).get("topologySpreadConstraints", ()) if name in workloads() else ():
            selectors.append(spread["labelSelector"]["matchLabels"])
        for wanted in selectors:
            assert sum(wanted.items() <= labels.items() for labels in pods) == 1, name
        if name in workloads():
            assert selectors[0].items() <= each["spec"]["template"]["metadata"]["labels"].items()
    services = [each["metadata"]["labels"] for each in manifests().values() if each["kind"] == "Service"]
    wanted = manifests()["ServiceMonitor/roq-metrics"]["spec"]["selector"]["matchLabels"]
    assert sum(wanted.items() <= labels.items() for labels in services) == 1


def test_ports_volumes_and_maps_that_are_named_are_there() -> None:
    names = manifests().keys()
    for name, workload in workloads().items():
        ports = {port["name"] for one in containers(workload) for port in one.get("ports", ())}
        for one in containers(workload):
            probes = [one[key] for key in ("startupProbe", "readinessProbe", "livenessProbe") if key in one]
            asked = {probe[how]["port"] for probe in probes for how in ("httpGet", "tcpSocket") if how in probe}
            assert asked <= ports, name
            volumes = {volume["name"] for volume in pod(workload)["volumes"]} if "volumes" in pod(workload) else set()
            volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes, name
            for source in one.get("envFrom", ()):
                assert f"ConfigMap/{source['configMapRef']['name']}" in names
        if workload["kind"] == "StatefulSet":
            assert f"Service/{workload['spec']['serviceName']}" in names
    every = {port["name"] for each in workloads().values() for one in containers(each) for port in one.get("ports", ())}
    for each in manifests().values():
        if each["kind"] == "Service":
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= every
        for key in ("endpoints", "podMetricsEndpoints"):
            assert {port["port"] for port in each.get("spec", {}).get(key, ())} <= every


def test_pods_keep_to_what_a_restricted_namespace_takes() -> None:
    """And to a root file system that can't be written, where the image is ours."""
    for name, workload in workloads().items():
        of_pod = pod(workload)["securityContext"]
        assert of_pod["runAsNonRoot"] is True
        assert of_pod["runAsUser"] > 0
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod(workload)["automountServiceAccountToken"] is False
        for one in containers(workload):
            confined = one["securityContext"]
            assert (confined["allowPrivilegeEscalation"], confined["capabilities"]) == (False, {"drop": ["ALL"]}), name
            assert confined.get("readOnlyRootFilesystem", False) is (one["image"] == "roq"), name
            assert one["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert "memory" in one["resources"]["limits"], name


def test_the_user_and_the_folders_are_those_of_the_image() -> None:
    dockerfile, base = (ROOT / "docker" / "Dockerfile").read_text(), (ROOT / "docker" / "base.sh").read_text()
    for name, workload in workloads().items():
        if pod(workload)["containers"][0]["image"] == "roq":
            context = pod(workload)["securityContext"]
            user = f"{context['runAsUser']}:{context['runAsGroup']}"
            assert f"USER {user}\n" in dockerfile, name
            assert f"--uid {context['fsGroup']} " in base, name
    data = next(one["mountPath"] for one in pod(workloads()["StatefulSet/roq-host"])["containers"][0]["volumeMounts"])
    assert f"ROQ_STATE_DIR={data}" in dockerfile


def environment(container: Manifest) -> dict[str, str]:
    """As the container has it; what only a pod has is made up."""
    made: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        made |= manifests()[f"ConfigMap/{source['configMapRef']['name']}"]["data"]
    for one in container.get("env", ()):
        reference = one.get("valueFrom", {})
        if "configMapKeyRef" in reference:
            key = reference["configMapKeyRef"]
            made[one["name"]] = manifests()[f"ConfigMap/{key['name']}"]["data"][key["key"]]
        elif reference:
            made[one["name"]] = {"metadata.name": "roq-host-0", "status.podIP": "10.1.2.3"}[reference["fieldRef"]["fieldPath"]]
        else:
            made[one["name"]] = one["value"]
    return made


@pytest.mark.parametrize(("name", "program", "model"), [("gcm", "roq-gcm", GcmConfig), ("host", "roq-hcm", HcmConfig)])
def test_a_daemon_takes_its_variables(name: str, program: str, model: type[GcmConfig] | type[HcmConfig]) -> None:
    container = next(one for _, one in daemons() if one["name"] == name)
    assert container["args"] == [program]
    given = environment(container)
    assert {key.removeprefix(ENVIRONMENT_PREFIX).lower() for key in given} <= model.model_fields.keys()
    config = load(model, None, given, {})
    assert config.security == "cards"
    assert str(config.card) == "/cards/card"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.port == ports["requests" if name == "gcm" else "hcm"]
    if isinstance(config, HcmConfig):
        assert (config.host, config.metrics) == ("roq-host-0", f":{ports['metrics']}")
        grace = manifests()["StatefulSet/roq-host"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert 0 < config.drain_seconds <= grace - STOP_SECONDS - SLACK_SECONDS, "it is killed while others take over"
    else:
        assert config.broadcast_port == ports["broadcast"]


def test_zookeeper_has_the_names_that_the_daemons_know() -> None:
    ensemble = workloads()["StatefulSet/zookeeper"]
    service, replicas = ensemble["spec"]["serviceName"], ensemble["spec"]["replicas"]
    expected = [f"zookeeper-{number}.{service}" for number in range(replicas)]
    addresses = manifests()["ConfigMap/roq"]["data"]["ROQ_ZOOKEEPER"].split(",")
    assert addresses == [f"{name}:2181" for name in expected]
    servers = environment(pod(ensemble)["containers"][0])["ZOO_SERVERS"].split()
    assert servers == [f"server.{number}={name}:2888:3888;2181" for number, name in enumerate(expected, 1)]


def test_the_metrics_pod_runs_a_command_of_ours() -> None:
    container = next(one for _, one in daemons() if one["name"] == "metrics")
    program, command, *rest = container["args"]
    flags = {part for part in rest if part.startswith("--")}
    told = CliRunner().invoke(app, [command, "--help"]).output
    assert program == "roq"
    assert flags <= set(re.findall(r"--[a-z-]+", told))
    assert environment(container)["ROQ_CLUSTER"] == manifests()["ConfigMap/roq"]["data"]["ROQ_ZOOKEEPER"]
    url = yaml.safe_load((ROOT / "examples" / "monitoring" / "keda.yml").read_text())["spec"]["triggers"][0]["metadata"]["url"]
    assert url.startswith("http://roq-metrics:9464/")
    assert manifests()["Service/roq-metrics"]["spec"]["ports"][0]["port"] == 9464


def test_the_cards_that_the_document_makes_are_those_that_the_pods_take(tmp_path: Path) -> None:
    script = block("docs/deployment.md", "Kubernetes")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    known = {**os.environ, "PATH": path, "XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, env=known, check=False)
    assert done.returncode == 0, done.stderr
    made = {path.name: load_card(path).card for path in (tmp_path / "cards").iterdir()}
    hosts = workloads()["StatefulSet/roq-host"]["spec"]["replicas"]
    wanted = {f"roq-host-{number}.card": CardRole.HOST for number in range(hosts)}
    wanted |= {"gcm.card": CardRole.GCM, "metrics.card": CardRole.CLIENT}
    assert {name: card.role for name, card in made.items()} == wanted
    assert {made[f"roq-host-{number}.card"].name for number in range(hosts)} == {
        f"roq-host-{number}" for number in range(hosts)
    }
    assert made["metrics.card"].allows(Right.DESCRIBE, "*")
    for workload in workloads().values():
        for one in pod(workload).get("initContainers", ()):
            asked = Path(one["command"][-2]).name.replace("$(ROQ_HOST)", "roq-host-0")
            assert asked in made, "the Secret has it"


def test_the_folders_that_the_document_applies_are_there() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text()
    applied = re.findall(r"kubectl apply -[kf] (\S+?)`", text)
    assert {path.rpartition("/")[2] for path in applied} == {"namespace.yaml", "zookeeper", "base", "monitoring"}
    assert all((ROOT / path).exists() for path in applied)
