"""API keys: the file, who is let in, and what a tenant may use."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from common import metrics
from common.config import ConfigError
from common.rpc import AddressError
from pagoda.v1 import inference_pb2 as pb
from router import auth
from router.auth import Authenticator, Tenant, digest, new_key
from router.errors import RequestError
from tests.authority import Authority, replace
from tests.router.conftest import Client, StartRouter
from tests.router.fake_scheduler import LENGTH

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
KEY, OTHER = new_key(), new_key()
Metadata = tuple[tuple[str, str], ...]


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


def entry(key: str, name: str, **limits: object) -> dict[str, object]:
    return {"id": name, "key_sha256": digest(key), **limits}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two keys without limits."""
    path = tmp_path / "keys.yaml"
    write(path, entry(KEY, "acme"), entry(OTHER, "other"))
    return path


def write(path: Path, *entries: object) -> None:
    replace(path, yaml.safe_dump(list(entries)).encode())
    path.chmod(0o600)


def code_of(authenticator: Authenticator, authorization: str | None) -> grpc.StatusCode | None:
    try:
        authenticator.authenticate(authorization)
    except RequestError as error:
        return error.code
    return None


async def until(condition: Callable[[], object]) -> None:
    """What the router does by itself shows within a second or two."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# The file.


def test_a_key_is_known_by_its_hash(file: Path) -> None:
    authenticator = Authenticator(file)

    assert authenticator.authenticate(f"Bearer {KEY}").id == "acme"
    assert authenticator.authenticate(f"bearer  {OTHER} ").id == "other"


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {digest(KEY)}",
        "Bearer \udcff",
    ],
)
def test_every_other_one_is_refused_alike(file: Path, authorization: str | None) -> None:
    with pytest.raises(RequestError) as refused:
        Authenticator(file).authenticate(authorization)

    error = refused.value
    assert (error.code, error.reason) == (UNAUTHENTICATED, "INVALID_API_KEY")
    assert error.message == "no valid API key; send 'authorization: Bearer KEY'"


def test_without_a_file_everybody_is_one_tenant() -> None:
    assert Authenticator(None).authenticate(None) == Tenant("", 0, None)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "must be a list of 1 to 4096 entries"),
        ({"id": "a"}, "must be a list"),
        (["a"], "entry 1: must be a mapping of id, key_sha256"),
        ([entry(KEY, "a"), entry(OTHER, "a")], "entry 2: its id stands there twice"),
        ([entry(KEY, "a"), entry(KEY, "b")], "entry 2: its key_sha256 stands there twice"),
        ([entry(KEY, "")], "entry 1: id must be 1 to 64"),
        ([entry(KEY, "a b")], "entry 1: id must be 1 to 64"),
        ([entry(KEY, "a" * 65)], "entry 1: id must be 1 to 64"),
        ([{"id": 5, "key_sha256": digest(KEY)}], "entry 1: id must be 1 to 64"),
        ([{"id": "a"}], "entry 1: key_sha256 must be 64 hexadecimal digits"),
        ([{"id": "a", "key_sha256": KEY}], "entry 1: key_sha256 must be 64 hexadecimal digits"),
        ([entry(KEY, "a", tokens=1)], "entry 1: unknown name 'tokens'; there are id, key_sha256, max_"),
        ([entry(KEY, "a", tokens_per_minute=0)], "tokens_per_minute must be a whole number from 1 to"),
        ([entry(KEY, "a", tokens_per_minute=1.5)], "tokens_per_minute must be a whole number from 1 to"),
        ([entry(KEY, "a", max_concurrent_requests=True)], "max_concurrent_requests must be a whole number"),
        ([entry(KEY, "a", max_concurrent_requests=2**31)], "must be a whole number from 1 to 2147483647"),
    ],
)
def test_an_entry_at_fault_is_named(tmp_path: Path, entries: object, message: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump(entries))

    with pytest.raises(ConfigError, match=message) as refused:
        Authenticator(file)
    assert str(refused.value).startswith(f"--api-keys-file {file}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"- id: a\n  key: [{KEY}".encode(), ", line 2: not YAML"),
        (b"\xff\xfe\xff", ": not YAML"),
        (b"[" * 2000, ": not YAML"),
        (b"- id: a\n  id: b\n", ": 'id' stands there twice"),
        (b" " * (1 << 20) + b"-", ": more than 1048576 bytes"),
        (b"", ": is empty"),
    ],
    ids=["broken", "no text", "too deep", "twice", "too large", "empty"],
)
def test_a_file_that_is_no_list_of_keys_is_one_line_without_its_content(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(content)

    with pytest.raises(ConfigError) as refused:
        Authenticator(file)
    assert str(refused.value).startswith(f"--api-keys-file {file}{message}")
    assert KEY not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_too_many_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_KEYS", 2)
    file = tmp_path / "keys.yaml"
    write(file, *(entry(new_key(), f"k{index}") for index in range(3)))

    with pytest.raises(ConfigError, match="a list of 1 to 2 entries"):
        Authenticator(file)


def test_a_file_that_everybody_can_read_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    Authenticator(file)
    assert not caplog.records

    os.chmod(file, 0o644)
    Authenticator(file)
    assert "can be read by everybody" in caplog.text


# While it serves.


async def test_changes_are_read_and_a_broken_file_keeps_the_keys(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authenticator = Authenticator(file)
    watching = asyncio.create_task(authenticator.watch())
    stale = metrics.STALE.labels("api-keys")._value

    write(file, entry(OTHER, "other"))
    await until(lambda: code_of(authenticator, f"Bearer {KEY}"))
    assert (code_of(authenticator, f"Bearer {OTHER}"), stale.get()) == (None, 0)

    replace(file, b"- id")
    await until(stale.get)
    assert code_of(authenticator, f"Bearer {OTHER}") is None
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1

    write(file, entry(KEY, "acme"))
    await until(lambda: not stale.get())
    assert (code_of(authenticator, f"Bearer {KEY}")) is None
    watching.cancel()


async def test_a_change_of_the_file_fills_no_budget(file: Path) -> None:
    write(file, entry(KEY, "acme", tokens_per_minute=10), entry(OTHER, "other", tokens_per_minute=10))
    authenticator = Authenticator(file)
    watching = asyncio.create_task(authenticator.watch())
    for key in (KEY, OTHER):
        authenticator.authenticate(f"Bearer {key}").use_tokens(1000)

    third = new_key()
    write(file, entry(third, "acme", tokens_per_minute=10), entry(OTHER, "other", tokens_per_minute=20))
    await until(lambda: not code_of(authenticator, f"Bearer {third}"))

    # Also with another key; but not with another limit.
    with pytest.raises(RequestError, match="has used its 10 tokens per minute"):
        authenticator.authenticate(f"Bearer {third}").check_budget()
    authenticator.authenticate(f"Bearer {OTHER}").check_budget()
    watching.cancel()


# The command.


def keys(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.keys", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_a_new_key_is_printed_once_and_its_entry_can_be_appended(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    made = [keys("new", f"--id={name}") for name in ("acme", "2")]
    file.write_text("".join(one.stdout for one in made))

    authenticator = Authenticator(file)

    for one, name in zip(made, ("acme", "2"), strict=True):
        key = one.stderr.split()[-1]
        assert len(key) == len("pgd-") + 43
        assert key not in one.stdout
        assert authenticator.authenticate(f"Bearer {key}").id == name


def test_an_id_that_no_file_could_hold_is_refused() -> None:
    done = keys("new", "--id=a b")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m router.keys: --id: id must be 1 to 64")


# Over gRPC.


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def every_method(client: Client, metadata: Metadata) -> list[Callable[[], Any]]:
    """A call of each, reflection last."""
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = client.stub
    return [
        lambda: stub.Generate(pb.GenerateRequest(), metadata=metadata),
        lambda: stub.GenerateStream(pb.GenerateStreamRequest(), metadata=metadata).read(),
        lambda: stub.GetModel(pb.GetModelRequest(), metadata=metadata),
        lambda: stub.Tokenize(pb.TokenizeRequest(text="fox"), metadata=metadata),
        lambda: stub.Detokenize(pb.DetokenizeRequest(), metadata=metadata),
        lambda: reflection.ServerReflectionInfo(iter([listing]), metadata=metadata).read(),
    ]


def reason(error: grpc.aio.AioRpcError) -> str:
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    return str(error_details_pb2.ErrorInfo.FromString(status.details[0].value).reason)


async def test_every_method_but_health_needs_a_key(start_router: StartRouter, file: Path) -> None:
    client = await start_router(api_keys_file=file)
    said = set()

    for metadata in ((), bearer("pgd-wrong"), (("authorization", KEY),)):
        for method in every_method(client, metadata):
            error = await error_of(method())
            said.add((error.code(), reason(error), error.details()))

    assert [(code, why) for code, why, _ in said] == [(UNAUTHENTICATED, "INVALID_API_KEY")]
    await client.wait_health(health_pb2.HealthCheckResponse.SERVING)


async def test_a_key_opens_what_needs_one(start_router: StartRouter, file: Path) -> None:
    client = await start_router(api_keys_file=file)

    # Without a prompt, generations would be refused.
    for method in every_method(client, bearer(KEY))[2:]:
        assert await method() is not None


async def test_the_scheduler_is_told_of_the_tenant(start_router: StartRouter, file: Path) -> None:
    write(file, entry(KEY, "acme", max_concurrent_requests=3))
    client = await start_router(api_keys_file=file)

    call = client.stub.Generate(pb.GenerateRequest(spec=pb.GenerateSpec(text="fox")), metadata=bearer(KEY))
    submit = await client.scheduler.accept()
    client.scheduler.drop()
    resubmit = await client.scheduler.accept()
    client.scheduler.send(resubmit, [70], LENGTH)
    await call

    assert (submit.tenant, submit.max_tenant_requests) == ("acme", 3)
    # What was accepted once goes on, however many others there are by now.
    assert (resubmit.tenant, resubmit.max_tenant_requests) == ("acme", 0)


async def test_a_scheduler_that_refuses_a_tenant_is_passed_on_with_its_delay(
    start_router: StartRouter, file: Path
) -> None:
    client = await start_router(api_keys_file=file)
    call = client.stub.Generate(pb.GenerateRequest(spec=pb.GenerateSpec(text="fox")), metadata=bearer(KEY))

    await client.scheduler.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "its limit is 3")

    error = await error_of(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "its limit is 3")


async def test_used_tokens_are_paid_off_before_the_next_request(
    start_router: StartRouter, file: Path
) -> None:
    write(file, entry(KEY, "acme", tokens_per_minute=30), entry(OTHER, "other"))
    client = await start_router(api_keys_file=file)
    spec = pb.GenerateSpec(token_ids=pb.TokenIds(ids=[70] * 20))

    def generate(key: str) -> Any:
        return client.stub.Generate(pb.GenerateRequest(spec=spec), metadata=bearer(key))

    # 20 of the prompt and 20 of the output: what runs is not cut.
    running = generate(KEY)
    client.scheduler.send(await client.scheduler.accept(), [70] * 20, LENGTH)
    assert (await running).usage.completion_tokens == 20

    error = await error_of(generate(KEY))

    assert (error.code(), reason(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOKEN_RATE_EXCEEDED")
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    delay = error_details_pb2.RetryInfo.FromString(status.details[1].value).retry_delay
    assert 0 < delay.ToMilliseconds() <= 20_000
    unharmed = generate(OTHER)
    client.scheduler.send(await client.scheduler.accept(), [70], LENGTH)
    await unharmed


# Where it may listen.


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, "--tls-cert-file and --tls-key-file"),
        ({"keys": True}, "--tls-cert-file and --tls-key-file"),
        ({"tls": True}, "--api-keys-file or --tls-client-ca-file"),
    ],
)
async def test_beyond_this_machine_it_takes_tls_and_authentication(
    start_router: StartRouter, file: Path, tmp_path: Path, settings: dict[str, bool], missing: str
) -> None:
    pair = Authority(tmp_path).issue("router")
    config: dict[str, Any] = {"listen_address": "0.0.0.0:0"}
    if "keys" in settings:
        config["api_keys_file"] = file
    if "tls" in settings:
        config |= {"tls_cert_file": pair.certificate, "tls_key_file": pair.key}

    with pytest.raises(AddressError, match=f"--listen-address 0.0.0.0:0: .* {missing}, or --insecure"):
        await start_router(**config)
