"""Rendered pods as processes of this machine, in the place of a kubelet.

Each pod has an address of its own within 127.0.0.0/8, so that all ports stay as they are. Names of other pods
become their addresses, and volumes folders.
"""

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.e2e.stack import until
from tests.helm.chart import Object
from tests.helm.tools import ROOT

# Of a leader. Shards meet on the one interface that all pods share here.
FIELDS = {"metadata.name": "pagoda-replica-0", "status.podIP": "127.0.0.1"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True)
class Tree:
    """Where a container's processes run, and with which Python; by default here."""

    folder: Path = ROOT
    python: Path = Path(sys.executable)


class Pod:
    """The processes of one pod.

    Attributes:
        ip: Its address.
    """

    def __init__(
        self,
        template: Object,
        ip: str,
        hosts: Mapping[str, str],
        folders: Mapping[str, Path],
        scratch: Path,
        environ: Mapping[str, str] | None = None,
        trees: Mapping[str, Tree] | None = None,
    ) -> None:
        """Starts all containers.

        `hosts` gives other pods' addresses by name, `folders` the content of volumes by the name of what they
        are of: `model`, or a Secret. What is empty at the start is made in `scratch`. `environ` is what an
        operator of the cluster puts into each container, `trees` where its processes run, by its name.
        """
        self.ip = ip
        self._spec = template["spec"]
        self._hosts = hosts
        self._volumes = {
            volume["name"]: _folder(volume, folders, scratch) for volume in self._spec["volumes"]
        }
        self._environ = dict(environ or {})
        self._trees = trees or {}
        self._processes = {one["name"]: self._start(one) for one in self._spec["containers"]}

    def _start(self, container: Object) -> "subprocess.Popen[bytes]":
        mounts = {mount["mountPath"]: self._volumes[mount["name"]] for mount in container["volumeMounts"]}
        given = {
            one["name"]: one["value"] if "value" in one else FIELDS[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container.get("env", [])
        }
        variables = {**self._environ, **given}
        words = [self._expanded(word, variables) for word in container["args"]]
        names = self._names_of_found(words)
        words = [*(self._here(word, mounts) for word in words), *names]
        assert container["command"][0] == "python"
        tree = self._trees.get(container["name"], Tree())
        return subprocess.Popen(
            [tree.python, *container["command"][1:], *words],
            cwd=tree.folder,
            # The user has no home, as in the image.
            env={
                "PATH": os.environ["PATH"],
                "HOME": "/",
                "TMPDIR": self._here("/tmp", mounts),  # noqa: S108
                **{name: self._here(value, mounts) for name, value in variables.items()},
            },
        )

    @staticmethod
    def _expanded(word: str, variables: Mapping[str, str]) -> str:
        """As a kubelet does; a variable that isn't set would stay as it is."""
        return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word)

    @staticmethod
    def _names_of_found(words: Sequence[str]) -> list[str]:
        """The certificate's name, which a router takes from `dns:HOST:PORT`, where here an address stands."""
        given = dict(word.partition("=")[::2] for word in words)
        if "--scheduler-tls-ca-file" not in given:
            return []
        return ["--scheduler-tls-server-name=" + given["--scheduler-addresses"].split(":")[1]]

    def _here(self, word: str, mounts: Mapping[str, Path]) -> str:
        """An argument or variable, with paths and addresses of this machine."""
        paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        word = re.sub(rf"(?<![^=])({paths})(?=/|$)", lambda match: str(mounts[match[1]]), word)
        for name, ip in self._hosts.items():
            word = word.replace(f"dns:{name}", ip).replace(name, ip)
        return re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1):", f"{self.ip}:", word)

    def wait_ready(self) -> None:
        """Until every probe of every container succeeded, each within the time that it has."""
        for container in self._spec["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for name in PROBES:
                probe = container[name]
                path, port = probe["httpGet"]["path"], ports[probe["httpGet"]["port"]]
                until(lambda path=path, port=port: self._answers(path, port), timeout_s=120)  # type: ignore[misc]

    def _answers(self, path: str, port: int) -> bool:
        assert all(process.poll() is None for process in self._processes.values()), "a container ended"
        connection = http.client.HTTPConnection(self.ip, port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def children(self, container: str) -> list[psutil.Process]:
        """What the process of a container has started."""
        return psutil.Process(self._processes[container].pid).children()

    def terminate(self) -> None:
        """Asks all containers at once to end, as a kubelet does."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)

    def wait(self) -> dict[str, int]:
        """Exit statuses by container, within the time that the pod has."""
        deadline = time.monotonic() + self._spec["terminationGracePeriodSeconds"]
        return {name: process.wait(deadline - time.monotonic()) for name, process in self._processes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def _folder(volume: Object, folders: Mapping[str, Path], scratch: Path) -> Path:
    """Where a volume is on this machine."""
    if "secret" in volume:
        return folders[volume["secret"]["secretName"]]
    if "emptyDir" not in volume:
        return folders["model"]
    folder = scratch / str(volume["name"])
    folder.mkdir(parents=True)
    return folder
