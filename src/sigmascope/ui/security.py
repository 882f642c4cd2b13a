"""Who may talk to the page: its own pages in the user's browser, and programs on machines that know its address.

A page that binds to loopback is still within reach of every web site that the user visits: by a form or script
that posts to it (CSRF), and by a name that resolves to 127.0.0.1 (DNS rebinding). The first carries a foreign
`Origin`, the second a foreign `Host`.

A page that other machines reach has a token. The link that the server prints holds it; the page's first answer puts it
into a cookie, and programs send it as `Authorization: Bearer`.

A `Refusal` is what a request is told when it cannot be served: a status, what is wrong, and the next step. `Limits`
says how much one request may ask for, so that a mistake or a hostile picture does not take the machine down. `received` and
`receive` take a body within them. `Room` bounds what all requests together hold in memory.
"""

import asyncio
import ipaddress
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sigmascope.errors import NoSuchRunError, SigmascopeError, StoreError
from sigmascope.units import MIB

SAFE_METHODS = ("GET", "HEAD")
"""These change nothing, so another page may ask."""
# Nothing but a name and a port: what is before an @ or behind a slash is none, and must not be taken for one.
_HOST = re.compile(r"(?:\[(?P<address>[^\[\]@/\\\s]+)\]|(?P<name>[^:\[\]@/?#\\\s]+))(?::\d{0,5})?")
HEADERS = {
    # Nothing from elsewhere is loaded, nothing inline is run; pictures are fetched and shown as blobs.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # with none at all, a form of ours would be sent with the origin "null"
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Pictures are private: a browser's cache is a file.
    "cache-control": "no-store",
}
_STATUS_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    # These leave some of the request's body unread, so that no other request can follow.
    408: {"connection": "close"},
    413: {"connection": "close"},
    429: {"retry-after": "5"},
    503: {"retry-after": "5"},
}
"""What a refusal of each status adds."""
PIECE_BYTES: Final = 65536
"""Sent at once of an answer: a connection has no more than two of these in memory."""

LORA_SCALES: Final = (0.0, 2.0)
"""Range of a LoRA's strength."""


class Guard:
    """ASGI middleware: refuses foreign hosts and origins, and adds the headers that keep the page to itself.

    Args:
        app: What is guarded.
        host: That the server was told to bind to; its name is allowed beside loopback, this machine's name, and
            plain addresses, which no one can rebind.
        token: That every request must have; None lets all pass.
        answer: Makes the answer to a request that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        token: str | None = None,
        answer: "Callable[[Request, Refusal], Response]" = lambda _, refusal: refusal.response,
    ) -> None:
        self._app = app
        self._names = known_names(host)
        self._token = token
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            check_request(scope["method"], Headers(scope=scope), self._names)
            answer = None if self._token is None else check_token(Request(scope), self._token)
        except Refusal as refusal:
            answer = self._answer(Request(scope), refusal)
        await (answer or self._app)(scope, receive, send_guarded)


def check_request(method: str, headers: Headers, names: Iterable[str]) -> None:
    """Refuse a request that came by a foreign name or from a foreign page.

    Raises:
        Refusal: 400 without a `Host`, 403 with a foreign one, or a foreign `Origin` or `Sec-Fetch-Site`.
    """
    host = headers.get("host", "")
    name = host_name(host)
    if not name:
        raise Refusal(400, "The request names no host.")
    if name not in names and not _is_address(name):
        raise Refusal(403, f"{name} is not a name of this server.", "Open the address that it printed.")
    if method in SAFE_METHODS:
        return
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise Refusal(403, "The request comes from another page.", "Use the page that this server shows.")
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Refusal(403, "The request comes from another site.", "Use the page that this server shows.")


def check_token(request: Request, token: str) -> Response | None:
    """Refuse a request without the token.

    Returns:
        None if the request may pass. The printed link's answer, which keeps the token in a cookie and leads to the
        page without it: what stands in the address bar is seen by others, and kept in the history.

    Raises:
        Refusal: 401 without the token.
    """
    port = (request.scope.get("server") or ("", None))[1]
    cookie = f"sigmascope-{port}"  # cookies are shared by all ports of a host
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    bearer = bearer if scheme.lower() == "bearer" else ""
    if any(_is_same(given, token) for given in (request.cookies.get(cookie, ""), bearer)):
        return None
    if request.url.path == "/" and _is_same(request.query_params.get("token", ""), token):
        answer = RedirectResponse(".", 303)
        # "strict" would not be sent after a click on the link in another page.
        answer.set_cookie(cookie, token, httponly=True, samesite="lax")
        return answer
    raise Refusal(
        401,
        "This server needs its token.",
        'Open the link that it printed, or send the header "Authorization: Bearer TOKEN".',
    )


def _is_same(given: str, token: str) -> bool:
    """Whether they are equal, in a time that does not tell how much of them is."""
    return secrets.compare_digest(given.encode(), token.encode())


def new_token() -> str:
    """A token that nobody guesses: 256 bits."""
    return secrets.token_urlsafe(32)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def known_names(host: str) -> frozenset[str]:
    """Names by which a server bound to `host` is asked for, in lower case."""
    return frozenset(
        name.lower().removesuffix(".")
        for name in ("localhost", host, socket.gethostname(), socket.getfqdn())
        if name
    )


def host_name(host: str) -> str:
    """The name in a `Host` header, in lower case, without port, brackets and the root's dot; empty if it is none."""
    match = _HOST.fullmatch(host)
    return "" if match is None else (match["address"] or match["name"]).lower().removesuffix(".")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to `host`."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


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
            self.headers,
        )

    @property
    def headers(self) -> dict[str, str]:
        """What the status adds to the answer's headers."""
        return _STATUS_HEADERS.get(self.status, {})


def as_error(message: str, hint: str | None) -> dict[str, str | None]:
    """The structure in which the page gets every error."""
    return {"message": message, "hint": hint}


def refusal_of(request: Request, error: Exception) -> Refusal:
    """What a request is told of an exception."""
    match error:
        case Refusal():
            return error
        case HTTPException():  # Starlette's own 404 and 405
            return Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
        case NoSuchRunError():
            return Refusal(404, error.message, error.hint)
        case StoreError():  # which may answer later
            return Refusal(503, error.message, error.hint)
        case SigmascopeError():  # what the library refuses while a request is read
            return Refusal(422, error.message, error.hint)
    message = f"The server failed ({type(error).__name__})."
    return Refusal(500, message, "The server's own output says more.")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the page.

    Attributes:
        upload_bytes: Of one picture as sent.
        uploads: Pictures that are being sent at once, each held in memory until it is whole.
        receiving_bytes: Of all these together.
        sending_bytes: Of all answers that are being sent; one that several get counts once.
        connections: Open at once.
        body_seconds: In which a request's body must be here.
        silent_seconds: The longest without any part of it, and the longest in which a peer takes no part of an answer.
        picture_pixels: Of one picture when decoded: a few kilobytes may hold gigabytes.
        working_pixels: At which the model works; its memory grows with this.
        steps: Of the bridge.
        waiting: Requests in line, over all clients.
        kept_pictures_bytes: Decoded pictures that are kept, the oldest forgotten first.
        kept_results_bytes: Results that are kept, likewise.
        lora_bytes: Of one LoRA file as sent.
        kept_loras: LoRA files that are kept, the oldest removed first.
        lora_seconds: In which one must be here.
    """

    upload_bytes: int = 50 * MIB
    uploads: int = 16
    receiving_bytes: int = 256 * MIB
    sending_bytes: int = 256 * MIB
    connections: int = 256
    body_seconds: float = 120.0
    silent_seconds: float = 20.0
    picture_pixels: int = 50_000_000
    working_pixels: int = 2048 * 2048
    steps: int = 100
    waiting: int = 32
    kept_pictures_bytes: int = 384 * MIB
    kept_results_bytes: int = 256 * MIB
    lora_bytes: int = 4096 * MIB
    kept_loras: int = 8
    lora_seconds: float = 900.0


def promised_bytes(request: Request, limit: int, refusal: Refusal) -> int:
    """Most bytes that the body can have: what its headers promise, else the limit.

    Raises:
        Refusal: `refusal`: they promise more.
    """
    promised = request.headers.get("content-length", "")
    if not promised.isdecimal():
        return limit
    if len(promised) > 18 or int(promised) > limit:
        raise refusal
    return int(promised)


async def received(request: Request, limit: int, refusal: Refusal, limits: Limits) -> bytes:
    """A body of at most `limit` bytes.

    Raises:
        Refusal: As in `receive`.
    """
    read = bytearray()
    await receive(request, read.extend, limit, refusal, limits)
    return bytes(read)


async def receive(
    request: Request,
    take: "Callable[[bytes], object]",
    limit: int,
    refusal: Refusal,
    limits: Limits,
    body_seconds: float | None = None,
) -> None:
    """Read a body of at most `limit` bytes piece by piece, whatever its headers promise and however slowly it comes.

    Raises:
        Refusal: `refusal`: it is longer. 408: it does not end in time. 400: the peer is gone.
    """
    promised_bytes(request, limit, refusal)
    seconds, most_seconds, count = limits.silent_seconds, body_seconds or limits.body_seconds, 0
    try:
        async with asyncio.timeout(most_seconds), asyncio.timeout(seconds) as silence:
            async for piece in request.stream():
                count += len(piece)
                if count > limit:
                    raise refusal
                take(piece)
                silence.reschedule(asyncio.get_running_loop().time() + seconds)
    except TimeoutError:
        raise Refusal(
            408,
            f"The request did not end within {most_seconds:g} s, "
            f"or {limits.silent_seconds:g} s went by without a part of it.",
            "Send it again.",
        ) from None
    except ClientDisconnect:  # nobody is there to be told
        raise Refusal(400, "The request ended before its body did.") from None


class Room:
    """Memory that all requests share for what is being sent.

    Args:
        limit_bytes: Of all that is held. What is alone may be larger.

    Examples:
        >>> room, picture = Room(limit_bytes=10), b"8 bytes."
        >>> with room.holding(picture), room.holding(picture):
        ...     room.held_bytes
        8
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._holders: Counter[int] = Counter()
        self.held_bytes = 0

    @contextmanager
    def holding(self, data: bytes) -> Iterator[None]:
        """Count these bytes as held, once however often they are.

        Raises:
            Refusal: There is no room for them now (503).
        """
        key = id(data)
        if key not in self._holders:
            self._take(len(data))
        self._holders[key] += 1
        try:
            yield
        finally:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.held_bytes -= len(data)

    @contextmanager
    def reserved(self, size_bytes: int) -> Iterator[None]:
        """Count this much as held, before it is.

        Raises:
            Refusal: There is no room for it now (503).
        """
        self._take(size_bytes)
        try:
            yield
        finally:
            self.held_bytes -= size_bytes

    def _take(self, size_bytes: int) -> None:
        if self.held_bytes and self.held_bytes + size_bytes > self._limit_bytes:
            raise Refusal(503, "Too much is being sent just now.", "Try again in a while.")
        self.held_bytes += size_bytes


class Kept(Response):
    """Bytes that are kept, sent piece by piece as the peer takes them: in one piece, each connection would copy them."""

    def __init__(self, data: bytes, room: Room, media_type: str) -> None:
        super().__init__(data, media_type=media_type)
        self._data = data
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them.

        Raises:
            Refusal: Too much is being sent (503).
        """
        with self._room.holding(self._data):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for start in range(0, len(self._data), PIECE_BYTES):
                piece = self._data[start : start + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
