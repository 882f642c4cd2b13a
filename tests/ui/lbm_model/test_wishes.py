import json

import pytest

from sigmascope.ui.lbm_model import check_working_size, read_wish, wished_size
from sigmascope.ui.security import Limits, Refusal

GOOD = {"picture": "p", "client": "c"}


def test_the_defaults_are_those_of_infer() -> None:
    wish = read_wish(json.dumps(GOOD).encode(), Limits())
    assert (wish.scale, wish.steps, wish.size) == (1.0, 1, "bucket")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 422, "request:"),
        (json.dumps({"client": "c"}).encode(), 422, "picture: Field required"),
        (json.dumps({**GOOD, "scale": 2.01}).encode(), 422, "scale: Input should be less than or equal to 2"),
        (json.dumps({**GOOD, "scale": -0.1}).encode(), 422, "scale:"),
        (json.dumps({**GOOD, "scale": float("nan")}).encode(), 422, "scale:"),
        (json.dumps({**GOOD, "steps": 0}).encode(), 422, "steps:"),
        (json.dumps({**GOOD, "steps": 101}).encode(), 422, "steps: expected 1 to 100, got 101"),
        (json.dumps({**GOOD, "steps": 1.5}).encode(), 422, "steps:"),
        (json.dumps({**GOOD, "seed": 2**63}).encode(), 422, "seed:"),
        (json.dumps({**GOOD, "scale": True}).encode(), 422, "scale:"),
        (json.dumps({**GOOD, "scale": "1"}).encode(), 422, "scale:"),
        (json.dumps({**GOOD, "size": "huge"}).encode(), 422, "size: expected bucket, keep"),
        (json.dumps({**GOOD, "size": "0x8"}).encode(), 422, "size: expected bucket, keep"),
        (json.dumps({**GOOD, "sacle": 1}).encode(), 422, "sacle:"),
        (json.dumps({**GOOD, "client": ""}).encode(), 422, "client:"),
    ],
)
def test_a_wish_that_makes_no_sense_is_named(body: bytes, status: int, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_wish(body, Limits())
    assert caught.value.status == status
    assert message in caught.value.message


@pytest.mark.parametrize(("size", "expected"), [("keep", "keep"), ("bucket", "bucket"), ("96x64", (96, 64))])
def test_sizes_are_read(size: str, expected: object) -> None:
    assert wished_size(read_wish(json.dumps({**GOOD, "size": size}).encode(), Limits())) == expected


@pytest.mark.parametrize(
    ("size", "fits"), [("bucket", True), ("keep", False), ("4096x4096", False), ("2048x2048", True)]
)
def test_a_size_that_no_memory_holds_is_refused(size: str, fits: bool) -> None:
    wish = read_wish(json.dumps({**GOOD, "size": size}).encode(), Limits())
    if fits:
        check_working_size(wish, (6000, 4000), resolution=1024, factor=32, limits=Limits())
        return
    with pytest.raises(Refusal, match="megapixels"):
        check_working_size(wish, (6000, 4000), resolution=1024, factor=32, limits=Limits())


def test_everything_that_changes_the_picture_is_in_its_key_and_the_client_is_not() -> None:
    def key(**changes: object) -> str:
        return read_wish(json.dumps({**GOOD, **changes}).encode(), Limits()).result_id(0.5)

    assert key(client="other") == key()
    assert len({key(), key(picture="q"), key(steps=2), key(seed=1), key(size="keep")}) == 5
