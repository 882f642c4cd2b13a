"""The LoRA inspector: drop a file and see what it is and who loads how much of it; drop a second, and see how the two differ.

A file is written to a folder of the server's own as it comes, and only as safetensors, which hold no code: what does not begin like one
is refused with its first bytes. The last few stay for as long as the server runs, so that a second can be held against one.
"""

import asyncio
import secrets
import shutil
import struct
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sigmascope.errors import SigmascopeError
from sigmascope.files import reason_of
from sigmascope.lora.compare import LoraComparison, compare_loras
from sigmascope.lora.file_family import FileFamily, file_family, title_of
from sigmascope.lora.hosts import strengths_in_words
from sigmascope.lora.inspect import LoraInspection, inspect_lora
from sigmascope.lora.reader import open_lora
from sigmascope.lora.together import LorasTogether, inspect_together
from sigmascope.ui.app import Part, page_of
from sigmascope.ui.security import Limits, Refusal, receive
from sigmascope.units import MIB, UNKNOWN, counted, first_few, format_size, number, percent_change, statistic

_MOST_HEADER_BYTES: Final = 100_000_000
"""Of a safetensors file, as its library has it."""
_LENGTH_BYTES: Final = 8
_MOST_PART_HEADER: Final = 8192
_LONGEST_NAME: Final = 120
_MOST_ROWS: Final = 12
_MOST_MODULES: Final = 200


def lora_part(limits: Limits | None = None) -> Part:
    """The inspector's pages."""
    pages = LoraPages(limits or Limits())
    return Part(
        title="LoRA",
        path="lora",
        routes=(
            Route("/lora", pages.index),
            Route("/lora", pages.add, methods=["POST"]),
            Route("/lora/{first}", pages.one),
            Route("/lora/{first}", pages.add, methods=["POST"]),
            Route("/lora/{first}/{second}", pages.two),
        ),
        running=pages.running,
        is_busy=lambda: pages.working > 0,
        clean=pages.uploads.remove_all,
    )


@dataclass
class Upload:
    """A file that was dropped.

    Attributes:
        id: In addresses.
        name: As its owner calls it.
        path: Where it lies.
        inspected: What was found in it, once somebody looked.
    """

    id: str
    name: str
    path: Path
    inspected: "tuple[LoraInspection, FileFamily] | None" = None


class Uploads:
    """The files that were dropped last, in a folder that is removed at the end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, Upload] = OrderedDict()
        self._folder: Path | None = None

    def new_path(self) -> tuple[str, Path]:
        """A new id, and where its file is to be written."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sigmascope-ui-"))
        key = secrets.token_hex(8)
        return key, self._folder / f"{key}.safetensors"

    def add(self, upload: Upload) -> None:
        """Keep one, and remove the oldest beyond the limit."""
        self._kept[upload.id] = upload
        while len(self._kept) > self._most:
            _, oldest = self._kept.popitem(last=False)
            oldest.path.unlink(missing_ok=True)

    def get(self, key: str) -> Upload:
        """The upload of that id.

        Raises:
            Refusal: It is not kept, or no longer (404).
        """
        if key not in self._kept:
            raise Refusal(404, "This LoRA is no longer kept.", "Drop the file again.")
        self._kept.move_to_end(key)
        return self._kept[key]

    def remove(self, upload: Upload) -> None:
        """Remove one that is of no use."""
        self._kept.pop(upload.id, None)
        upload.path.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove the folder with all files."""
        folder, self._folder = self._folder, None
        self._kept.clear()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class LoraPages:
    """The pages, each a method."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.uploads = Uploads(limits.kept_loras)
        self.working = 0
        self._turn = asyncio.Semaphore(1)  # an inspection takes all processors

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the server runs; afterwards no file is left."""
        try:
            yield
        finally:
            self.uploads.remove_all()

    async def index(self, request: Request) -> Response:
        """Where to drop a file."""
        return await page_of(request, "lora.html.jinja", most=format_size(self.limits.lora_bytes))

    async def add(self, request: Request) -> Response:
        """Take one file or two, and lead to the page on them."""
        first = request.path_params.get("first")
        known = [self.uploads.get(first)] if first is not None else []
        form = _Form(self.uploads, most=2 - len(known))
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise Refusal(415, "No file was sent.", "Use the form of the page.")
        too_large = Refusal(
            413,
            f"A file is larger than {self.limits.lora_bytes / MIB:g} MiB.",
            "Inspect it with sigmascope lora inspect.",
        )
        parser = MultipartParser(options[b"boundary"], form.callbacks())
        most = self.limits.lora_bytes * (2 - len(known)) + MIB
        try:
            await receive(request, parser.write, most, too_large, self.limits, self.limits.lora_seconds)
            parser.finalize()
            found = form.finished()
        except OSError as error:
            raise Refusal(
                507, f"The file cannot be kept ({reason_of(error)}).", "Free some space."
            ) from error
        except ValueError as error:  # the parser's own, of a body that is none
            raise Refusal(400, "The form cannot be read.", "Send it again.") from error
        finally:
            form.close()
        for upload in found:
            self.uploads.add(upload)
        beside = [] if known else ["lora"]  # a browser goes from the address that it has
        return RedirectResponse("/".join([*beside, *(upload.id for upload in (*known, *found))]), 303)

    async def one(self, request: Request) -> Response:
        """What is in a file."""
        upload = self.uploads.get(request.path_params["first"])
        report, family = await self._inspected(upload)
        values = await run_in_threadpool(partial(_report_view, upload, report, family))
        return await page_of(request, "one_lora.html.jinja", **values)

    async def two(self, request: Request) -> Response:
        """How two files differ, and how they add up."""
        pair = [self.uploads.get(request.path_params[name]) for name in ("first", "second")]
        paths = [upload.path for upload in pair]
        compared, why_not = await self._work(pair, partial(compare_loras, *paths))
        together, why_not_together = await self._work(pair, partial(inspect_together, paths))
        return await page_of(
            request,
            "two_loras.html.jinja",
            names=[upload.name for upload in pair],
            ids=[upload.id for upload in pair],
            compared=None if compared is None else _comparison_view(compared),
            why_not=why_not,
            together=None if together is None else _together_view(together),
            why_not_together=why_not_together,
        )

    async def _inspected(self, upload: Upload) -> tuple[LoraInspection, FileFamily]:
        if upload.inspected is None:
            found, error = await self._work([upload], partial(_inspect, upload.path))
            if found is None:
                self.uploads.remove(upload)
                assert error is not None
                raise Refusal(422, error.message, error.hint or None)
            upload.inspected = found
        return upload.inspected

    async def _work(self, uploads: "list[Upload]", work: "Callable[[], Any]") -> "tuple[Any, _WhyNot | None]":
        """What it gives, or why it gives nothing, with the files named as their owner does."""
        async with self._turn:
            self.working += 1
            try:
                return await run_in_threadpool(work), None
            except SigmascopeError as error:
                return None, _WhyNot(_as_named(error.message, uploads), _as_named(error.hint or "", uploads))
            finally:
                self.working -= 1


class _WhyNot(NamedTuple):
    """Why files cannot be read, and the next step."""

    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


def _as_named(words: str, uploads: "list[Upload]") -> str:
    for upload in uploads:
        words = words.replace(str(upload.path), upload.name).replace(upload.path.name, upload.name)
    return words


class _Form:
    """A form as it comes: each file goes to the disk, and the rest nowhere."""

    def __init__(self, uploads: Uploads, most: int) -> None:
        self._uploads = uploads
        self._most = most
        self._found: list[Upload] = []
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._name: str | None = None
        self._file: IO[bytes] | None = None
        self._begin = bytearray()
        self._is_over = False

    def callbacks(self) -> Any:
        """For the parser."""
        return {
            "on_header_field": lambda data, start, end: self._grow(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._grow(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_file,
            "on_part_data": lambda data, start, end: self._take(data[start:end]),
            "on_part_end": self._end_file,
            "on_end": self._end,
        }

    def finished(self) -> list[Upload]:
        """The files that came whole.

        Raises:
            Refusal: There is none, or the form ended before its end.
        """
        if not self._is_over:
            raise Refusal(400, "The form ended before its end.", "Send it again.")
        if not self._found:
            raise Refusal(422, "No file was chosen.", "Choose a LoRA, or drop one on the page.")
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Remove what was not taken over by `finished`."""
        if self._file is not None:
            self._file.close()
            with suppress(OSError):
                Path(self._file.name).unlink()
        for upload in self._found:
            upload.path.unlink(missing_ok=True)

    def _end(self) -> None:
        self._is_over = True

    def _grow(self, part: int, data: bytes) -> None:
        self._header[part].extend(data)
        if len(self._header[part]) > _MOST_PART_HEADER:
            raise Refusal(400, "The form cannot be read.", "Send it again.")

    def _end_header(self) -> None:
        field, value = (bytes(part) for part in self._header)
        self._header = (bytearray(), bytearray())
        if field.lower() == b"content-disposition":
            _, options = parse_options_header(value)
            name = options.get(b"filename")
            self._name = None if not name else _file_name(name.decode("utf-8", "replace"))

    def _begin_file(self) -> None:
        if self._name is None:
            return
        if len(self._found) >= self._most:
            raise Refusal(422, "Too many files were sent.", "Two LoRAs are held against each other at most.")
        _, path = self._uploads.new_path()
        self._file, self._begin = path.open("wb"), bytearray()

    def _take(self, data: bytes) -> None:
        if self._file is None:
            return
        if len(self._begin) <= _LENGTH_BYTES:
            self._begin.extend(data[: _LENGTH_BYTES + 1])
            _require_safetensors(bytes(self._begin), str(self._name), is_whole=False)
        self._file.write(data)

    def _end_file(self) -> None:
        file, name = self._file, self._name
        self._file = self._name = None
        if file is not None:
            path = Path(file.name)
            file.close()
            self._found.append(Upload(path.stem, str(name), path))
            _require_safetensors(bytes(self._begin), str(name), is_whole=True)


def _file_name(text: str) -> str:
    """The last part of a name, without the folders that some browsers send."""
    return text.replace("\\", "/").rpartition("/")[2].strip()[:_LONGEST_NAME] or "unnamed"


def _require_safetensors(beginning: bytes, name: str, *, is_whole: bool) -> None:
    """Refuse a file that does not begin with the length of a header and a brace.

    Raises:
        Refusal: It is something else (415).
    """
    is_long = len(beginning) > _LENGTH_BYTES
    length = struct.unpack("<Q", beginning[:_LENGTH_BYTES])[0] if is_long else 0
    is_header = 2 <= length <= _MOST_HEADER_BYTES and beginning[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"
    if is_whole and not beginning:
        raise Refusal(415, f"{name} is empty.", "Download it again, or save it again.")
    if (is_long and not is_header) or (is_whole and not is_long):
        raise Refusal(
            415,
            f"{name} is no safetensors file.",
            "Other files may hold code and are not opened here. Save it as safetensors.",
        )


def _inspect(path: Path) -> tuple[LoraInspection, FileFamily]:
    report = inspect_lora(path)
    with open_lora(path, allow_broken=True) as lora:
        return report, file_family(lora)


def _report_view(upload: Upload, report: LoraInspection, family: FileFamily) -> dict[str, Any]:
    strongest = max((block.norm or 0.0 for block in report.blocks), default=0.0) or 1.0
    training = report.training
    return {
        "id": upload.id,
        "name": upload.name,
        "cards": _cards(report, family),
        "findings": report.findings,
        "hosts": [_host_view(host) for host in report.hosts],
        "has_encoders": any(host.encoders for host in report.hosts),
        "blocks": [
            {
                "name": block.name,
                "modules": block.modules,
                "ranks": UNKNOWN if block.ranks is None else "-".join(map(str, dict.fromkeys(block.ranks))),
                "effective": statistic(block.effective_rank),
                "norm": statistic(block.norm),
                "share": UNKNOWN if block.share is None else f"{100 * block.share:.1f} %",
                "width": 100 * (block.norm or 0.0) / strongest,
            }
            for block in report.blocks
        ],
        "spectrum": _spectrum(report),
        "modules": [
            {
                "name": module.name,
                "kind": module.kind,
                "rank": number(module.rank),
                "effective": statistic(module.effective_rank),
                "norm": statistic(module.norm),
            }
            for module in report.strongest[:_MOST_MODULES]
        ],
        "header": {
            **training.training,
            **({"trigger": training.trigger_phrase} if training.trigger_phrase else {}),
            **(
                {"tags": ", ".join(f"{tag} ({count})" for tag, count in training.tags[:_MOST_ROWS])}
                if training.tags
                else {}
            ),
            **training.modelspec,
            **training.provenance,
        },
    }


def _cards(report: LoraInspection, family: FileFamily) -> list[dict[str, str]]:
    known = "not known" if family.family is None else title_of(family.family)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items())
    ranks = ", ".join(f"{rank} ({count})" for rank, count in list(report.ranks.items())[:3])
    scales = first_few([f"{scale:.3g}" for scale in report.scales], 3)
    return [
        {
            "label": "Family",
            "figure": known,
            "note": family.doubt or f"told from {family.evidence}",
            "tone": "warn" if family.family is None or family.doubt else "",
        },
        {
            "label": "Format",
            "figure": report.format,
            "note": f"{format_size(report.file_bytes)}, {report.parameters:,} parameters, {', '.join(report.dtypes)}",
            "tone": "",
        },
        {
            "label": "Strength ‖ΔW‖",
            "figure": statistic(report.norm),
            "note": f"at strength 1; alpha/rank {scales or UNKNOWN}",
            "tone": "bad" if report.norm == 0.0 else "",
        },
        {
            "label": "Modules",
            "figure": f"{len(report.modules):,}",
            "note": f"{kinds}; rank {ranks or UNKNOWN}",
            "tone": "",
        },
    ]


def _host_view(host: Any) -> dict[str, Any]:
    def taken(part: Any) -> tuple[str, str, float]:
        if part is None or not (part.modules or part.unavailable):
            return "", "", 0.0
        share = 100 * part.taken / part.modules if part.taken is not None and part.modules else 0.0
        return (
            "unknown" if part.taken is None else f"{part.taken:,} of {part.modules:,}",
            strengths_in_words(part),
            share,
        )

    reasons = [reason for part in host.parts for reason in part.unavailable.values()]
    return {
        "host": host.host,
        "denoiser": taken(host),
        "encoders": taken(host.encoders),
        "reasons": "; ".join(dict.fromkeys(reasons)),
    }


def _spectrum(report: LoraInspection) -> dict[str, Any] | None:
    """How much of all changes is in their strongest directions: ‖·‖² of the first k of each module, as a share."""
    spectra = [module.singular_values for module in report.modules if module.singular_values]
    most = max(map(len, spectra), default=0)
    if most < 2:
        return None
    energy = [0.0] * most
    for values in spectra:
        for index, value in enumerate(values):
            energy[index] += value * value
    whole = sum(energy)
    if not whole:
        return None
    shares = [100 * part / whole for part in accumulate(energy)]
    points = " ".join(
        f"{1000 * index / (most - 1):.1f},{100 - 0.96 * share:.2f}" for index, share in enumerate(shares)
    )
    ranks = sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})
    return {
        "most": most,
        "points": points,
        "area": f"0,100 {points} 1000,100",
        "rows": [
            {"rank": rank, "share": f"{shares[rank - 1]:.1f} %", "width": shares[rank - 1]} for rank in ranks
        ],
        "modules": counted(len(spectra), "module"),
    }


def _comparison_view(report: LoraComparison) -> dict[str, Any]:
    words = {
        "same": "Both make the same change.",
        "scaled": f"The second is the first at {statistic(report.factor)} of its strength.",
        "different": "They make different changes.",
    }
    return {
        "verdict": words[report.verdict],
        "tone": {"same": "good", "scaled": "warn", "different": ""}[report.verdict],
        "cosine": statistic(report.cosine),
        "difference": UNKNOWN
        if report.relative_difference is None
        else f"{100 * report.relative_difference:.1f} %",
        "only": [counted(len(names), "module") for names in (report.only_a, report.only_b)],
        "sides": [
            {
                "format": side.format,
                "modules": f"{side.modules:,}",
                "ranks": first_few([f"{rank} ({count})" for rank, count in side.ranks.items()], 3),
                "norm": statistic(side.norm),
            }
            for side in (report.a, report.b)
        ],
        "modules": [
            {
                "name": module.name,
                "cosine": statistic(module.cosine),
                "difference": UNKNOWN
                if module.relative_difference is None
                else f"{100 * module.relative_difference:.1f} %",
                "columns": statistic(module.column_overlap),
            }
            for module in report.most_different[:_MOST_ROWS]
        ],
        "metadata": [
            (field.name, field.a or UNKNOWN, field.b or UNKNOWN) for field in report.metadata[:_MOST_ROWS]
        ],
    }


def _together_view(report: LorasTogether) -> dict[str, Any]:
    total, shared = report.total, report.shared

    def percent_of(value: float | None) -> str:
        return UNKNOWN if value is None else percent_change(value)

    largest = max((module.sum_norm or 0.0 for module in shared), default=0.0) or 1.0
    return {
        "interference": percent_of(total.interference),
        "sum": statistic(total.sum_norm),
        "unrelated": statistic(total.unrelated_norm),
        "norms": [statistic(norm) for norm in total.norms],
        "shared": f"{len(shared):,} of {len(report.modules):,}",
        "modules": [
            {
                "name": module.name,
                "norms": " + ".join(map(statistic, module.norms)),
                "sum": statistic(module.sum_norm),
                "unrelated": statistic(module.unrelated_norm),
                "interference": percent_of(module.interference),
                "width": 100 * (module.sum_norm or 0.0) / largest,
            }
            for module in shared[:_MOST_ROWS]
        ],
        "unknown": counted(sum(module.unavailable is not None for module in report.modules), "module"),
    }
