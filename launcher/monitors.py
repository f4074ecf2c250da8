"""Prometheus, and Grafana beside it, for who has no cluster: how they are configured and started."""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.disk import shortage
from common.rpc import AddressError, is_local
from launcher.children import CLOSING_S, ChildSpec
from launcher.preflight import ROOT, PreflightError

# The options that say where they are served.
MONITORS = ("prometheus-address", "grafana-address")
SCRAPE_INTERVAL = "2s"
# Where its packages put what it serves.
GRAFANA_HOME = Path("/usr/share/grafana")
# Prometheus sets 128 MiB aside for its youngest data, and writes a log of them beside.
ROOM_BYTES = 1 << 28
# Whatever ends the launcher ends them: they know nothing of its pipe.
_TETHER = ("setpriv", "--pdeathsig", "TERM")


def check_monitors(addresses: Mapping[str, str | None]) -> None:
    """Checks that what is wanted, by option, is installed and for this machine alone.

    Raises:
        PreflightError: it isn't; the message says what to do.
    """
    if addresses["grafana-address"] and not addresses["prometheus-address"]:
        raise PreflightError("--grafana-address needs --prometheus-address, which it asks")
    for option, address in addresses.items():
        if not address:
            continue
        try:
            local = is_local(address)
        except AddressError as error:
            raise PreflightError(f"--{option}: {error}") from error
        if not local:
            raise PreflightError(f"--{option} {address}: it asks for no password, so only for this machine")
        name = option.partition("-")[0]
        for program, package in ((name, name), (_TETHER[0], "util-linux")):
            if shutil.which(program) is None:
                advice = "see grafana.com" if program == "grafana" else f"`apt-get install {package}`"
                raise PreflightError(f"--{option} needs the program {program}, which isn't in PATH: {advice}")


def monitor_specs(
    addresses: Mapping[str, str], watched: Sequence[ChildSpec], folder: Path
) -> list[ChildSpec]:
    """Those that `addresses` has an address for, by option. Their files are in `folder`, and go with it.

    Raises:
        PreflightError: the disk that has `folder` is too full.
    """
    specs = []
    if prometheus := addresses.get("prometheus-address"):
        if reason := shortage(folder, "for Prometheus' data", ROOM_BYTES):
            raise PreflightError(f"{reason}; TMPDIR names another folder")
        file = folder / "prometheus.yaml"
        file.write_text(json.dumps(prometheus_config(watched), indent=1))
        flags = (f"--config.file={file}", f"--storage.tsdb.path={folder}/prometheus")
        command = ("prometheus", *flags, f"--web.listen-address={prometheus}", "--log.level=warn")
        specs.append(_monitor("prometheus", prometheus, command, {}))
    if prometheus and (grafana := addresses.get("grafana-address")):
        host, _, port = grafana.rpartition(":")
        _provision(folder / "provisioning", prometheus)
        settings = {
            "GF_SERVER_HTTP_ADDR": host.strip("[]"),
            "GF_SERVER_HTTP_PORT": port,
            "GF_PATHS_DATA": f"{folder}/grafana",
            "GF_PATHS_LOGS": f"{folder}/grafana",
            "GF_PATHS_PROVISIONING": f"{folder}/provisioning",
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
            "GF_LOG_LEVEL": "warn",
        }
        server = ("grafana", "server", "--homepath", str(GRAFANA_HOME))
        specs.append(_monitor("grafana", grafana, server, settings))
    return specs


def _monitor(name: str, address: str, command: Sequence[str], settings: Mapping[str, str]) -> ChildSpec:
    """What is served doesn't end with it."""
    environ = {**os.environ, **settings}
    return ChildSpec(name, address, (*_TETHER, *command), environ, CLOSING_S, essential=False)


def prometheus_config(watched: Sequence[ChildSpec]) -> dict[str, object]:
    """What Prometheus reads, which takes JSON for YAML. Jobs are called as the rules want it."""
    targets: defaultdict[str, list[str]] = defaultdict(list)
    for spec in watched:
        targets[f"pagoda-{spec.name.partition('-')[0]}"].append(spec.metrics_address)
    return {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL},
        "rule_files": [str(ROOT / "k8s/rules/*.yaml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": addresses}]}
            for job, addresses in targets.items()
        ],
    }


def _provision(folder: Path, prometheus: str) -> None:
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "url": f"http://{prometheus}",
        "isDefault": True,
        # Or rates are over a minute, as suits Grafana's default of 15 s.
        "jsonData": {"timeInterval": SCRAPE_INTERVAL},
    }
    dashboards = {"name": "Pagoda", "type": "file", "options": {"path": str(ROOT / "k8s/dashboards")}}
    for kind, document in (
        ("datasources", {"apiVersion": 1, "datasources": [source]}),
        ("dashboards", {"apiVersion": 1, "providers": [dashboards]}),
    ):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "pagoda.yaml").write_text(json.dumps(document, indent=1))
