"""The model and the LoRA that the page serves, and what clients ask of them.

Both are loaded once, then run for one request after another. Base and LoRA result of a picture are each made once and
kept. `timings` is what a run took, as the page's table shows it: made from the record and nothing else.

A request is the body of `POST /api/jobs`, checked before anything waits in line (`Wish`). Uploaded pictures are decoded
with care, and kept in memory under a name that only their own content gives; `Recent` forgets the longest unused first.
"""

import hashlib
import io
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import torch
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sigmascope.checkpoints.hub import model_name
from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.lbm.devices import resolve_device, resolve_dtype
from sigmascope.lbm.images import (
    DECODER_ERRORS,
    Size,
    check_resolution,
    open_picture,
    parse_size,
    to_rgb,
    working_size,
)
from sigmascope.lbm.infer import SEEDS, check_tile_size, translate_image
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lora.apply import AttachedLora, attach_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.reader import load_lora
from sigmascope.monitor import Recorder
from sigmascope.pipeline.model_state import free_memory
from sigmascope.probes.reading import error_text, is_out_of_memory
from sigmascope.progress import Progress, no_progress
from sigmascope.records.memory import mib
from sigmascope.records.run import Run
from sigmascope.records.serialization import run_to_json
from sigmascope.ui.security import LORA_SCALES, Limits, Refusal
from sigmascope.units import MIB

POCKET_RANK: Final = 8
"""Of the LoRA that is extracted from the pocket models."""
POCKET_RESOLUTION: Final = 256
"""At which the pocket model works on a picture of the user's. It knows 128, where a photograph has no detail."""
SAMPLES_PER_SECOND: Final = 10.0
"""How often memory is looked at between the steps."""
Report = Callable[[str, int, int], None]
"""(what is made: "base" or "result", steps done, steps in all); may raise, which ends the work."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to serve.

    Attributes:
        base_model_path: LBM checkpoint; None with `pocket`.
        lora_path: LoRA of any format; None serves the base alone.
        config_path: The model's YAML; None looks beside the checkpoint.
        pocket: Serve the model that ships with the package, with a LoRA extracted here and now.
        torch_dtype: Name of a dtype.
        device: Name of a device, or "auto".
        tile_size: Run the VAE in tiles of this many pixels.
        resolution: Side of the square bucket; None is the config's.
    """

    base_model_path: Path | None = None
    lora_path: Path | None = None
    config_path: Path | None = None
    pocket: bool = False
    torch_dtype: str = "float32"
    device: str = "auto"
    tile_size: int | None = None
    resolution: int | None = None

    def check(self) -> None:
        """Refuse what cannot work, before minutes are spent on loading.

        Raises:
            ConfigError: Names the flags.
        """
        named = {
            "--base_model_path": self.base_model_path,
            "--lora_path": self.lora_path,
            "--config_path": self.config_path,
        }
        given = [flag for flag, path in named.items() if path is not None]
        if self.pocket and given:
            raise ConfigError(
                f"--pocket brings its own model, so {' and '.join(given)} would have no effect.",
                hint="Leave out one of the two.",
            )
        if not self.pocket and self.base_model_path is None:
            raise ConfigError(
                "There is no model to serve.", hint="Name one with --base_model_path, or try --pocket."
            )
        check_resolution(self.resolution, "bucket")
        resolve_dtype(self.torch_dtype)
        resolve_device(self.device)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model in memory, ready to translate. `lora` is attached and its scale may be set."""

    model: LbmModel
    base_name: str
    resolution: int
    lora: AttachedLora | None = None
    lora_name: str | None = None
    lora_ranks: tuple[int, ...] = ()
    tile_size: int | None = None
    load_seconds: float = 0.0
    pocket: bool = False

    def facts(self) -> dict[str, Any]:
        """What the page says of it."""
        weight = next(self.model.denoiser.parameters())
        return {
            "model": self.base_name,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": str(weight.device),
            "resolution": self.resolution,
            "load_seconds": self.load_seconds,
            "lora": self.lora_name,
            "lora_modules": 0 if self.lora is None else len(self.lora.applied),
            "lora_ranks": list(self.lora_ranks),
            "pocket": self.pocket,
        }


def load_served(options: ModelOptions, *, progress: Progress = no_progress) -> ServedModel:
    """Load model and LoRA.

    Raises:
        ConfigError: An option makes no sense, or the model needs more than a source picture.
        SigmascopeError: A file cannot be read, or LoRA and model do not belong together.
    """
    options.check()
    started = time.perf_counter()
    base = BASE_PATH if options.pocket else options.base_model_path
    assert base is not None  # checked
    model = load_lbm(
        base,
        CONFIG_PATH if options.pocket else options.config_path,
        dtype=resolve_dtype(options.torch_dtype),
        device=resolve_device(options.device),
        progress=progress,
    ).requires_grad_(False)
    if keys := model.config.conditioning_keys:
        raise ConfigError(
            f"--base_model_path: {base} needs more than a source picture ({', '.join(keys)}).",
            hint="Run it with sigmascope lbm infer and --conditioning.",
        )
    check_tile_size(options.tile_size, model)
    lora: LoraFile | None = None
    lora_name: str | None = None
    if options.pocket:
        lora_name = f"cool light, extracted at rank {POCKET_RANK}"
        with tempfile.TemporaryDirectory(prefix="sigmascope-") as folder:
            path = Path(folder) / "pocket_lora.safetensors"
            ranks = ExtractOptions(rank=POCKET_RANK, conv_rank=POCKET_RANK)
            extract_lora(BASE_PATH, TUNED_PATH, path, ranks)
            lora = load_lora(path)
    elif options.lora_path is not None:
        lora_name, lora = options.lora_path.name, load_lora(options.lora_path)
    return ServedModel(
        model,
        base_name="pocket model" if options.pocket else model_name(base),
        resolution=options.resolution or (POCKET_RESOLUTION if options.pocket else model.config.resolution),
        lora=None if lora is None else attach_lora(model, lora),
        lora_name=lora_name,
        lora_ranks=() if lora is None else tuple(sorted(lora.ranks)),
        tile_size=options.tile_size,
        load_seconds=time.perf_counter() - started,
        pocket=options.pocket,
    )


@dataclass(frozen=True, slots=True)
class Made:
    """A picture that was made, with the record of making it."""

    id: str
    scale: float
    png: bytes
    run_json: bytes
    timings: dict[str, Any]

    def summary(self, *, kept: bool) -> dict[str, Any]:
        """What the page is told; picture and record are fetched by the id. `kept`: it was made before."""
        return {"id": self.id, "scale": self.scale, "kept": kept, "timings": self.timings}


Value = TypeVar("Value")


class Recent(Generic[Value]):
    """A mapping of bounded size that several threads may use.

    The newest value is always kept, whatever its size: what was just made must be there to be fetched.

    Args:
        limit_bytes: Of all values together.

    Examples:
        >>> kept = Recent[str](limit_bytes=2)
        >>> for key in "abc":
        ...     kept.put(key, key.upper(), size_bytes=1)
        >>> kept.get("a"), kept.get("c")
        (None, 'C')
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._values: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._total_bytes = 0
        self._lock = threading.Lock()

    def put(self, key: str, value: Value, size_bytes: int) -> None:
        """Keep a value under a key, in place of the one that was there."""
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._values[key] = (value, size_bytes)
            self._total_bytes += size_bytes - before
            while self._total_bytes > self._limit_bytes and len(self._values) > 1:
                _, (_, freed) = self._values.popitem(last=False)
                self._total_bytes -= freed

    def get(self, key: str) -> Value | None:
        """The value, now the most recently used; None if it is not kept or no longer."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def __len__(self) -> int:
        return len(self._values)


Scale = Annotated[float, Field(ge=LORA_SCALES[0], le=LORA_SCALES[1], allow_inf_nan=False)]


class Wish(BaseModel):
    """One request.

    Attributes:
        picture: Id of an uploaded picture.
        client: Whoever asks; a newer request of the same client replaces its waiting one.
        scale: Strength of the LoRA.
        steps: Of the bridge.
        seed: Of the noise between steps.
        size: "bucket", "keep" or WIDTHxHEIGHT.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    picture: str = Field(max_length=64)
    client: str = Field(min_length=1, max_length=64)
    scale: Scale = 1.0
    steps: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0, lt=SEEDS)
    size: str = Field(default="bucket", max_length=32)

    def result_id(self, scale: float) -> str:
        """The name under which a result is kept: of all that it depends on."""
        key = f"{self.picture}/{self.steps}/{self.seed}/{self.size}/{scale!r}"
        return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture to work on: upright RGB, as PNG too, and the id under which it is asked for."""

    id: str
    image: Image.Image
    png: bytes

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return self.image.width * self.image.height * 3 + len(self.png)


class Translator:
    """Makes base and result for one request after another. Not for several threads at once.

    At scale 0 a LoRA changes nothing, to the bit, so the base's picture is the one at scale 0.

    Args:
        served: Model and LoRA.
        kept: Where results stay for those who ask again or fetch them.
    """

    def __init__(self, served: ServedModel, kept: Recent[Made]) -> None:
        self._served = served
        self._kept = kept

    def translate(self, picture: Picture, wish: Wish, report: Report) -> dict[str, Any]:
        """Make what is asked for, and nothing that is still kept.

        Returns:
            `base` and `result` (None without a LoRA), as `Made.summary` gives them, and `dormant_modules`:
            how many of the LoRA's modules never ran.

        Raises:
            SigmascopeError: The request does not fit into memory, or the result holds NaN.
        """
        lora = self._served.lora
        return {
            "base": self._once(picture, wish, 0.0, "base", report),
            "result": None if lora is None else self._once(picture, wish, wish.scale, "result", report),
            "dormant_modules": 0 if lora is None else len(lora.dormant),
        }

    def _once(self, picture: Picture, wish: Wish, scale: float, what: str, report: Report) -> dict[str, Any]:
        if (made := self._kept.get(wish.result_id(scale))) is not None:
            return made.summary(kept=True)
        report(what, 0, wish.steps)
        try:
            made = self._make(picture, wish, scale, lambda done, total, _: report(what, done, total))
        except Exception as error:
            if isinstance(error, SigmascopeError) or not is_out_of_memory(error):
                raise
            raise _out_of_memory(
                error_text(error).splitlines()[0]
            ) from None  # the traceback would keep the tensors alive
        self._kept.put(made.id, made, len(made.png) + len(made.run_json))
        return made.summary(kept=False)

    def _make(
        self, picture: Picture, wish: Wish, scale: float, progress: Callable[[int, int, str], None]
    ) -> Made:
        served = self._served
        recorder = Recorder(name="lbm serve", sample_hz=SAMPLES_PER_SECOND)
        recorder.fact("base_model", served.base_name)
        with recorder:
            if served.lora is not None:
                with recorder.stage("lora_application") as stage:
                    served.lora.scale = scale
                    stage.fact("lora", served.lora_name)
                    stage.fact("scale", scale)
                    stage.fact("mode", "hot")
                    stage.fact("applied_modules", len(served.lora.applied))
            result = translate_image(
                served.model,
                picture.image,
                num_inference_steps=wish.steps,
                seed=wish.seed,
                size=wished_size(wish),
                resolution=served.resolution if wish.size == "bucket" else None,
                tile_size=served.tile_size,
                progress=progress,
            )
        run = recorder.run()
        return Made(wish.result_id(scale), scale, as_png(result), run_to_json(run).encode(), timings(run))


def _out_of_memory(words: str) -> SigmascopeError:
    accelerator = torch.accelerator.current_accelerator()
    free_memory(*([] if accelerator is None else [accelerator]))
    return SigmascopeError(
        f"The request does not fit into memory ({words}).",
        hint="Choose a smaller size, or start the server with --tile_size 512.",
    )


def timings(run: Run) -> dict[str, Any]:
    """Seconds, steps and memory peaks of a run and its stages.

    Returns:
        `seconds`, `peak_rss_mib`, `peak_gpu_mib`, and `stages`, each with `name`, `seconds`, `steps` (seconds
        each) and its own two peaks. None where a peak is not known, as of a GPU where there is none.
    """
    peak = run.peak()
    device = peak.busiest_device()
    stages = []
    for stage in run.stages:
        host = None if stage.peak is None else stage.peak.rss_bytes
        on_device = None
        if stage.peak is not None and device is not None:
            on_device = stage.peak.accelerator(device).allocated_bytes
        stages.append(
            {
                "name": stage.name,
                "seconds": stage.seconds,
                "steps": list(stage.steps.seconds),
                "peak_rss_mib": mib(host),
                "peak_gpu_mib": mib(on_device),
            }
        )
    return {
        "seconds": run.seconds,
        "peak_rss_mib": mib(peak.rss_bytes),
        "peak_gpu_mib": None if device is None else mib(peak.accelerator(device).allocated_bytes),
        "stages": stages,
    }


FORMATS: Final = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
"""What is decoded. Not every format that Pillow knows: its EPS reader, for one, starts Ghostscript."""
FORMATS_IN_WORDS: Final = "PNG, JPEG, WebP, TIFF, BMP or GIF"
"""These, in a message."""


def read_wish(body: bytes, limits: Limits) -> Wish:
    """Read a request's JSON.

    Raises:
        Refusal: It is not JSON (400), or a value is missing, of the wrong type or out of range (422).
    """
    try:
        wish = Wish.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise Refusal(400, f"The request is not JSON: {first['msg']}.", "Send an object.") from error
        where = ".".join(map(str, first["loc"])) or "request"
        raise Refusal(422, f"{where}: {first['msg']}.", "Change this value.") from error
    if wish.steps > limits.steps:
        raise Refusal(422, f"steps: expected 1 to {limits.steps}, got {wish.steps}.", "LBM needs 1 to 4.")
    wished_size(wish)
    return wish


def wished_size(wish: Wish) -> str | Size:
    """The size as `translate_image` takes it.

    Raises:
        Refusal: It is not a size.
    """
    try:
        return parse_size(wish.size)
    except ConfigError as error:
        raise Refusal(
            422, f"size: expected bucket, keep, or WIDTHxHEIGHT such as 768x512, got {wish.size!r}."
        ) from error


def check_working_size(wish: Wish, picture: Size, *, resolution: int, factor: int, limits: Limits) -> None:
    """Refuse a size that the model would need more memory for than a machine has.

    Raises:
        Refusal: It is too large.
    """
    width, height = working_size(*picture, wished_size(wish), resolution=resolution, factor=factor)
    if width * height > limits.working_pixels:
        raise Refusal(
            422,
            f"size: the model would work at {width}×{height}, which is more than "
            f"{limits.working_pixels / 1e6:.1f} megapixels.",
            "Take the nearest bucket, or a smaller size.",
        )


class Pictures:
    """The pictures that were uploaded lately."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept = Recent[Picture](limits.kept_pictures_bytes)

    def add(self, data: bytes) -> Picture:
        """Decode an uploaded file and keep it. The same bytes give the same id.

        Raises:
            Refusal: It is empty, not a picture, damaged (415), or too large when decoded (413).
        """
        picture_id = hashlib.sha256(data).hexdigest()
        return self._kept.get(picture_id) or self._keep(picture_id, decode(data, self._limits))

    def add_image(self, image: Image.Image) -> Picture:
        """Keep a picture that was made here."""
        picture_id = hashlib.sha256(image.tobytes()).hexdigest()
        return self._kept.get(picture_id) or self._keep(picture_id, image.convert("RGB"))

    def get(self, picture_id: str) -> Picture:
        """The picture of that id.

        Raises:
            Refusal: It is not kept, or no longer (404).
        """
        picture = self._kept.get(picture_id)
        if picture is None:
            raise Refusal(404, "This picture is no longer kept.", "Choose it again.")
        return picture

    def _keep(self, picture_id: str, image: Image.Image) -> Picture:
        picture = Picture(picture_id, image, as_png(image))
        self._kept.put(picture.id, picture, picture.size_bytes)
        return picture


def decode(data: bytes, limits: Limits) -> Image.Image:
    """Read the bytes of a picture as upright 8-bit RGB, as `load_image` reads a file.

    Raises:
        Refusal: It is empty, not a picture, damaged (415), or too large when decoded (413).
    """
    if not data:
        raise Refusal(415, "The file is empty.", f"Choose a picture ({FORMATS_IN_WORDS}).")
    try:
        with open_picture(io.BytesIO(data), FORMATS) as image:
            if image.width * image.height > limits.picture_pixels:
                raise _too_many_pixels(limits, f" ({image.width}×{image.height})")
            image.load()
            return to_rgb(image)
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(limits) from error
    except UnidentifiedImageError as error:
        raise Refusal(
            415, "This is not a readable picture.", f"Choose a picture as {FORMATS_IN_WORDS}."
        ) from error
    except DECODER_ERRORS as error:
        raise Refusal(
            415, "The picture is damaged and cannot be decoded.", "Save or fetch it again."
        ) from error


def _too_many_pixels(limits: Limits, size: str = "") -> Refusal:
    return Refusal(
        413,
        f"The picture{size} has more than {limits.picture_pixels / 1e6:g} megapixels.",
        "Scale it down first.",
    )


def too_many_bytes(limits: Limits) -> Refusal:
    """The refusal of an upload that is larger than allowed."""
    return Refusal(
        413, f"The file is larger than {limits.upload_bytes / MIB:g} MiB.", "Scale the picture down first."
    )


def as_png(image: Image.Image) -> bytes:
    """The picture as PNG; compressed lightly, because somebody waits for it."""
    written = io.BytesIO()
    image.save(written, format="PNG", compress_level=1)
    return written.getvalue()
