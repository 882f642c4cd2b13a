"""What the page's addresses do: each method of `Page` answers one."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from sigmascope.__about__ import __version__
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.ui.jobs import JobLine
from sigmascope.ui.lbm_model import Made, ServedModel, Translator
from sigmascope.ui.requests import (
    Picture,
    Pictures,
    Recent,
    as_png,
    check_working_size,
    read_wish,
    too_many_bytes,
)
from sigmascope.ui.security import LORA_SCALES, Limits, Refusal

ASSETS: Final = Path(__file__).parent / "page"
POLL_SECONDS: Final = 20.0
"""How long a question about a job waits for news."""
WISH_BYTES: Final = 8192
"""Most that the body of a job may have."""
SCENES: Final = frozenset(map(str, range(1000)))
"""The pocket model's held-out scenes, as an address names them."""


class Page:
    """One served model with its pictures, its results and its line of jobs.

    Args:
        served: Model and LoRA.
        limits: Of requests.
    """

    def __init__(self, served: ServedModel, limits: Limits) -> None:
        self.served = served
        self.limits = limits
        self.pictures = Pictures(limits)
        self.results = Recent[Made](limits.kept_results_bytes)
        self.line = JobLine(limits.waiting)
        self._translator = Translator(served, self.results)
        self._uploads = 0
        self._decoding = asyncio.Semaphore(2)  # a picture of a few kilobytes may need 150 MB for a moment
        templates = Environment(loader=PackageLoader("sigmascope.ui", "page"), autoescape=True)
        self._template = templates.get_template("index.html")

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return HTMLResponse(await run_in_threadpool(self._template.render, about=self._about()))

    async def about(self, request: Request) -> Response:
        """The model, the LoRA and what may be asked for."""
        return JSONResponse(self._about())

    async def add_picture(self, request: Request) -> Response:
        """Keep the picture that is the request's body."""
        if self._uploads >= self.limits.uploads:
            raise Refusal(429, f"{self._uploads} pictures are being sent already.", "Try again in a while.")
        self._uploads += 1  # until it is decoded: before that, what was sent is in memory
        try:
            data = await self._body(request, self.limits.upload_bytes, lambda: too_many_bytes(self.limits))
            async with self._decoding:
                picture = await run_in_threadpool(self.pictures.add, data)
        finally:
            self._uploads -= 1
        return _picture_answer(picture)

    async def add_scene(self, request: Request) -> Response:
        """Keep one of the rendered scenes that the pocket model knows."""
        number = str(request.path_params["number"])
        if not self.served.pocket or number not in SCENES:
            raise Refusal(404, f"There is no scene {number[:20]} here.", "Upload a picture.")
        source, _ = await run_in_threadpool(relighting_pair, int(number), COOL)
        return _picture_answer(self.pictures.add_image(Image.fromarray(source)))

    async def picture(self, request: Request) -> Response:
        """A kept picture as the model gets it: upright, opaque, 8-bit."""
        picture = self.pictures.get(request.path_params["picture"])
        return Response(await run_in_threadpool(as_png, picture.image), media_type="image/png")

    async def add_job(self, request: Request) -> Response:
        """Ask for base and result."""
        wish = read_wish(await self._body(request, WISH_BYTES, _too_long), self.limits)
        picture = self.pictures.get(wish.picture)
        check_working_size(
            wish,
            picture.image.size,
            resolution=self.served.resolution,
            factor=self.served.model.config.factor,
            limits=self.limits,
        )
        job = self.line.submit(wish.client, partial(self._translator.translate, picture, wish))
        return JSONResponse(job.as_dict(), 202)

    async def job(self, request: Request) -> Response:
        """Where a request stands; with `?after=VERSION`, once it is past that version."""
        job = self.line.get(request.path_params["job"])
        after = request.query_params.get("after", "")
        if after.isdecimal() and len(after) < 10:
            await self.line.wait_for_change(job, int(after), POLL_SECONDS)
        return JSONResponse(job.as_dict())

    async def result_picture(self, request: Request) -> Response:
        """A picture that was made."""
        return Response(self._made(request).png, media_type="image/png")

    async def result_run(self, request: Request) -> Response:
        """The record of making it, as `sigmascope.load_run` reads it."""
        return Response(self._made(request).run_json, media_type="application/json")

    async def _body(self, request: Request, limit: int, refusal: Callable[[], Refusal]) -> bytes:
        """Read a body of at most `limit` bytes, whatever its headers promise and however slowly it comes."""
        promised = request.headers.get("content-length", "")
        if promised.isdecimal() and (len(promised) > 18 or int(promised) > limit):
            raise refusal()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                return await _read_stream(request, limit, refusal, self.limits.silent_seconds)
        except TimeoutError:
            raise Refusal(
                408,
                f"The request did not end within {self.limits.body_seconds:g} s, "
                f"or {self.limits.silent_seconds:g} s went by without a part of it.",
                "Send it again.",
            ) from None
        except ClientDisconnect:  # nobody is there to be told
            raise Refusal(400, "The request ended before its body did.") from None

    def _made(self, request: Request) -> Made:
        made = self.results.get(request.path_params["result"])
        if made is None:
            raise Refusal(404, "This result is not kept any more.", "Ask for it again.")
        return made

    def _about(self) -> dict[str, object]:
        limits = self.limits
        return {
            "version": __version__,
            **self.served.facts(),
            "lora_scales": list(LORA_SCALES),
            "most_steps": limits.steps,
            "most_upload_bytes": limits.upload_bytes,
        }


def _picture_answer(picture: Picture) -> JSONResponse:
    return JSONResponse({"id": picture.id, "width": picture.image.width, "height": picture.image.height}, 201)


def _too_long() -> Refusal:
    return Refusal(413, f"The request is longer than {WISH_BYTES} bytes.", "Upload the picture on its own.")


async def _read_stream(
    request: Request, limit: int, refusal: Callable[[], Refusal], silent_seconds: float
) -> bytes:
    read = bytearray()
    async with asyncio.timeout(silent_seconds) as silence:
        async for chunk in request.stream():
            read += chunk
            if len(read) > limit:
                raise refusal()
            silence.reschedule(asyncio.get_running_loop().time() + silent_seconds)
    return bytes(read)
