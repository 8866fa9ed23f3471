"""The OpenAPI document of the server, made from the same models that check requests."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from outrider import __version__
from outrider.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Form,
    TokenizeRequest,
)

REFERENCE = "#/components/schemas/{model}"
POSTS: dict[str, tuple[type[Form], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/completions": (CompletionRequest, "Continue prompts"),
    "/tokenize": (TokenizeRequest, "Text or messages to tokens"),
    "/detokenize": (DetokenizeRequest, "Tokens to text"),
}
GETS = {
    "/v1/models": "The model and its profiles",
    "/v1/models/{id}": "One of them",
    "/version": "The server's version",
    "/health": "Is the process in order?",
    "/ready": "Does it take requests?",
}
REFUSALS = {
    "400": "The request cannot be served",
    "401": "No valid key",
    "403": "Not allowed",
    "404": "Not here",
    "405": "Wrong method",
    "408": "The body came too slowly",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "No room now",
    "431": "The headers are too large",
    "500": "A fault inside the server",
    "503": "Not running, or draining",
    "504": "Not finished in time",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    kinds = [(kind, "validation") for kind, _ in POSTS.values()]
    _, schemas = models_json_schema(kinds, ref_template=REFERENCE)  # type: ignore[arg-type]
    paths: dict[str, Any] = {path: {"get": _get(path, text)} for path, text in GETS.items()}
    paths |= {path: {"post": _post(kind, text)} for path, (kind, text) in POSTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _responses(*, streams: bool) -> dict[str, Any]:
    good: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        good["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    refusals = {code: {"description": text, "content": error} for code, text in REFUSALS.items()}
    return {"200": {"description": "Done", "content": good}, **refusals}


def _get(path: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": text, "responses": _responses(streams=False)}
    if path in ("/health", "/ready"):
        found["security"] = []
        found["responses"]["503"] = found["responses"]["200"]
    if "{id}" in path:
        schema = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": schema}]
    return found


def _post(kind: type[Form], text: str) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(streams=kind in (ChatRequest, CompletionRequest)),
    }
