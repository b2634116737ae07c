"""What the description of the endpoint says of who may use it: the two schemes, and how to get a token."""

from typing import Any

from schemas.operations import json_response

# The published description knows the second alone; a key goes wherever a token does.
SECURITY_SCHEMES: dict[str, Any] = {
    "key": {"type": "http", "scheme": "bearer"},
    "OAuth2PasswordBearer": {"type": "oauth2", "flows": {"password": {"scopes": {}, "tokenUrl": "token"}}},
}
SECURITY: list[dict[str, list[str]]] = [{name: []} for name in SECURITY_SCHEMES]

_TEXT = {"type": "string"}
# RFC 6749, 4.3.2, as FastAPI's OAuth2PasswordRequestForm writes it.
_FORM = {
    "type": "object",
    "required": ["username", "password"],
    "properties": {
        "grant_type": {"type": "string", "enum": ["password"]},
        "username": {"type": "string", "minLength": 1},
        "password": {"type": "string", "minLength": 1, "maxLength": 1024, "format": "password"},
        "scope": {"type": "string", "enum": [""], "default": ""},
        "client_id": _TEXT,
        "client_secret": {"type": "string", "format": "password"},
    },
}
_TOKEN = {
    "type": "object",
    "required": ["access_token", "token_type", "expires_in"],
    "properties": {
        "access_token": _TEXT,
        "token_type": {"const": "bearer"},
        "expires_in": {"type": "integer", "minimum": 1, "description": "Seconds."},
    },
}
# RFC 6749, 5.2, with the status and the reason that other errors have as well.
_REFUSAL = {
    "type": "object",
    "required": ["error", "error_description", "status_code", "reason"],
    "properties": {
        "error": {
            "enum": [
                "invalid_request",
                "invalid_grant",
                "invalid_scope",
                "unsupported_grant_type",
                "slow_down",
                "temporarily_unavailable",
            ]
        },
        "error_description": _TEXT,
        "status_code": {"type": "integer"},
        "reason": _TEXT,
    },
}
_STATUSES = {
    400: "No token",
    408: "The form came too slowly",
    413: "The form is too large",
    415: "The body is no form",
    429: "Too many attempts",
    503: "Nobody can tell now",
}


def token_operation() -> dict[str, Any]:
    """`POST /token`, which needs no key."""
    return {
        "summary": "Log In",
        "operationId": "create_token_token_post",
        "tags": ["Access"],
        "requestBody": {"content": {"application/x-www-form-urlencoded": {"schema": _FORM}}, "required": True},
        "responses": {
            "200": json_response("A bearer token", _TOKEN),
            **{str(status): json_response(description, _REFUSAL) for status, description in _STATUSES.items()},
        },
    }
