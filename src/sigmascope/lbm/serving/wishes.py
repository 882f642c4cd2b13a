"""What a client asks for: the body of `POST /api/jobs`, checked before it may wait in line."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sigmascope.errors import ConfigError
from sigmascope.lbm.buckets import Size, parse_size, working_size
from sigmascope.lbm.infer import SEEDS
from sigmascope.lbm.serving.limits import LORA_SCALES, Limits
from sigmascope.lbm.serving.refusals import Refusal

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

    def key(self, scale: float) -> str:
        """What a result depends on, and so the name under which it is kept."""
        return f"{self.picture}/{self.steps}/{self.seed}/{self.size}/{scale!r}"


def read_wish(body: bytes, limits: Limits) -> Wish:
    """Read a request's JSON.

    Raises:
        Refusal: It is not JSON (400), or a value is missing, of the wrong type or out of range (422).
    """
    try:
        wish = Wish.model_validate_json(body)
    except ValidationError as error:
        raise _as_refusal(error) from error
    if wish.steps > limits.steps:
        raise Refusal(422, f"steps: expected 1 to {limits.steps}, got {wish.steps}.", "LBM needs 1 to 4.")
    wished_size(wish)
    return wish


def wished_size(wish: Wish) -> str | Size:
    """The size as `translate_image` takes it.

    Raises:
        Refusal: It is none.
    """
    try:
        return parse_size(wish.size)
    except ConfigError as error:
        raise Refusal(
            422, f"size: expected bucket, keep, or WIDTHxHEIGHT such as 768x512, got {wish.size!r}."
        ) from error


def check_working_size(wish: Wish, picture: Size, *, resolution: int, factor: int, limits: Limits) -> None:
    """Refuse a size that the model would need more memory for than a machine has.

    Args:
        wish: What is asked for.
        picture: Its width and height.
        resolution: Side of the square bucket.
        factor: The config's.
        limits: How much is too much.

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


def _as_refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"The request is not JSON: {first['msg']}.", "Send an object.")
    where = ".".join(map(str, first["loc"])) or "request"
    return Refusal(422, f"{where}: {first['msg']}.", "Change this value.")
