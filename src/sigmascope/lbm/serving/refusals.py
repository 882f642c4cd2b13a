"""What a request is told when it cannot be served: a status, what is wrong, and the next step."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sigmascope.errors import SigmascopeError

_UNREAD = (408, 413)
"""Statuses that leave some of the request's body unread, so that no other request can follow."""


class Refusal(Exception):
    """A request that is refused; answered as `{"error": {"message": …, "hint": …}}`.

    Args:
        status: HTTP status, 400 to 599.
        message: What is wrong.
        hint: The next step.
    """

    def __init__(self, status: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.hint = hint

    @property
    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(
            {"error": as_error(self.message, self.hint)},
            self.status,
            {"connection": "close"} if self.status in _UNREAD else None,
        )


def as_error(message: str, hint: str | None) -> dict[str, str | None]:
    """The structure in which the page gets every error."""
    return {"message": message, "hint": hint}


async def answer_refusal(request: Request, error: Exception) -> Response:
    """Starlette's handler of `Refusal`."""
    assert isinstance(error, Refusal)
    return error.response


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of its own 404 and 405."""
    assert isinstance(error, HTTPException)
    refusal = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
    response = refusal.response
    response.headers.update(error.headers or {})
    return response


async def answer_sigmascope_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of what the library refuses while a request is read."""
    assert isinstance(error, SigmascopeError)
    return Refusal(422, error.message, error.hint).response


async def answer_fault(request: Request, error: Exception) -> Response:
    """Starlette's handler of everything else, which it then raises again for the server's own output."""
    told = f"The server failed ({type(error).__name__})."
    return Refusal(500, told, "The server's own output says more.").response
