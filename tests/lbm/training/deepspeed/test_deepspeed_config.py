"""What DeepSpeed is told, what is refused before it is asked, and how its engine is driven; it need not be installed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tests.lbm.training.small_run import SmallRun
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.lbm.training.accelerate import EngineBackend, accelerated
from sigmascope.lbm.training.distributed import EngineOptimizer, check_deepspeed, deepspeed_plugin

ZERO = {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of `accelerate launch --use_deepspeed`, of two processes."""
    for name in ("CONFIG_FILE", "ZERO_STAGE", "OFFLOAD_OPTIMIZER_DEVICE"):
        monkeypatch.delenv(f"ACCELERATE_DEEPSPEED_{name}", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return monkeypatch


def with_file(launched: pytest.MonkeyPatch, folder: Path, config: Mapping[str, Any]) -> None:
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    launched.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))


def test_without_the_launcher_asking_there_is_none(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    assert deepspeed_plugin(small_run.settings()) is None


def test_the_yaml_decides_and_the_flags_of_the_launcher_do_the_rest(
    small_run: SmallRun, launched: pytest.MonkeyPatch
) -> None:
    launched.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    launched.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    launched.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    settings = small_run.settings(gradient_accumulation_steps=3, max_grad_norm=0.25, mixed_precision="bf16")
    plugin = deepspeed_plugin(settings)
    assert plugin is not None
    config = plugin.deepspeed_config
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.25
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["train_batch_size"] == "auto"
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["zero_optimization"]["stage"] == 1
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["bf16"] == {"enabled": False}
    assert config["torch_autocast"]["enabled"] is True
    assert config["torch_autocast"]["lower_precision_safe_modules"] == []


def test_a_file_keeps_what_the_yaml_does_not_decide(
    small_run: SmallRun, launched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    auto = dict.fromkeys(("train_batch_size", "gradient_clipping", "train_micro_batch_size_per_gpu"), "auto")
    file = {**auto, "zero_optimization": ZERO, "bf16": {"enabled": "auto"}, "prescale_gradients": True}
    with_file(launched, tmp_path, file)
    plugin = deepspeed_plugin(small_run.settings(gradient_accumulation_steps=2, max_grad_norm=None))
    assert plugin is not None
    config = plugin.deepspeed_config
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert config["prescale_gradients"] is True
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.0
    assert plugin.zero_stage == 2


def test_a_file_that_agrees_with_the_yaml_is_taken(
    small_run: SmallRun, launched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {"gradient_clipping": 1, "train_batch_size": 4, "bf16": {"enabled": True}}
    with_file(launched, tmp_path, {"zero_optimization": ZERO, **said})
    assert deepspeed_plugin(small_run.settings(mixed_precision="bf16")) is not None


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("gradient_accumulation_steps", {"gradient_accumulation_steps": 2}),
        ("gradient_clipping", {"gradient_clipping": 0.5}),
        ("train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": 8}),
        ("train_batch_size", {"train_batch_size": 2}),
        ("bf16.enabled", {"bf16": {"enabled": True}}),
        ("fp16.enabled", {"fp16": {"enabled": True}}),
        ("torch_autocast.enabled", {"torch_autocast": {"enabled": True}}),
        ("zero_force_ds_cpu_optimizer", {"zero_force_ds_cpu_optimizer": True}),
        ("optimizer", {"optimizer": {"type": "AdamW"}}),
        ("scheduler", {"scheduler": {"type": "WarmupLR"}}),
        ("zero_optimization.stage 3", {"zero_optimization": {"stage": 3}}),
    ],
)
def test_a_file_that_contradicts_the_yaml_is_refused_by_its_key(
    small_run: SmallRun, launched: pytest.MonkeyPatch, tmp_path: Path, key: str, said: dict[str, Any]
) -> None:
    with_file(launched, tmp_path, {"zero_optimization": ZERO, **said})
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        deepspeed_plugin(small_run.settings())


@pytest.mark.parametrize(
    ("content", "message"), [("{", "Expecting|refused"), ('{"bf16": {}}', "specify the ZeRO optimization")]
)
def test_a_file_that_is_none_is_an_error(
    small_run: SmallRun, launched: pytest.MonkeyPatch, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(content, encoding="utf-8")
    launched.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    with pytest.raises(ConfigError, match=rf"DeepSpeed's configuration is refused .*({message})"):
        deepspeed_plugin(small_run.settings())


@pytest.mark.parametrize(
    ("stage", "keys", "message"),
    [
        (3, {}, r"stage 3 shards the weights .* --fsdp_version 2"),
        (1, {"optimizer": "Adafactor"}, r"optimizer: Adafactor .* AdamW"),
        (
            1,
            {"device": "auto", "mixed_precision": "fp16"},
            "mixed_precision: fp16 does not work with DeepSpeed",
        ),
    ],
)
def test_what_training_has_not_is_refused(
    small_run: SmallRun, stage: int, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_deepspeed({}, stage, small_run.settings(**keys), processes=2)


def test_any_optimizer_goes_with_stage_0(small_run: SmallRun) -> None:
    check_deepspeed({}, 0, small_run.settings(optimizer="Adafactor"), processes=2)


def test_asked_for_where_it_cannot_be_had_it_is_an_error(
    small_run: SmallRun, launched: pytest.MonkeyPatch
) -> None:
    """Where DeepSpeed is installed, because the CPU is asked for."""
    launched.setenv("WORLD_SIZE", "1")
    with (
        pytest.raises(
            ConfigError, match=r"DeepSpeed is not installed|device: Accelerate has no DeepSpeed on cpu"
        ),
        accelerated(small_run.settings()),
    ):
        pass


class FakeEngine:
    """Notes what is asked of it; its model has gradients of norm 5, and its piece of ZeRO says another norm."""

    def __init__(self, stage: int, norm: float = 5.0) -> None:
        self.stage = stage
        self.norm = norm
        self.optimizer = self
        self.module = nn.Linear(2, 1, bias=False)
        self.module.weight.grad = torch.tensor([[3.0, 4.0]])
        self.boundaries: list[bool] = []
        self.steps = 0

    def zero_optimization_stage(self) -> int:
        return self.stage

    def scaled_global_norm(self) -> Tensor:
        return torch.tensor(self.norm)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundaries.append(is_boundary)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.steps += 1


@pytest.fixture
def accelerator(small_run: SmallRun) -> Iterator[Accelerator]:
    """Of one process on the CPU, at the last batch of a step."""
    with accelerated(small_run.settings()) as made:
        yield made


def test_the_engine_hears_of_the_last_batch_and_makes_no_step_before_it_is_told_to(
    accelerator: Accelerator,
) -> None:
    engine = FakeEngine(2)
    loss = engine.module(torch.ones(1, 2)).sum()
    EngineBackend(accelerator, engine, "no").backward(loss)
    assert (engine.boundaries, engine.steps) == ([True], 0)
    EngineOptimizer(engine, torch.optim.SGD(engine.module.parameters()), [], keep=True).step()
    assert engine.steps == 1


@pytest.mark.parametrize(("stage", "norm"), [(0, 5.0), (2, 7.0)])
def test_the_norm_is_the_whole_gradients(accelerator: Accelerator, stage: int, norm: float) -> None:
    assert float(EngineBackend(accelerator, FakeEngine(stage, norm=7.0), "no").clip(1.0)) == norm


def test_a_norm_below_zero_is_deepspeeds_word_for_one_that_is_not_finite(
    accelerator: Accelerator,
) -> None:
    assert torch.isnan(EngineBackend(accelerator, FakeEngine(2, norm=-1.0), "no").clip(1.0))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("no", torch.float32)])
def test_autocast_follows_the_yaml(accelerator: Accelerator, precision: str, dtype: torch.dtype) -> None:
    with EngineBackend(accelerator, FakeEngine(2), precision).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
