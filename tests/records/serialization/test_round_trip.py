import json
import math
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from sigmascope.records import (
    AcceleratorFacts,
    AcceleratorMemory,
    AcceleratorPeak,
    ExceptionDetails,
    Finding,
    HostFacts,
    MemoryImpact,
    MemorySnapshot,
    ModuleFacts,
    PeakMemory,
    Run,
    Stage,
    Steps,
    TensorFacts,
    run_from_json,
    run_to_json,
)


class Recipe(NamedTuple):
    """A record to make later: beartype draws random numbers, which Hypothesis forbids while it draws."""

    kind: type
    arguments: tuple[Any, ...]
    options: dict[str, Any]


Recipes = st.SearchStrategy[Recipe]


def recipe(kind: type, *arguments: st.SearchStrategy[Any], **options: st.SearchStrategy[Any]) -> Recipes:
    return st.builds(Recipe, st.just(kind), st.tuples(*arguments), st.fixed_dictionaries(options))


def made(value: Any) -> Any:
    if isinstance(value, Recipe):
        return value.kind(*made(value.arguments), **made(value.options))
    if isinstance(value, dict):
        return {key: made(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(made(item) for item in value)
    return value


texts = st.text(max_size=8) | st.sampled_from(["", "café 🌅", "\u0000", "$float", "nan", "\ud800", "<b>&"])
floats = st.floats()  # NaN and infinities among them
maybe_float = st.none() | floats
maybe_int = st.none() | st.integers(0, 2**63)
maybe_text = st.none() | texts
reasons = st.dictionaries(texts, texts, max_size=2)
names = st.sampled_from(["cuda:0", "cuda:1", "mps:0"])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(texts | st.sampled_from(["$float", "$$float"]), inner, max_size=2)
    ),
    max_leaves=4,
)
facts = st.dictionaries(texts, json_values, max_size=2)

accelerator_memories = recipe(
    AcceleratorMemory, names, maybe_int, maybe_int, maybe_int, maybe_int, maybe_int, reasons
)
snapshots = recipe(
    MemorySnapshot,
    maybe_int,
    maybe_int,
    maybe_int,
    maybe_int,
    st.lists(accelerator_memories, max_size=2).map(tuple),
    reasons,
    st.none() | names,
)
accelerator_peaks = recipe(AcceleratorPeak, names, maybe_int, maybe_float, maybe_int, maybe_float, reasons)
peaks = recipe(
    PeakMemory,
    maybe_int,
    maybe_float,
    st.lists(accelerator_peaks, max_size=2).map(tuple),
    reasons,
    maybe_int,
    maybe_float,
)


def columns_of(length: int) -> Recipes:
    def column(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(*[values] * length)

    def maybe_column(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.just(()) | column(values)

    return recipe(
        Steps,
        column(floats),
        column(floats),
        maybe_column(maybe_float),
        maybe_column(maybe_int),
        maybe_column(maybe_int),
        reasons,
    )


steps = st.integers(0, 2).flatmap(columns_of)
findings = recipe(
    Finding,
    texts,
    st.sampled_from(["info", "warning", "error", "critical"]),
    texts,
    st.dictionaries(texts, st.none() | st.booleans() | st.integers() | floats | texts, max_size=2),
    maybe_text,
    maybe_text,
)
tensors = recipe(
    TensorFacts,
    st.lists(st.integers(0, 64), max_size=4).map(tuple),
    texts,
    texts,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    maybe_float,
    maybe_float,
    maybe_float,
    maybe_float,
    maybe_int,
    maybe_int,
    reasons,
)
counts = st.dictionaries(texts, st.integers(0, 2**40), max_size=2)
modules = recipe(
    ModuleFacts,
    texts,
    maybe_int,
    maybe_int,
    maybe_int,
    counts,
    counts,
    st.none() | st.booleans(),
    reasons,
    maybe_text,
)


def stages_around(children: Recipes) -> Recipes:
    return recipe(
        Stage,
        texts,
        floats,
        floats,
        success=st.booleans(),
        error=maybe_text,
        exception_details=st.none() | recipe(ExceptionDetails, texts, texts, texts),
        memory=st.none() | recipe(MemoryImpact, snapshots, snapshots),
        peak=st.none() | peaks,
        steps=steps,
        children=st.lists(children, max_size=2).map(tuple),
        tensors=st.dictionaries(texts, tensors, max_size=1),
        modules=st.dictionaries(texts, modules, max_size=1),
        facts=facts,
        findings=st.lists(findings, max_size=1).map(tuple),
        unavailable=reasons,
    )


stages = st.recursive(recipe(Stage, texts, floats, floats, facts=facts), stages_around, max_leaves=3)
accelerators = recipe(AcceleratorFacts, names, maybe_text, maybe_int, maybe_text, maybe_text, reasons)
hosts = recipe(
    HostFacts,
    maybe_text,
    maybe_int,
    maybe_int,
    maybe_int,
    maybe_text,
    maybe_text,
    st.dictionaries(texts, texts, max_size=2),
    st.lists(accelerators, max_size=2).map(tuple),
    reasons,
)
runs = recipe(
    Run,
    texts,
    texts,
    texts,
    floats,
    host=st.none() | hosts,
    stages=st.lists(stages, max_size=2).map(tuple),
    findings=st.lists(findings, max_size=1).map(tuple),
    facts=facts,
    complete=st.booleans(),
    unavailable=reasons,
)


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@settings(max_examples=40, deadline=None)
@given(runs)
def test_every_run_survives_the_round_trip(drawn: Recipe) -> None:
    run: Run = made(drawn)
    assert repr(run_from_json(run_to_json(run))) == repr(run)  # repr, since NaN differs from itself


@settings(max_examples=15, deadline=None)
@given(runs)
def test_the_text_is_strict_json(drawn: Recipe) -> None:
    text = run_to_json(made(drawn))
    text.encode("ascii")
    json.loads(text, parse_constant=refuse)


def test_non_finite_floats_keep_their_kind() -> None:
    seconds = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308)
    run = Run(
        "1", "n", "now", 1.0, stages=(Stage("a", 0.0, 1.0, steps=Steps(started=(0.0,) * 6, seconds=seconds)),)
    )
    loaded = run_from_json(run_to_json(run)).stages[0].steps.seconds
    assert repr(loaded) == repr(seconds)


def test_a_tuple_among_the_facts_becomes_a_list() -> None:
    run = Run("1", "n", "now", 1.0, facts={"resolution": (512, 512)})
    assert run_from_json(run_to_json(run)).facts == {"resolution": [512, 512]}
