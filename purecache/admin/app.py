"""The routes: JSON in, JSON out, a token on every request."""

import functools
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as missing:
    raise ImportError("the admin server needs more packages: pip install purecache[admin]") from missing

from purecache.admin.bodies import (
    MOST_BYTES,
    REQUIRED,
    BodyError,
    Check,
    fields_of,
    namespace,
    number,
    optional,
    text,
    tokens,
    whole,
)
from purecache.admin.tokens import is_right
from purecache.control import MISTAKES, Operator, TooLateError
from purecache.state.pools import ANCHOR

_LOG = logging.getLogger(__name__)
Fields = dict[str, tuple[Check, Any]]
PROMPT: Fields = {"tokens": (tokens, REQUIRED), "namespace": (namespace, None), "rank": (optional(whole), 0)}
"""The fields that name a prompt."""


def posts(operator: Operator) -> dict[str, tuple[Callable[..., Any], Fields]]:
    """What can be asked for by POST: path, method of the operator, and the fields of the body: its arguments."""
    seconds: Fields = {"seconds": (number, REQUIRED)}
    session: Fields = {"session": (text, REQUIRED)}
    sizes: Fields = {name: (optional(whole), None) for name in ("device_pages", "host_pages", "rank")}
    return {
        "/v1/forget": (operator.forget, PROMPT | {"keep": (optional(whole), None)}),
        "/v1/forget-namespace": (operator.forget_namespace, {"namespace": (namespace, REQUIRED)}),
        "/v1/offload": (operator.offload, PROMPT),
        "/v1/flush": (operator.flush, {"tier": (text, REQUIRED)}),
        "/v1/reset": (operator.reset, {}),
        "/v1/resize": (operator.resize, sizes | {"pool": (text, ANCHOR)}),
        "/v1/pin": (operator.pin, PROMPT | seconds | {"name": (optional(text), None)}),
        "/v1/renew": (operator.renew, {"name": (text, REQUIRED)} | seconds),
        "/v1/release": (operator.release, {"name": (text, REQUIRED)}),
        "/v1/open-session": (operator.open_session, session | PROMPT | seconds),
        "/v1/close-session": (operator.close_session, session),
        "/v1/storage/attach": (operator.attach_storage, {"url": (text, REQUIRED)}),
        "/v1/storage/detach": (operator.detach_storage, {}),
        "/v1/storage/clear": (operator.clear_storage, {}),
        "/v1/storage/resize": (operator.resize_storage, {"capacity_bytes": (whole, REQUIRED)}),
    }


def gets(operator: Operator) -> dict[str, tuple[Callable[..., Any], dict[str, int]]]:
    """What can be looked at by GET: path, method, and its numbers with their defaults."""
    return {
        "/v1/stats": (operator.stats, {}),
        "/v1/tree": (operator.tree, {"lines": 400}),
        "/v1/hot": (operator.hot, {"number": 20}),
        "/v1/locks": (operator.locks, {}),
    }


def make_app(operator: Operator, token: str) -> Starlette:
    """The ASGI application. Every request needs the header `Authorization: Bearer TOKEN`."""
    routes = [Route(path, _post(token, *entry), methods=["POST"]) for path, entry in posts(operator).items()]
    routes += [Route(path, _get(token, *entry), methods=["GET"]) for path, entry in gets(operator).items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed})


def _post(token: str, method: Callable[..., Any], known: Fields) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if not is_right(request.headers.get("authorization"), token):
            return _no_token()
        try:
            arguments = fields_of(await _body(request), known)
        except BodyError as error:
            return _error(400, error)
        return await _answer(functools.partial(method, **arguments))

    return endpoint


def _get(token: str, method: Callable[..., Any], known: dict[str, int]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if not is_right(request.headers.get("authorization"), token):
            return _no_token()
        given = dict(request.query_params)
        if unknown := set(given) - set(known):
            return _error(400, BodyError(f"unknown parameters {sorted(unknown)}: there are {sorted(known)}"))
        if wrong := [name for name, value in given.items() if not (value.isascii() and value.isdigit())]:
            return _error(400, BodyError(f"{wrong[0]} must be a whole number"))
        return await _answer(functools.partial(method, **known | {name: int(value) for name, value in given.items()}))

    return endpoint


async def _body(request: Request) -> Any:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MOST_BYTES:
            raise BodyError(f"the body is longer than {MOST_BYTES} bytes")
    try:
        return json.loads(content or b"{}")
    except (ValueError, RecursionError):
        raise BodyError("the body is no JSON") from None


async def _answer(call: Callable[[], Any]) -> Response:
    try:
        # The call waits for a tick of the cache: not on the thread that serves the others.
        return JSONResponse({"result": await run_in_threadpool(call)})
    except MISTAKES as error:
        return _error(409, error)
    except TooLateError as error:
        return _error(503, error)
    except (ValueError, TypeError) as error:
        return _error(400, error)


def _error(status: int, error: Exception) -> Response:
    return JSONResponse({"error": str(error), "kind": type(error).__name__}, status)


def _no_token() -> Response:
    body = {"error": "show the token: Authorization: Bearer TOKEN", "kind": "Unauthorized"}
    return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return JSONResponse({"error": detail, "kind": "HTTPException"}, status)


async def _failed(request: Request, error: Exception) -> Response:
    _LOG.error("%s %s failed: %r", request.method, request.url.path, error)
    return JSONResponse({"error": "this failed in the server: see its log", "kind": type(error).__name__}, 500)
