"""`sigmascope lora plan`: error against size, and pictures of some sizes."""

import json
import shlex
from functools import cache, partial
from pathlib import Path

import pytest
from PIL import Image
from tests.cli.lora.conftest import Run

from sigmascope.lbm.pocket import BASE_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.lora.size_plan import plan_lora


@pytest.fixture
def plan(sigmascope: Run) -> Run:
    return partial(sigmascope, "lora", "plan")


@pytest.mark.slow
def test_the_table_ends_with_a_command_that_makes_what_was_planned(
    plan: Run, sigmascope: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = cache(partial(plan_lora, BASE_PATH, TUNED_PATH))  # once for table and JSON
    monkeypatch.setattr(
        "sigmascope.lora.size_plan.plan_lora",
        lambda base, tuned, options, *, most_rank, progress: planned(options, most_rank=most_rank),
    )
    flags = [
        "--max_rank",
        4,  # at the knee no layer wants more than twice as much, of which a plan would know nothing
        "--exclude",
        "conv_in|conv_out",
        "--save_precision",
        "bf16",
        "--parts",
        "denoiser",
    ]
    code, out, err = plan(BASE_PATH, TUNED_PATH, *flags, "--picture", "plan.svg")
    assert code == 0, err
    assert "Layers that changed  131" in out  # 133 without the two
    assert "knee: " in Path("plan.svg").read_text(encoding="utf-8")
    told = json.loads(plan(BASE_PATH, TUNED_PATH, *flags, "--json")[1])
    assert [one["rank"] for one in told["fixed"]] == [1, 2, 4]
    assert told["tried"] == []
    command = next(line for line in out.splitlines() if line.startswith("Next: sigmascope "))
    code, made, err = sigmascope(*shlex.split(command)[2:], "--json")
    assert code == 0, err
    report, knee = json.loads(made), told["knee"]
    assert report["options"]["save_precision"] == "bf16"
    assert abs(report["total_lora_modules"] - knee["layers"]) <= 2  # the size is rounded up to whole KB
    assert report["weighted_error"] == pytest.approx(knee["weighted_error"], rel=0.02)
    assert 0.95 * knee["bytes"] < Path("my_lora.safetensors").stat().st_size <= knee["bytes"] + 1024


@pytest.mark.slow
def test_more_bytes_are_nearer_to_the_tuned_model_s_pictures(plan: Run) -> None:
    Path("scenes").mkdir()
    for seed in (101, 102):
        Image.fromarray(relighting_pair(seed, COOL)[0]).save(f"scenes/{seed}.png")
    code, out, err = plan(
        BASE_PATH, TUNED_PATH, "--max_rank", 2, "--try", "300KB,3MB", "--images", "scenes", "--json"
    )
    assert code == 0, err
    small, large = json.loads(out)["tried"]
    assert (small["max_bytes"], large["max_bytes"]) == (300 * 1024, 3 * 1024**2)
    assert large["psnr"] > small["psnr"] + 5
    assert large["remaining"] < small["remaining"] < 1
    code, out, _ = plan(BASE_PATH, TUNED_PATH, "--max_rank", 2, "--try", "300KB", "--images", "scenes")
    assert f"{small['psnr']:.1f} dB" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--try", "1MB"], "--try needs pictures to measure"),
        (["--images", "."], "--images is for --try"),
        (["--try", "lots", "--images", "."], "--try lots is not a size"),
        (["--try", "1MB", "--images", "nowhere"], "nowhere"),
        (["--picture", "plan.gif"], "is not SVG or PNG"),
        (["--max_rank", "0"], "--max_rank 0"),
        (["--seed", "3"], "--seed is for --images only"),
        (["--exclude", "no_such_layer"], "no_such_layer"),
        (["--statistics", "gone.safetensors"], "gone.safetensors"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(plan: Run, flags: list[str], message: str) -> None:
    code, _, err = plan(BASE_PATH, TUNED_PATH, *flags)
    assert code == (
        1 if "gone" in message else 2
    )  # a file that cannot be read, a command that makes no sense
    assert message in err
