"""What is started beside the three processes, and when it isn't."""

import json
from pathlib import Path

import pytest

from launcher.children import ChildSpec
from launcher.monitors import SCRAPE_INTERVAL, check_monitors, monitor_specs
from launcher.preflight import ROOT, PreflightError
from tests.disks import mounted_disk

WATCHED = [
    ChildSpec(name, f"127.0.0.1:{port}", (), {}, 1.0)
    for port, name in enumerate(("router", "scheduler", "shard-0", "shard-1"), 1)
]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which nothing is."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def install(programs: Path, *names: str) -> None:
    for name in names:
        (programs / name).touch(mode=0o755)


def wanted(prometheus: str | None = None, grafana: str | None = None) -> dict[str, str | None]:
    return {"prometheus-address": prometheus, "grafana-address": grafana}


def test_nothing_is_needed_where_nothing_is_wanted(programs: Path, tmp_path: Path) -> None:
    check_monitors(wanted())

    assert monitor_specs({}, WATCHED, tmp_path) == []


def test_what_is_missing_is_named_with_its_package(programs: Path) -> None:
    with pytest.raises(PreflightError, match=r"program prometheus, .*`apt-get install prometheus`"):
        check_monitors(wanted("127.0.0.1:1"))
    install(programs, "prometheus")
    with pytest.raises(PreflightError, match=r"program setpriv, .*`apt-get install util-linux`"):
        check_monitors(wanted("127.0.0.1:1"))
    install(programs, "setpriv")
    check_monitors(wanted("127.0.0.1:1"))
    with pytest.raises(PreflightError, match=r"program grafana, .*grafana\.com"):
        check_monitors(wanted("127.0.0.1:1", "127.0.0.1:2"))


def test_what_asks_for_no_password_is_for_this_machine() -> None:
    with pytest.raises(PreflightError, match=r"--prometheus-address 0\.0\.0\.0:9090: .*this machine"):
        check_monitors(wanted("0.0.0.0:9090"))


def test_what_is_no_address_is_named_with_its_option() -> None:
    with pytest.raises(PreflightError, match=r"--prometheus-address: 'nowhere' is not HOST:PORT"):
        check_monitors(wanted("nowhere"))


def test_a_grafana_without_a_prometheus_has_nothing_to_show() -> None:
    with pytest.raises(PreflightError, match=r"--grafana-address needs --prometheus-address"):
        check_monitors(wanted(None, "127.0.0.1:3000"))


def test_prometheus_watches_every_process_by_its_job(tmp_path: Path) -> None:
    (spec,) = monitor_specs({"prometheus-address": "127.0.0.1:9"}, WATCHED, tmp_path)

    config = json.loads((tmp_path / "prometheus.yaml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert targets == {
        "pagoda-router": ["127.0.0.1:1"],
        "pagoda-scheduler": ["127.0.0.1:2"],
        "pagoda-shard": ["127.0.0.1:3", "127.0.0.1:4"],
    }
    assert config["rule_files"] == [f"{ROOT}/k8s/rules/*.yaml"]
    assert "--web.listen-address=127.0.0.1:9" in spec.argv


def test_a_disk_too_full_for_prometheus_is_named() -> None:
    with (
        mounted_disk(1 << 20) as disk,
        pytest.raises(
            PreflightError, match=rf"^{disk.folder}: too little room for Prometheus' data: \d+ bytes .*TMPDIR"
        ),
    ):
        monitor_specs({"prometheus-address": "127.0.0.1:9"}, WATCHED, disk.folder)


def test_grafana_is_told_where_dashboards_and_figures_are(tmp_path: Path) -> None:
    addresses = {"prometheus-address": "127.0.0.1:9", "grafana-address": "127.0.0.1:10"}

    _, spec = monitor_specs(addresses, WATCHED, tmp_path)

    folder = Path(spec.environ["GF_PATHS_PROVISIONING"])
    (source,) = json.loads((folder / "datasources/pagoda.yaml").read_text())["datasources"]
    (provider,) = json.loads((folder / "dashboards/pagoda.yaml").read_text())["providers"]
    assert source["url"] == "http://127.0.0.1:9"
    assert source["jsonData"] == {"timeInterval": SCRAPE_INTERVAL}
    assert provider["options"]["path"] == f"{ROOT}/k8s/dashboards"
    assert (spec.environ["GF_SERVER_HTTP_ADDR"], spec.environ["GF_SERVER_HTTP_PORT"]) == ("127.0.0.1", "10")
