"""API keys and TLS over HTTP."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.auth import digest, new_key
from tests.authority import Authority
from tests.router.openai.conftest import Face, answer

KEY = new_key()


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    file.write_text(f'- {{id: acme, key_sha256: "{digest(KEY)}", max_concurrent_requests: 3}}')
    return file


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
    ],
)
async def test_every_path_but_health_needs_a_key(
    start_face: Any, keys_file: Path, method: str, path: str
) -> None:
    face: Face = await start_face(api_keys_file=keys_file)

    for headers in ({}, bearer("pgd-wrong")):
        refused = await face.http.request(method, path, headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")

    assert (await face.http.request(method, path, headers=bearer(KEY))).status_code != 401
    assert (await face.http.get("/health")).status_code == 200


async def test_a_request_is_its_tenants(start_face: Any, keys_file: Path) -> None:
    face: Face = await start_face(api_keys_file=keys_file)
    client = face.openai.with_options(api_key=KEY)

    running = client.completions.create(model="tiny", prompt="fox")
    submit, _ = await asyncio.gather(answer(face, "fox"), running)

    assert (submit.tenant, submit.max_tenant_requests) == ("acme", 3)


async def test_more_prompts_than_a_key_may_ever_run_are_refused_for_good(
    start_face: Any, keys_file: Path
) -> None:
    face: Face = await start_face(api_keys_file=keys_file)
    body = {"prompt": ["fox"] * 4}
    refused = await face.http.post("/v1/completions", json=body, headers=bearer(KEY))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "prompt")
    assert "4 at once, but max_concurrent_requests of this key is 3" in error["message"]


async def test_new_connections_get_the_new_certificate(start_face: Any, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    pair = ca.issue("router")
    face: Face = await start_face(tls_cert_file=pair.certificate, tls_key_file=pair.key)
    new = Authority(tmp_path, "new")

    assert (await healthy(face, ca), await healthy(face, new)) == (True, False)
    new.issue("router")
    assert (await healthy(face, ca), await healthy(face, new)) == (False, True)


async def healthy(face: Face, ca: Authority) -> bool:
    """Over a new connection, by who trusts this CA."""
    context = ssl.create_default_context(cafile=ca.file)
    async with httpx.AsyncClient(verify=context) as client:
        try:
            return (await client.get(f"https://127.0.0.1:{face.port}/health")).status_code == 200
        except httpx.ConnectError:
            return False
