"""The chat page: a web page on the API's address, which asks it as any other client does.

Its files need no key. What it asks does, where all requests need one.
"""

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from router.static_files import HEADERS, StaticFile, read_page


def is_of_page(path: str) -> bool:
    """Whether a path is the page's own, and not the API's."""
    return path == "/" or path.startswith("/chat/")


def add_chat_page(app: FastAPI, block_map_address: str | None) -> None:
    """Serves the page at `/`, and the rest of it below `/chat/`. It links to a block map."""
    files: Mapping[str, StaticFile] = read_page("chat")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return _response(files["index.html"])

    @app.api_route("/chat/config.json", methods=["GET", "HEAD"], include_in_schema=False)
    async def config() -> Response:
        return JSONResponse({"block_map_address": block_map_address}, headers=HEADERS)

    @app.api_route("/chat/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files or name == "index.html":
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return _response(files[name])


def _response(file: StaticFile) -> Response:
    # Without the character set that Starlette would add to the type of a text.
    return Response(file.body, headers={**HEADERS, "Content-Type": file.content_type})
