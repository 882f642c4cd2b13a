"""A pipeline's call and the denoising in it: what it was asked for, the schedule, the steps, and what it gave.

`CallObserver` opens the stage `generation`.

`DenoiserObserver` hears the denoiser's calls, which open the denoising and its steps. `SchedulerObserver` hears which
schedule is set, and when the scheduler has made a step. When a denoising is over, no pipeline says:
`end_complete_denoising` and `is_final_decode` find out.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from sigmascope.analysis.lora_facts import MERGED_BEFORE
from sigmascope.integrations.diffusers.arguments import (
    Given,
    call_facts,
    generator_devices_of,
    given_arguments,
    global_states_of,
    named_arguments,
    other_arguments,
    seeds_of,
    shape_and_dtype,
    states_of,
)
from sigmascope.integrations.diffusers.control_nets import scales_by_net
from sigmascope.integrations.diffusers.denoising import Denoising, timestep_in
from sigmascope.integrations.diffusers.idle_loras import (
    SeenInCall,
    begin_idle_lora_findings,
    component_of,
    may_stay_in,
    scales_of_call,
    with_fused_and_gone,
)
from sigmascope.integrations.diffusers.pictures import FACT, outcome_of, pictures_of, thumbnail_of
from sigmascope.integrations.diffusers.recipe import (
    Content,
    loras_of,
    models_of,
    weights_states,
)
from sigmascope.integrations.diffusers.surroundings import surroundings_of
from sigmascope.integrations.diffusers.watch_session import (
    STACKS,
    Observer,
    StageStack,
    WatchedParts,
    asks_for_guidance,
    current_stack,
    enter_stack,
    leave_stacks,
    pipelines_in,
)
from sigmascope.monitor.generation import tell_request
from sigmascope.monitor.hooks import After, Arguments, Keywords, holder_of
from sigmascope.monitor.output_hashes import FAILED, ON_ITS_WAY
from sigmascope.monitor.publishing import publication
from sigmascope.monitor.recorder import LiveStage
from sigmascope.probes.compilations import compilations_since
from sigmascope.probes.copies import Pending
from sigmascope.probes.model_fingerprints import begin_combined_fingerprint, told
from sigmascope.probes.reading import Reading
from sigmascope.records.performance import COMPILATIONS
from sigmascope.records.prompts import stored_prompts, texts_of_call
from sigmascope.records.run import IDLE_LORAS, RECIPE, THUMBNAIL, CallFacts, PipelineFacts

GENERATION = "generation"
DENOISING = "denoising"
RUNS_LATER = "the call returned a generator or coroutine at once: the stages of its work are beside this one, not in it"
INSIDE: Final = "the call is inside another one, and its recipe is there"


class CallObserver(Observer):
    """Opens and closes a generation around every call of a pipeline."""

    name: ClassVar[str] = "calls"

    def attach_class(self, kind: type) -> None:
        """Hear the calls of pipelines of a class; a bare module is not a pipeline."""
        if not hasattr(kind, "_call_impl"):
            self.hook_class(kind, "__call__", self._before)

    def attach(self, parts: WatchedParts) -> None:
        """Hear the calls of the pipelines that this one is made of."""
        for pipeline in pipelines_in(parts.pipeline):
            self.attach_class(type(pipeline))

    def _before(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        session = self.session
        if not session.records(pipeline):
            return None
        own_stack = self._own(pipeline)
        if own_stack is not None:
            end_complete_denoising(own_stack)
            if own_stack.denoising is None:  # a subclass calls its base; a callback calls between steps
                return None
        guard = session.guard
        with session.own_work():
            facts = session.watch(pipeline)
            named = guard.read("watch.call", lambda: named_arguments(pipeline, args, kwargs))
            arguments = named or {}
            call = guard.read("watch.call", lambda: call_facts(arguments))
            prompts = guard.read("watch.prompts", lambda: texts_of_call(arguments))
            states = guard.read("watch.call", lambda: states_of(arguments))
            global_states = guard.read("watch.call", lambda: global_states_of(arguments))
        outside = current_stack(session)
        if outside is not None and outside.pipeline_id is None:
            outside.end_denoising()
            outside.end_loop()
        stack = StageStack(session, id(pipeline))
        stack.pipeline = pipeline
        stage = stack.enter(GENERATION)
        enter_stack(stack)

        def after(result: object, error: BaseException | None) -> None:
            denoising = stack.denoising  # a decoding would have ended it
            try:
                stack.end(error)
            finally:
                leave_stacks(stack)
                stack.pipeline = None
            with session.own_work():
                tell(result, error, denoising)

        def tell(result: object, error: BaseException | None, denoising: Denoising | None) -> None:
            if error is None and denoising is not None:
                guard.read("watch.outcome", lambda: _tell_outcome(stack, denoising.stage, result))
            around = current_stack(session)
            call_around = around if around is not None and around.pipeline_id is not None else None
            if call_around is not None:
                call_around.holds_calls = True
            guard.read("watch.outputs", lambda: self._settle_outputs(stack, call_around, error))
            if error is None:
                if session.options.thumbnails and call_around is None:
                    self._tell_thumbnail(stage, result)
                seen = guard.read("watch.pictures", lambda: pictures_of(result))
                if seen is not None:
                    stage.fact(FACT, seen)
            if inspect.isgenerator(result) or inspect.isasyncgen(result) or inspect.iscoroutine(result):
                stage.fact("runs_later", RUNS_LATER)
            known = call or CallFacts()
            finished = guard.read("watch.call", lambda: with_outcome(known, pipeline, stack))
            stage.fact("call", finished or known)
            if facts is not None:
                stage.fact("pipeline", facts)
            why_not = FAILED if error is not None else INSIDE if call_around is not None else None
            self._tell_prompts(stage, prompts or {})
            seeds = seeds_of(arguments)
            if seeds:
                stage.fact("seeds", seeds)
            if call_around is None:
                guard.read("watch.request", lambda: tell_request(stage, session.recorder.clock))
            session.recorder.settle()
            seen_in_call = seen_in(stack, arguments, facts or PipelineFacts("unknown"))
            self._tell_recipe(
                stage, pipeline, seen_in_call, states or [], why_not, global_states=global_states
            )

        return after

    def _own(self, pipeline: object) -> StageStack | None:
        """The call of this pipeline that is going on here."""
        stacks = (stack for stack in reversed(STACKS.get()) if stack.session is self.session)
        return next((stack for stack in stacks if stack.pipeline_id == id(pipeline)), None)

    def _settle_outputs(
        self, stack: StageStack, call_around: StageStack | None, error: BaseException | None
    ) -> None:
        """Hash what the call's stages made and is not hashed yet; a call around this one does so when it is over."""
        if error is not None:
            stack.outputs.drop()
        elif call_around is not None:
            stack.outputs.hand_on(call_around.outputs)
        else:
            self.session.arrivals.look()
            stack.outputs.settle(self.session.arrivals)

    def _tell_thumbnail(self, stage: LiveStage, result: object) -> None:
        reading = self.guard.reading("watch.thumbnail", lambda: thumbnail_of(result))
        small = reading.value or reading
        if small.value is None:
            stage.missing(THUMBNAIL, small.reason)
        else:
            stage.fact(THUMBNAIL, small.value)

    def _tell_recipe(
        self,
        stage: LiveStage,
        pipeline: object,
        seen_in_call: SeenInCall,
        states: list[str],
        why_not: str | None,
        switches: Mapping[str, str] | None = None,
        global_states: Mapping[str, str] | None = None,
    ) -> None:
        """Put the recipe on the call's stage, and hand the stage over once it is there.

        Args:
            stage: Of the call, which is over.
            pipeline: What was called.
            seen_in_call: Of the call.
            states: Of the generators, before the call.
            why_not: Why no weights are read; None: they are.
            switches: PyTorch's, as they were in the call; None: as they are.
            global_states: Of PyTorch's own generators, before the call; None: they tell nothing.
        """
        read, arguments = self.guard.read, seen_in_call.arguments
        self._tell_compilations(stage)
        others = read("watch.recipe", lambda: other_arguments(arguments))
        seen = read("watch.recipe", lambda: weights_states(pipeline)) if why_not is None else None
        loras = read("watch.recipe", lambda: loras_of(pipeline, why_not, seen))
        models = read("watch.recipe", lambda: models_of(pipeline, why_not, seen))
        surroundings = read("watch.recipe", lambda: surroundings_of(pipeline, switches))
        given = read("watch.recipe", lambda: given_arguments(arguments)) or Given({}, {}, {})
        tensors = {
            name: begin_combined_fingerprint({str(place): tensor for place, tensor in enumerate(held)})
            for name, held in given.tensors.items()
        }
        shapes = {name: shape_and_dtype(held) for name, held in given.tensors.items()}
        recipe: dict[str, object] = {
            "arguments": others,
            "threads": torch.get_num_threads(),
            "surroundings": surroundings,
        }
        recipe |= {"generator_states": states} if states else {}
        devices = read("watch.recipe", lambda: generator_devices_of(arguments))
        recipe |= {"generator_devices": devices} if devices else {}
        drawn = read("watch.recipe", lambda: _drawn_from(global_states, arguments))
        recipe |= {} if drawn is None else {"global_states": drawn}
        recipe |= {"not_looked_at": given.not_looked_at} if given.not_looked_at else {}
        merged_before = read("watch.lora", lambda: self.session.merged_before.open_in(pipeline)) or []
        look = partial(_begin_look_at_loras, pipeline, loras or {}, seen_in_call, bool(merged_before))
        idle = read("watch.lora", look)
        contents = [
            *tensors.values(),
            *(models or {}).values(),
            *(lora["content"] for lora in (loras or {}).values()),
            *([] if idle is None else [idle]),
        ]

        def tell() -> None:
            readings = {name: _now(content) for name, content in (models or {}).items()}
            fingerprints = {name: reading.value for name, reading in readings.items()}
            known = {name: lora | _content(_now(lora["content"])) for name, lora in (loras or {}).items()}
            told_tensors = {
                name: f"{shapes[name]} {_now(content).value}" for name, content in tensors.items()
            }
            recipe["given"] = given.texts | told_tensors
            stage.fact(RECIPE, {**recipe, "models": fingerprints, "loras": None if loras is None else known})
            for name, reading in readings.items():
                stage.account_for(f"{RECIPE}.models.{name}", reading)
            found = idle.result() if idle is not None and idle.has_arrived() else None
            if found is not None:
                here = {name for owner, name in self.session.fused_here if owner == id(pipeline)}
                add = partial(
                    with_fused_and_gone,
                    found,
                    at_zero=self.session.merged_before.at_zero_in(pipeline),
                    is_heard=self.session.heard_loras,
                    is_fusing_heard=self.session.heard_fusing,
                    fused_here=here,
                )
                fused = read("watch.lora", lambda: add(pipeline, loras or {}, merged_before))
                found = found if fused is None else fused
            if merged_before and loras:
                stage.fact(MERGED_BEFORE, may_stay_in(merged_before)["message"])
            if found or (loras and found is not None):
                stage.fact(IDLE_LORAS, found)

        tell()
        hand_over = publication(self.session.recorder, stage)
        if have_arrived(contents):
            hand_over()
            return

        def tell_late() -> None:
            read("watch.recipe", tell)
            hand_over()

        self.session.arrivals.expect(partial(have_arrived, contents), tell_late)

    def _tell_compilations(self, stage: LiveStage) -> None:
        compiled = compilations_since(self.session.recorder.clock() - stage.started_ns)
        if compiled.value is not None:
            stage.fact(COMPILATIONS, asdict(compiled.value))
        elif compiled.reason is not None:
            stage.missing(COMPILATIONS, compiled.reason)

    def _tell_prompts(self, stage: LiveStage, prompts: dict[str, str]) -> None:
        kept = stored_prompts(prompts, self.session.options.prompts)
        if kept:
            stage.fact(
                "prompts",
                {
                    name: {"sha256": prompt.sha256} | ({} if prompt.text is None else {"text": prompt.text})
                    for name, prompt in kept.items()
                },
            )


def _begin_look_at_loras(
    pipeline: object, loras: Mapping[str, dict[str, Any]], seen: SeenInCall, are_others_in_weights: bool
) -> Pending[list[dict[str, Any]]]:
    """Note with the LoRAs of a call what scales them, and begin to find out why they do nothing, if they do."""
    scales = scales_of_call(pipeline, seen) if loras else {}
    _note_scales(loras, scales)
    return begin_idle_lora_findings(pipeline, loras, seen, scales, are_others_in_weights)


def _note_scales(loras: Mapping[str, dict[str, Any]], scales: Mapping[str, tuple[str, float]]) -> None:
    """Note with each LoRA that is not merged what the call multiplies it by."""
    for name, lora in loras.items():
        scaled = scales.get(component_of(name))
        if scaled is not None and not lora.get("merged"):
            lora["call_scale"] = scaled[1]


def _drawn_from(before: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> dict[str, str] | None:
    """The states that those of PyTorch's own generators had from which the call drew; None: that is not known."""
    now = None if before is None else global_states_of(arguments)
    if before is None or now is None:
        return None
    return {device: state for device, state in before.items() if now.get(device) != state}


def have_arrived(contents: Sequence[Pending[Any]]) -> bool:
    """Whether all of them can be had without waiting for an accelerator."""
    return all(content.has_arrived() for content in contents)


def _now(content: Content) -> Reading[str]:
    return told(content) if content.has_arrived() else Reading(None, ON_ITS_WAY)


def _content(reading: Reading[str]) -> dict[str, str | None]:
    """The hash of a LoRA's tensors, and where there is none the reason."""
    return {"content": reading.value} | ({} if reading.reason is None else {"no_content": reading.reason})


def _tell_outcome(stack: StageStack, denoising: LiveStage, result: object) -> None:
    """Put on the denoising what it made, which nobody decoded. Values on an accelerator are not waited for."""
    output = outcome_of(result)
    if output is not None:
        stack.made(denoising, "output", output)


def seen_in(stack: StageStack, arguments: Mapping[str, Any], pipeline: PipelineFacts) -> SeenInCall:
    """What was seen of a call, which is over, that decides which of its LoRAs act."""
    return SeenInCall(
        arguments,
        None if stack.holds_calls else frozenset(stack.ran),
        frozenset(pipeline.of_role("text_encoder")),
        frozenset(pipeline.of_role("denoiser")),
        frozenset(pipeline.of_role("vae")),
        stack.steps,
        stack.lora_changes,
        stack.control_scales,
    )


def with_outcome(call: CallFacts, pipeline: object, stack: StageStack) -> CallFacts:
    """The facts with what only the finished call shows: the size of what was decoded, and guidance at work."""
    height, width = stack.size or (None, None)
    return replace(
        call,
        num_inference_steps=call.num_inference_steps or stack.planned_steps,
        height=call.height or height,
        width=call.width or width,
        guidance_batches=_guidance_batches(pipeline, stack),
    )


def _guidance_batches(pipeline: object, stack: StageStack) -> int | None:
    """From the calls that a step needed, or from what the pipeline says of one batched call."""
    if stack.most_calls_a_step != 1:
        return stack.most_calls_a_step or None
    answers = [
        answer for answer in (stack.is_guided, asks_for_guidance(pipeline)) if isinstance(answer, bool)
    ]
    if answers:
        return 1 + max(answers)
    config = getattr(getattr(pipeline, "transformer", None), "config", None) or {}
    return 1 if config.get("guidance_embeds") is True else None


_DENOISER_NAMES: Final = ("unet", "transformer", "transformer_2", "denoiser", "prior", "decoder")
"""Where pipelines keep denoisers whose architecture is not known."""
_HELPER_PREFIX: Final = "controlnet"
"""Where they keep what is called before the denoiser, for each of its calls or steps."""
_CONTROL_SCALE: Final = "conditioning_scale"
"""What they are given for what they multiply their output by."""
SCHEDULE_STAGE = "model_sampling"


class DenoiserObserver(Observer):
    """A step for all calls of denoisers up to the scheduler's step."""

    name: ClassVar[str] = "denoiser"

    def attach(self, parts: WatchedParts) -> None:
        """Hear every denoiser."""
        has_scheduler = any(callable(getattr(part, "step", None)) for _, part in parts.of_role("scheduler"))
        for name, denoiser in denoisers_of(parts):
            self.hook_calls(denoiser, partial(self._before, name, has_scheduler))
        for name in _DENOISER_NAMES:  # another runtime's engine may stand for a denoiser: it is no module
            engine = parts.components.get(name)
            if callable(engine) and not isinstance(engine, nn.Module):
                before = partial(self._before, name, has_scheduler)
                self.hook_method(engine, "__call__", before)
        for name, part in parts.components.items():
            if name.startswith(_HELPER_PREFIX) and isinstance(part, nn.Module):
                self.hook_calls(part, partial(self._before_helper, name))

    def _before(
        self, name: str, has_scheduler: bool, _: object, args: Arguments, kwargs: Keywords
    ) -> After | None:
        stack = current_stack(self.session) or self.session.stack_here()
        if stack is None or (stack.loop is not None and stack.loop.calling is not None):
            return None  # nothing of this session is called here, or an own loop's denoiser: its observer counts it
        denoising = start_denoising(stack)
        denoising.called(name, timestep_in(args, kwargs))
        return None if has_scheduler else lambda _result, _error: denoising.returned()

    def _before_helper(self, name: str, part: object, args: Arguments, kwargs: Keywords) -> None:
        stack = current_stack(self.session) or self.session.stack_here()
        if stack is not None:
            start_denoising(stack).prepared()
            for net, scale in scales_by_net(name, part, kwargs.get(_CONTROL_SCALE, 1.0)).items():
                stack.control_scales[net] = max(stack.control_scales.get(net, 0.0), scale)


def denoisers_of(parts: WatchedParts) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are denoisers by their architecture, or else by their name, with their names."""
    known = dict(parts.of_role("denoiser"))
    known |= {name: part for name, part in parts.of_role("other") if name in _DENOISER_NAMES}
    for name, part in known.items():
        if isinstance(part, nn.Module):
            yield name, part


def start_denoising(stack: StageStack) -> Denoising:
    """The denoising that is going on in a stack; it begins now if none is."""
    denoising = stack.denoising
    if denoising is None:
        session = stack.session
        stack.is_guided = session.guard.read("watch.call", lambda: asks_for_guidance(stack.pipeline))
        denoising = stack.denoising = Denoising(stack.enter(DENOISING), session.recorder)
    return denoising


class SchedulerObserver(Observer):
    """A stage for each schedule that is set, and the ends of steps."""

    name: ClassVar[str] = "scheduler"

    def attach(self, parts: WatchedParts) -> None:
        """Hear `set_timesteps` and `step` of every scheduler."""
        for _, scheduler in parts.of_role("scheduler"):
            self.hook_method(holder_of(scheduler, "set_timesteps"), "set_timesteps", self._before_schedule)
            self._hear_step(holder_of(scheduler, "step"))

    def _hear_step(self, scheduler: object) -> None:
        """Hear the steps of all schedulers of a class: each counts for the denoising that is open where it is made."""
        self.hook_class(type(scheduler), "step", self._before_step)
        if "step" in getattr(scheduler, "__dict__", {}):
            self.hook_attribute(scheduler, "step", self._before_step)

    def _before_schedule(self, scheduler: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self.session.stack_here()
        if stack is None or stack.is_in(SCHEDULE_STAGE):
            return None
        end_complete_denoising(stack)
        stage = stack.enter(SCHEDULE_STAGE)

        def after(result: object, error: BaseException | None) -> None:
            stack.leave(stage, error)
            timesteps = getattr(scheduler, "timesteps", None)
            if error is None and timesteps is not None:
                stack.planned_steps = len(timesteps)
            for name, fact in schedule_facts(scheduler).items():
                stage.fact(name, fact)

        return after

    def _before_step(self, *_: object) -> After | None:
        stack = current_stack(self.session)
        if stack is None or stack.denoising is None:
            return None
        return stack.denoising.scheduler_began()


def schedule_facts(scheduler: object) -> dict[str, Any]:
    """The schedule as it is set: its class, settings, timesteps and sigmas. Nothing waits for an accelerator."""
    config = getattr(scheduler, "config", None) or {}
    facts: dict[str, Any] = {"scheduler": type(scheduler).__name__}
    facts["settings"] = {
        name: value
        for name, value in config.items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_")
    }
    for name in ("timesteps", "sigmas"):
        values = getattr(scheduler, name, None)
        if values is not None:
            facts[f"num_{name}"] = len(values)
            facts[name] = _numbers(values)
    shift = getattr(scheduler, "shift", None)
    if isinstance(shift, int | float):
        facts["shift"] = shift
    return facts


def _numbers(values: object) -> list[float] | None:
    """The numbers; None for those on an accelerator."""
    if isinstance(values, Tensor):
        return values.double().tolist() if values.device.type == "cpu" else None
    return [float(value) for value in values] if isinstance(values, list | tuple) else None


def end_complete_denoising(stack: StageStack) -> None:
    """Close the denoising if it has made all its steps: what comes now is not part of it.

    The steps are those that the pipeline says it makes, or else those of the schedule that was set last.
    """
    denoising = stack.denoising
    if denoising is None or not denoising.stepped:
        return
    steps = _steps_of_pipeline(stack) or stack.planned_steps
    if steps is not None and denoising.stepped >= steps:
        stack.end_denoising()


def _steps_of_pipeline(stack: StageStack) -> int | None:
    if stack.loop_steps is not None:
        return stack.loop_steps
    steps = getattr(stack.pipeline, "num_timesteps", None)
    return steps if isinstance(steps, int) else None


def is_final_decode(stack: StageStack) -> bool:
    """Whether a decoding comes after the denoising, and is not a preview during it.

    Pipelines that say how many steps they make are believed; of others every decoding is taken as the end.
    """
    denoising = stack.denoising
    steps = _steps_of_pipeline(stack)
    if denoising is None or steps is None or getattr(stack.pipeline, "interrupt", False):
        return True
    return denoising.stepped == 0 or denoising.stepped >= steps
