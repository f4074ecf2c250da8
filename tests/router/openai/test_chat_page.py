"""The chat page's files. What they do, tests/e2e/test_chat_page.py sees in a browser."""

from pathlib import Path
from typing import Any

import pytest

from router.auth import digest, new_key
from tests.router.openai.conftest import Face

FILES = [
    ("/", "text/html; charset=utf-8"),
    ("/chat/page.js", "text/javascript; charset=utf-8"),
    ("/chat/api.js", "text/javascript; charset=utf-8"),
    ("/chat/markdown.js", "text/javascript; charset=utf-8"),
    ("/chat/style.css", "text/css; charset=utf-8"),
    ("/chat/base.css", "text/css; charset=utf-8"),
    ("/chat/icon.svg", "image/svg+xml"),
    ("/chat/config.json", "application/json"),
]


@pytest.mark.parametrize(("path", "content_type"), FILES)
async def test_every_file_is_fenced(face: Face, path: str, content_type: str) -> None:
    response = await face.http.get(path)
    policy = response.headers["content-security-policy"].split("; ")

    assert (response.status_code, response.headers["content-type"]) == (200, content_type)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"
    assert {"default-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'"} <= set(policy)
    assert not any("unsafe" in directive for directive in policy)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "path",
    [
        "/index.html",
        "/page.js",
        "/chat",
        "/chat/",
        "/chat/index.html",
        "/chat/../chat_page.py",
        "/chat/..%2f..%2fopenai/app.py",
        "/chat/%2e%2e/block_map/page.js",
        "/chat/page.js/",
        "/chat/page.js%00.css",
        "/chat/%ff",
        "/chat//etc/passwd",
    ],
)
async def test_other_paths_are_404(face: Face, path: str) -> None:
    assert (await face.http.get(path)).status_code == 404


async def test_the_page_is_only_read(face: Face) -> None:
    got, head = await face.http.get("/"), await face.http.head("/")
    refused = await face.post("/")

    assert (head.status_code, head.headers["content-length"], head.content) == (
        200,
        str(len(got.content)),
        b"",
    )
    assert refused.status_code == 405


async def test_the_page_needs_no_key_and_opens_nothing_else(start_face: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f'- {{id: acme, key_sha256: "{digest(new_key())}"}}')
    face: Face = await start_face(api_keys_file=file)

    assert {(await face.http.get(path)).status_code for path, _ in FILES} == {200}
    for path in (
        "/v1/models",
        "//v1/models",
        "/chat/../v1/models",
        "/chat/..%2fv1/models",
        "/chat/%2e%2e/v1/models",
    ):
        assert (await face.http.get(path)).status_code in (401, 404)


async def test_without_a_block_map_there_is_no_address(face: Face) -> None:
    assert (await face.http.get("/chat/config.json")).json() == {"block_map_address": None}
