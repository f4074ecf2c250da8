"""The chart, as Helm renders it."""

import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from tests.helm.tools import HELM, ROOT, fetch

CHART = ROOT / "helm" / "pagoda"
# Of each way to install it: values files, in the order in which they are read.
INSTALLATIONS = {
    "default": (),
    "cpu": ("values-cpu.yaml",),
    "gpu": ("values-gpu.yaml",),
    "multinode": ("values-gpu.yaml", "values-multinode.yaml"),
}

Object = dict[str, Any]


class RenderError(Exception):
    """Helm refused; the message is its own."""


def helm(*arguments: str) -> str:
    """Runs Helm; returns what it printed.

    Raises:
        RenderError: it failed.
    """
    fetch()
    result = subprocess.run([HELM, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise RenderError(result.stderr)
    return result.stdout


def render(*files: str, namespace: str = "models", **settings: Any) -> str:
    """All manifests, of a release `pagoda`. Settings are values by path, with `__` for dots."""
    words = [word for file in files for word in ("--values", str(CHART / file))]
    words += [
        word
        for name, value in settings.items()
        for word in ("--set-json", f"{name.replace('__', '.')}={value}")
    ]
    return helm("template", "pagoda", str(CHART), "--namespace", namespace, *words)


@cache
def objects(*files: str, **settings: Any) -> list[Object]:
    """The same, parsed, for reading alone."""
    return [one for one in yaml.load_all(render(*files, **settings), yaml.CSafeLoader) if one]


def of_kind(rendered: list[Object], kind: str) -> list[Object]:
    return [one for one in rendered if one["kind"] == kind]


def pod_templates(rendered: list[Object]) -> Iterator[Object]:
    """The template of each kind of pod."""
    for one in rendered:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            yield one["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
            yield one["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def containers(rendered: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Each container, with its pod's spec; those that run once at the start are left out."""
    for template in pod_templates(rendered):
        for container in template["spec"]["containers"]:
            yield template["spec"], container


def container(rendered: list[Object], name: str) -> Object:
    """The first container of this name."""
    return next(one for _, one in containers(rendered) if one["name"] == name)


def flags(container: Object) -> dict[str, str]:
    """A container's arguments by name, dashes included; empty where they have no value."""
    return dict(word.partition("=")[::2] for word in container["args"] if word != "--")
