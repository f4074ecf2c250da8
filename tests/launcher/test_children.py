"""What is given goes to the process that it is for; what is not is left to it."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from launcher.children import (
    ChildSpec,
    child_specs,
    metrics_addresses,
    metrics_option,
    usable_cores,
)
from launcher.config import ServeConfig
from router.config import RouterConfig
from router.tool_calls import FORMATS

ADDRESSES = {
    "listen-address": "127.0.0.1:1",
    "router-metrics-address": "127.0.0.1:2",
    "scheduler-metrics-address": "127.0.0.1:3",
    "shard-metrics-address": "127.0.0.1:4",
}

MODEL, FOLDER = Path("/model.gguf"), Path("/cache/model")


def specs(config: ServeConfig, config_file: str | None = None) -> dict[str, ChildSpec]:
    made = child_specs(config, ADDRESSES, MODEL, FOLDER, "name", Path("/sockets"), config_file)
    return {spec.name: spec for spec in made}


def flags(spec: ChildSpec) -> dict[str, str]:
    return {flag: value for flag, value in itertools.pairwise(spec.argv) if flag.startswith("--")}


def test_processes_find_each_other() -> None:
    router, scheduler, shard = (flags(spec) for spec in specs(ServeConfig()).values())

    assert router["--scheduler-addresses"] == scheduler["--listen-address"] == "unix:/sockets/scheduler"
    assert scheduler["--shard-addresses"] == shard["--listen-address"] == "unix:/sockets/shard-0"
    assert router["--listen-address"] == "127.0.0.1:1"
    assert shard["--metrics-address"] == "127.0.0.1:4"


def test_only_the_shard_reads_the_file_that_the_folder_was_made_from() -> None:
    made = specs(ServeConfig())

    assert flags(made["router"])["--model"] == str(FOLDER)
    assert flags(made["shard"])["--model"] == str(MODEL)


def test_options_go_to_the_process_that_they_are_for() -> None:
    made = specs(ServeConfig(dtype="float32", block_size=8, shutdown_grace=7))

    assert flags(made["shard"])["--dtype"] == "float32"
    assert flags(made["scheduler"])["--block-size"] == "8"
    assert flags(made["router"])["--shutdown-grace"] == "7"
    assert "--block-size" not in made["shard"].argv


def test_switches_and_the_block_map_are_passed_on() -> None:
    made = child_specs(
        ServeConfig(enable_prefix_caching=False, swap_space=0.5),
        {**ADDRESSES, "block-map-address": "127.0.0.1:5"},
        MODEL,
        FOLDER,
        "name",
        Path("/sockets"),
        None,
    )
    router, scheduler, _ = made

    assert "--no-enable-prefix-caching" in scheduler.argv
    assert flags(scheduler)["--swap-space"] == "0.5"
    assert flags(router)["--block-map-address"] == "127.0.0.1:5"
    assert "--enable-prefix-caching" in specs(ServeConfig(enable_prefix_caching=True))["scheduler"].argv


def test_formats_of_tool_calls_are_those_of_the_router() -> None:
    choices = {
        field.metadata["bounds"].choices
        for config in (ServeConfig, RouterConfig)
        for field in dataclasses.fields(config)
        if field.name == "tool_call_parser"
    }

    assert choices == {("auto", *FORMATS)}
    assert flags(specs(ServeConfig(tool_call_parser="hermes"))["router"])["--tool-call-parser"] == "hermes"


def test_logs_and_traces_are_passed_on() -> None:
    config = ServeConfig(log_format="json", log_requests="summary", otlp_endpoint="http://collector:4317")
    made = specs(config)

    assert {flags(spec)["--log-format"] for spec in made.values()} == {"json"}
    assert flags(made["router"])["--log-requests"] == "summary"
    traced = {name for name, spec in made.items() if "--otlp-endpoint" in spec.argv}
    assert traced == {"router", "scheduler"}


def test_the_scheduler_is_told_what_a_gateway_asks_for() -> None:
    addresses = {**ADDRESSES, "gateway-address": "127.0.0.1:5"}
    _, scheduler, _ = child_specs(ServeConfig(), addresses, MODEL, FOLDER, "name", Path("/sockets"), None)

    given = flags(scheduler)
    assert (given["--gateway-address"], given["--served-model-name"]) == ("127.0.0.1:5", "name")
    assert given["--model"] == str(FOLDER)
    assert "--model" not in specs(ServeConfig())["scheduler"].argv


def test_certificates_and_keys_go_to_the_router_from_the_users_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    made = specs(
        ServeConfig(
            tls_cert_file=Path("a.pem"),
            tls_key_file=Path("a.key"),
            tls_client_ca_file=Path("/ca.pem"),
            api_keys_file=Path("keys.yaml"),
            insecure=True,
        )
    )

    router = flags(made["router"])
    assert router["--tls-cert-file"] == str(tmp_path / "a.pem")
    assert router["--tls-key-file"] == str(tmp_path / "a.key")
    assert router["--tls-client-ca-file"] == "/ca.pem"
    assert router["--api-keys-file"] == str(tmp_path / "keys.yaml")
    assert "--insecure" in made["router"].argv
    for other in ("scheduler", "shard"):
        assert not [word for word in made[other].argv if "tls" in word]
    # For the address of a gateway.
    assert "--insecure" in made["scheduler"].argv


def test_http_is_served_where_it_is_wanted_and_else_nowhere() -> None:
    addresses = {**ADDRESSES, "http-address": "127.0.0.1:6"}
    router, _, _ = child_specs(ServeConfig(), addresses, MODEL, FOLDER, "name", Path("/sockets"), None)

    assert flags(router)["--http-address"] == "127.0.0.1:6"
    assert flags(specs(ServeConfig())["router"])["--http-address"] == ""


def test_what_is_not_given_is_left_to_the_process() -> None:
    made = specs(ServeConfig())

    assert "--dtype" not in made["shard"].argv
    assert "--max-num-seqs" not in made["scheduler"].argv


def test_every_child_ends_with_the_launcher_and_reads_its_file() -> None:
    for spec in specs(ServeConfig(), config_file="/etc/pagoda.yaml").values():
        assert "--exit-with-parent" in spec.argv
        assert flags(spec)["--config"] == "/etc/pagoda.yaml"


def test_the_shard_gets_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert specs(ServeConfig())["shard"].environ["OMP_NUM_THREADS"] == str(usable_cores())

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert specs(ServeConfig())["shard"].environ["OMP_NUM_THREADS"] == "1"


def test_ranks_are_processes_that_share_the_model_and_the_cores() -> None:
    addresses = {key: value for key, value in ADDRESSES.items() if not key.startswith("shard")}
    addresses |= {metrics_option(f"shard-{rank}"): f"127.0.0.1:{4 + rank}" for rank in range(2)}
    config = ServeConfig(tensor_parallel_size=2)
    made = child_specs(config, addresses, MODEL, FOLDER, "name", Path("/sockets"), None)
    named = {spec.name: spec for spec in made}

    assert list(named) == ["router", "scheduler", "shard-0", "shard-1"]
    shards = ["unix:/sockets/shard-0", "unix:/sockets/shard-1"]
    assert flags(named["scheduler"])["--shard-addresses"] == ",".join(shards)
    for rank, address in enumerate(shards):
        given = flags(named[f"shard-{rank}"])
        assert (given["--rank"], given["--tensor-parallel-size"]) == (str(rank), "2")
        assert (given["--listen-address"], given["--metrics-address"]) == (address, f"127.0.0.1:{4 + rank}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("127.0.0.1:9103", ["127.0.0.1:9103", "127.0.0.1:9104"]),
        ("[::1]:9103", ["[::1]:9103", "[::1]:9104"]),
        ("127.0.0.1:0", ["127.0.0.1:0", "127.0.0.1:0"]),
    ],
)
def test_metrics_of_further_ranks_are_at_the_next_ports(given: str, expected: list[str]) -> None:
    wanted = metrics_addresses(ServeConfig(shard_metrics_address=given, tensor_parallel_size=2))
    assert [wanted[metrics_option(f"shard-{rank}")] for rank in range(2)] == expected


@pytest.mark.parametrize(("limit", "cores"), [("50000 100000", 1), ("100001 100000", 2)])
def test_a_limit_of_the_container_counts(limit: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(limit)

    assert usable_cores(tmp_path) == min(cores, usable_cores(tmp_path / "nowhere"))


def test_no_limit_leaves_all_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")

    assert usable_cores(tmp_path) == usable_cores(tmp_path / "nowhere")
