import math
from typing import Any

import pytest
import torch
from tests.lbm.training.tiny_run import tiny_settings
from torch import nn

from sigmascope.errors import ConfigError
from sigmascope.lbm.training.session import make_schedule
from sigmascope.lbm.training.settings import (
    SCHEDULES,
    check_optimizer,
    check_schedule,
    make_optimizer,
    optimizer_class,
)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 2))


def rates(name: str, steps: int | None, warmup: int = 0, **kwargs: Any) -> list[float]:
    optimizer = torch.optim.SGD([parameter()], lr=2.0)
    settings = tiny_settings(lr_scheduler=name, warmup_steps=warmup, lr_scheduler_kwargs=kwargs)
    schedule = make_schedule(settings, optimizer, steps)
    found = []
    for _ in range(11):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [("AdamW", torch.optim.AdamW), ("adamw", torch.optim.AdamW), ("SGD", torch.optim.SGD), ("rmsprop", torch.optim.RMSprop)],
)  # fmt: skip
def test_optimizers_go_by_name_in_any_case(name: str, kind: type[torch.optim.Optimizer]) -> None:
    assert type(make_optimizer(name, [parameter()], 0.1, {})) is kind


def test_every_argument_reaches_the_optimizer() -> None:
    given = {"betas": [0.8, 0.95], "weight_decay": 0.3, "eps": 1e-5}
    group = make_optimizer("AdamW", [parameter()], 0.02, given).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (
        0.02,
        (0.8, 0.95),
        0.3,
        1e-5,
    )
    plain = make_optimizer("SGD", [parameter()], 0.5, {"momentum": 0.9}).param_groups[0]
    assert (plain["lr"], plain["momentum"], plain["weight_decay"]) == (0.5, 0.9, 0)


@pytest.mark.parametrize("name", ["Adam8", "Optimizer", "LBFGS", "SparseAdam", "no_grad", ""])
def test_an_unknown_optimizer_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer: there is no .*Use one of .*AdamW.*SGD"):
        optimizer_class(name)


@pytest.mark.parametrize("kwargs", [{"betas": 5}, {"betas": [0.9]}, {"eps": "small"}, {"weight_decay": -1}])
def test_a_value_is_refused_before_there_are_parameters(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="optimizer: AdamW refuses"):
        check_optimizer("AdamW", kwargs)


def test_whether_a_fused_kernel_can_be_had_is_not_judged_without_parameters() -> None:
    check_optimizer("AdamW", {"fused": True, "betas": [0.9, 0.99]})


def test_a_value_that_the_optimizer_refuses_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer: AdamW refuses .*weight_decay.*Correct optimizer_kwargs"
    ):
        make_optimizer("AdamW", [parameter()], 0.1, {"weight_decay": -1.0})


def test_constant_stays_and_can_warm_up() -> None:
    assert rates("constant", None) == [2.0] * 11
    assert rates("constant_with_warmup", None, 4) == [0.0, 0.5, 1.0, 1.5] + [2.0] * 7


def test_linear_and_cosine_fall_to_zero() -> None:
    assert rates("linear", 10) == pytest.approx([2.0 * (1 - step / 10) for step in range(11)])
    assert rates("cosine", 10) == pytest.approx([1 + math.cos(math.pi * step / 10) for step in range(11)])
    warm = [0.0, 1.0] + [1 + math.cos(math.pi * step / 8) for step in range(9)]
    assert rates("cosine", 10, 2) == pytest.approx(warm)


def test_arguments_reach_the_schedule() -> None:
    cycles = rates("cosine_with_restarts", 10, num_cycles=2)
    assert cycles[5] == pytest.approx(2.0)
    assert rates("polynomial", 10, power=2.0)[5] == pytest.approx(2.0 * 0.25, rel=1e-4)
    assert rates("piecewise_constant", None, step_rules="1:3,0.1")[2:4] == pytest.approx([2.0, 0.2])


@pytest.mark.parametrize(
    "name", sorted(set(SCHEDULES) - {"constant", "constant_with_warmup", "piecewise_constant"})
)
def test_a_schedule_that_falls_needs_the_number_of_steps(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} needs to know the number of steps.*max_steps"):
        rates(name, None)
    with pytest.raises(ConfigError, match="warmup_steps: 10 is too many for a run of 10 steps"):
        rates(name, 10, 10)


def test_schedules_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="did you mean polynomial"):
        check_schedule("polinomial", 0, {})
    with pytest.raises(ConfigError, match=r"lr_scheduler_kwargs\.powr: polynomial .*did you mean power"):
        check_schedule("polynomial", 0, {"powr": 1})
    with pytest.raises(ConfigError, match="needs step_rules"):
        check_schedule("piecewise_constant", 0, {})


def test_the_names_are_those_of_diffusers() -> None:
    from diffusers.optimization import SchedulerType

    assert set(SCHEDULES) == {kind.value for kind in SchedulerType}
