"""Where the GPU's memory runs out, each command gives its own message, or goes on in tiles."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import save_file
from tests.gpu.memory import MIB, capped
from tests.lbm.conftest import TINY

from sigmascope.cli.root import run as run_cli
from sigmascope.errors import SigmascopeError
from sigmascope.lbm.config import parse_config
from sigmascope.lbm.model import build_lbm
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.pipeline.encode_decode import decode_latents
from sigmascope.ui.lbm_model import Picture, Recent, ServedModel, Translator, Wish

pytestmark = pytest.mark.gpu


def test_an_extraction_names_the_layer_and_a_way_out(cuda: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4096, 4096)
    paths = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    change = torch.randn(4096, 4096) * 0.01
    for path, value in zip(paths, (weight, weight + change), strict=True):
        save_file({"denoiser.conv_in.weight": value}, path)
    options = ExtractOptions(rank=32, device=str(cuda), workers=1)
    lora = tmp_path / "lora.safetensors"
    with capped(cuda, 48 * MIB), pytest.raises(SigmascopeError) as caught:
        extract_lora(*paths, lora, options)
    assert "denoiser.conv_in: there is no memory left" in str(caught.value)
    assert "--device cpu" in str(caught.value.hint)
    assert not lora.exists()
    assert extract_lora(*paths, lora, options).total_lora_modules == 1  # the same process goes on


def test_statistics_say_what_takes_less(
    cuda: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    config = parse_config(TINY)
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    save_file(build_lbm(config).state_dict(), tmp_path / "lbm.safetensors")
    monkeypatch.chdir(tmp_path)
    command = "sigmascope lora statistics lbm.safetensors --noise 1 --size 1024x1024 --save_to s.safetensors"
    monkeypatch.setattr("sys.argv", [*command.split(), "--device", str(cuda)])
    with capped(cuda, 192 * MIB), pytest.raises(SystemExit) as ended:
        run_cli()
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2, told
    assert "the model with its gradients does not fit into memory" in told
    assert "--gradient_checkpointing" in told
    assert not (tmp_path / "s.safetensors").exists()


def test_a_served_model_says_so_and_serves_the_next_request(cuda: torch.device) -> None:
    torch.manual_seed(0)
    model = build_lbm(parse_config(TINY)).eval().requires_grad_(False).to(cuda)
    translator = Translator(ServedModel(model, base_name="tiny", resolution=64), Recent(limit_bytes=10**7))
    large, small = (
        Picture(str(side), Image.effect_mandelbrot((side, side), (-2, -1, 1, 1), 60).convert("RGB"), png=b"")
        for side in (2048, 64)
    )

    def silent(what: str, done: int, total: int) -> None:
        """Nobody listens."""

    with capped(cuda, 192 * MIB):
        with pytest.raises(SigmascopeError, match="does not fit into memory") as caught:
            translator.translate(large, Wish(picture="2048", client="c", size="keep"), silent)
        assert "--tile_size" in str(caught.value.hint)
        made = translator.translate(small, Wish(picture="64", client="c", size="keep"), silent)
    assert made["base"]["id"]


def test_a_decoding_goes_on_in_tiles(cuda: torch.device) -> None:
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(
        block_out_channels=(64, 64), layers_per_block=1, mid_block_add_attention=False, **blocks
    )
    vae = vae.eval().to(cuda)
    side = 768
    latent = torch.randn(1, 4, side, side, device=cuda)
    picture, record = decode_latents(vae, latent[..., :32, :32], strategies="direct", predict=False)
    with capped(cuda, 640 * MIB):
        picture, record = decode_latents(
            vae, latent, strategies=("direct", "tiled"), tile=256, predict=False, output_device="cpu"
        )
    assert [(attempt.name, attempt.outcome) for attempt in record.attempts] == [
        ("direct", "failed"),
        ("tiled", "succeeded"),
    ]
    assert picture.shape == (1, 3, 2 * side, 2 * side)
    assert bool(picture.isfinite().all())
