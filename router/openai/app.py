"""The OpenAI-compatible face of `Inference`, as an ASGI application."""

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from common.version import VERSION
from router.errors import RequestError, internal
from router.inference import Inference
from router.openai import errors
from router.openai.calls import HEALTH_PATH, call_of, caller_of
from router.openai.chat import chat, chat_of
from router.openai.chat_page import add_chat_page
from router.openai.completions import complete
from router.openai.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    TokenizeBody,
)
from router.openai.spec import check_served
from router.validation import check_model


def create_app(inference: Inference, ready: Callable[[], bool], block_map_address: str | None) -> FastAPI:
    """All paths. `ready` says whether requests can be served now, the address where the block map is."""
    app = FastAPI(
        title="Pagoda",
        version=VERSION,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    created = int(time.time())

    @app.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        return await complete(inference, body, call_of(request), caller_of(request))

    @app.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        return await chat(inference, body, call_of(request), caller_of(request))

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(inference, created)]}

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> dict[str, Any]:
        check_model(model, inference.model_name)
        return _model(inference, created)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(body.model or "", inference.model_name)
        check_served(body.model_extra)
        if body.prompt is None:
            ids = await inference.tokenize(chat_of(body), "spec.chat")
        else:
            ids = await inference.tokenize(body.prompt, "prompt")
        return {"count": len(ids), "max_model_len": inference.model().max_model_len, "tokens": ids}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        check_model(body.model or "", inference.model_name)
        return {"prompt": await inference.detokenize(body.tokens, "tokens")}

    add_chat_page(app, block_map_address)

    @app.get(HEALTH_PATH, response_model=None)
    async def health() -> Response:
        return Response(status_code=200 if ready() else 503)

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        call_of(request).fail(error)
        return errors.response(error)

    @app.exception_handler(RequestValidationError)
    async def on_wrong_body(request: Request, error: RequestValidationError) -> Response:
        return await on_request_error(request, errors.from_body(error))

    @app.exception_handler(HTTPException)
    async def on_routing_error(request: Request, error: HTTPException) -> Response:
        return await on_request_error(request, errors.from_routing(error, request.method, request.url.path))

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        return await on_request_error(request, internal(request.url.path))

    return app


def _model(inference: Inference, created: int) -> dict[str, Any]:
    model = inference.model()
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "pagoda",
        "max_model_len": model.max_model_len,
    }
