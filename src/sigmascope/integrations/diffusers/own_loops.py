"""Loops of one's own: a generation that no pipeline runs, told by what is called in it.

Where no pipeline is named, a module that is called with noisy latents and a timestep is a denoiser. The classes of
diffusers are known by name. Any other module is one if its `forward` takes something like a timestep, if that holds one
number or one for each sample, and if it gives what has the latents' form. It must be called for two timesteps at least.
The scheduler's `step` ends a step, and the VAE's `decode` the loop.

Where a denoiser, a scheduler or a VAE is named by itself, the same is told of those alone.

Nothing but classes is hooked. A class whose objects turn out to be parts of a denoiser, such as a block that takes the
timestep too, is let go at its first call.
"""

import inspect
import logging
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from types import FrameType
from typing import Any, ClassVar, Final

from torch import Tensor, is_grad_enabled, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from sigmascope.integrations.diffusers.arguments import global_states_of
from sigmascope.integrations.diffusers.components import (
    ENCODING_STAGE,
    VAE_STAGES,
    TextEncodingObserver,
    VaeObserver,
    first_tensor,
)
from sigmascope.integrations.diffusers.denoising import Denoising, is_tracing, number_of
from sigmascope.integrations.diffusers.idle_loras import SeenInCall
from sigmascope.integrations.diffusers.pipeline_call import (
    DENOISING,
    GENERATION,
    CallObserver,
    DenoiserObserver,
    SchedulerObserver,
    is_final_decode,
    start_denoising,
)
from sigmascope.integrations.diffusers.surroundings import switches_now
from sigmascope.integrations.diffusers.watch_session import (
    STACKS,
    Observer,
    Session,
    StageStack,
    WatchedParts,
    current_stack,
)
from sigmascope.monitor.generation import tell_request
from sigmascope.monitor.guard import log_quietly
from sigmascope.monitor.hooks import After, Arguments, ByIdentity, Keywords
from sigmascope.monitor.recorder import CURRENT, Frame, LiveStage, frames_here
from sigmascope.monitor.scope import Scope
from sigmascope.probes.models import pipeline_facts, unwrap
from sigmascope.records.run import STEPS_UNCLEAR, CallFacts
from sigmascope.threads import own_thread, start_thread

_log = logging.getLogger(__name__)

OWN_LOOP: Final = "own loop"
"""Stands for the pipeline's class in the record."""
_TIMESTEPS: Final = frozenset(
    (
        "t",
        "ts",
        "time",
        "times",
        "timestep",
        "timesteps",
        "time_step",
        "time_steps",
        "time_cond",
        "t_cond",
        "sigma",
        "sigmas",
        "noise_level",
        "noise_levels",
        "noise_labels",
        "noise_cond",
        "c_noise",
        "log_snr",
    )
)
"""What denoisers call the argument that says how noisy their latents are."""
_KNOWN: Final = re.compile(
    r"UNet\w*Model|\w+Transformer\w*Model\w*|PriorTransformer|UVit2DModel|Kandinsky\w+|StableCascadeUNet"
)
_PARTS: Final = re.compile(r"(Dual)?Transformer(2D|Temporal|SpatioTemporal)Model")
"""Of diffusers: denoisers by the names of their classes, and models that denoisers have inside them."""
_HELPER: Final = re.compile(r"\w*ControlNet\w*|T2IAdapter")
_TEXT_ENCODER: Final = re.compile(r"\w+TextModel(WithProjection)?|\w+EncoderModel")
_MOST_NUMBERS: Final = 32
_FEWEST_TURNS: Final = 2
_LOOK_SECONDS: Final = 1.0
_MOST_LOOKS: Final = 600
_LOOKS_TO_BE_SURE: Final = 3
_MODULE_CALL: Final = nn.Module._call_impl.__code__
_UNRECOGNISED: Final = (
    "Nothing is recorded so far: %s works, but no pipeline is called, and it is not called like a denoiser, with latents "
    "and a timestep. Name what denoises and decodes: with sigmascope.watch(unet, vae) as run: ..."
)
_PICTURE_CHANNELS: Final = (1, 3)
_ENCODER_NAME: Final = "text_encoder"


@dataclass(frozen=True, slots=True)
class _Form:
    """How a class's `forward` takes what a denoiser needs.

    Attributes:
        latents: The name of its first argument.
        at: The timestep's place behind `self`.
        timestep: Its name.
        is_known: Whether it is a class of diffusers.
    """

    latents: str
    at: int
    timestep: str
    is_known: bool = False

    def read(self, args: Arguments, kwargs: Keywords) -> tuple[object, object]:
        """The latents and the timestep of a call; None for what was not given."""
        latents = args[0] if args else kwargs.get(self.latents)
        return latents, args[self.at] if self.at < len(args) else kwargs.get(self.timestep)


def _form_of(kind: type) -> _Form | None:
    """Where a class takes its latents and its timestep; None: it takes none."""
    code = getattr(inspect.unwrap(getattr(kind, "forward", None) or kind), "__code__", None)
    if code is None:
        return None
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    places = [place for place, name in enumerate(names) if place and name in _TIMESTEPS]
    return _Form(names[0], places[0], names[places[0]]) if places else None


def _is_timestep_of(latents: object, timestep: object) -> bool:
    """Whether it can be the timestep of these latents: one number, or one for each sample. No value is read."""
    if not isinstance(latents, Tensor) or latents.dim() < 2 or not latents.is_floating_point():
        return False
    if isinstance(timestep, Tensor):
        return timestep.numel() == 1 or (
            timestep.numel() == latents.shape[0] == (timestep.shape[0] if timestep.dim() else 0)
        )
    return isinstance(timestep, int | float) and not isinstance(timestep, bool)


def _is_mixed(timestep: object) -> bool:
    """Whether samples have different timesteps; not where reading them would wait for an accelerator."""
    if not (isinstance(timestep, Tensor) and timestep.is_cpu and 1 < timestep.numel() <= _MOST_NUMBERS):
        return False
    return len(set(timestep.flatten().tolist())) > 1


def _has_form_of(latents: Tensor, result: object) -> bool:
    """Whether a denoiser can have given this: as many samples of the same size, in any number of channels."""
    output = first_tensor(result)
    if output is None or output.dim() != latents.dim() or not output.is_floating_point():
        return False
    sizes = (output.shape, latents.shape)
    first, second = (
        (shape[:1], shape[2:]) if latents.dim() > 2 else (shape[:], shape[:0]) for shape in sizes
    )
    return first == second


def _no_module() -> None:
    """Stands for the denoiser before any was called."""


class OwnParts:
    """What an own loop uses, in place of a pipeline."""

    def __init__(self, components: Mapping[str, object]) -> None:
        self.components = dict(components)


@dataclass(slots=True, eq=False)
class _Going:
    """What is decided once for all further calls of a loop's denoiser.

    Attributes:
        denoising: The denoising that they are made in.
        form: How the denoiser takes its timestep.
        name: What it is called in the record.
        told: Takes the end of a call.
    """

    denoising: Denoising
    form: _Form
    name: str
    told: After


@dataclass(slots=True, eq=False)
class OwnGeneration:
    """A generation of an own loop while it goes on, on the stack of its context.

    Attributes:
        stage: Its stage.
        calling: The denoiser that is being called.
        denoiser: The one that was called last.
        name: What that is called in the record.
        form: How the first one takes its timestep.
        reads: How the last one does.
        going: What holds for the last one's further calls, once it was called for a second timestep.
        frame: The innermost scope of this context where the host was seen to record no step of its own.
        first: The first timestep's number; None: not known.
        last: The number of the last one.
        rises: Whether timesteps rise from the first to the second; None: there is no second yet.
        turns: How often they turned from falling to rising, or from rising to falling.
        changes: How often a timestep was another than the one before.
        numbers: The first of those others.
        is_mixed: Whether the first call had samples at several timesteps.
        stepper: The scheduler that made the last step.
        handovers: How often another scheduler made the next one.
        is_repeated: Whether a denoiser of unknown class was called for a second timestep.
        latents: The shape of the denoiser's latents.
        last_ns: When a call in it was last seen to end, on the recorder's clock.
        has_denoised: Whether a denoiser was called in it.
        has_image: Whether an image was encoded in it.
        denoisings: Those in it.
        samples: How many a scheduler made steps of; None: none did.
        pictures: How many were decoded.
        parts: What works in it, by name.
        switches: PyTorch's, as they were when it began to denoise.
        global_states: Of PyTorch's own generators, when it began; None: they tell nothing.
    """

    stage: LiveStage
    calling: object = None
    denoiser: "Callable[[], nn.Module | None]" = _no_module
    name: str = ""
    form: _Form | None = None
    reads: _Form | None = None
    going: _Going | None = None
    frame: Frame | None = None
    first: float | None = None
    last: float | None = None
    rises: bool | None = None
    turns: int = 0
    changes: int = 0
    numbers: list[float] = field(default_factory=list)
    is_mixed: bool = False
    stepper: "Callable[[], object]" = _no_module
    handovers: int = 0
    is_repeated: bool = False
    latents: tuple[int, ...] = ()
    last_ns: int | None = None
    has_denoised: bool = False
    has_image: bool = False
    denoisings: list[Denoising] = field(default_factory=list)
    samples: int | None = None
    pictures: int | None = None
    parts: "dict[str, weakref.ref[Any]]" = field(default_factory=dict)
    switches: Mapping[str, str] | None = None
    global_states: Mapping[str, str] | None = None

    def uses(self, name: str, part: object) -> str:
        """Note a part and give its name; another one of the same kind gets a number."""
        number, free = 2, name
        while (held := self.parts.get(free)) is not None:
            if held() is part:
                return free
            free, number = f"{name}_{number}", number + 1
        self.parts[free] = weakref.ref(part)
        return free

    def last_seen_ns(self) -> int | None:
        """When something of it was last seen to end, a scheduler's step too; None: nothing was."""
        seen = [self.last_ns, *(denoising.stepped_ns for denoising in self.denoisings)]
        return max((moment for moment in seen if moment is not None), default=None)

    @property
    def is_one_step(self) -> bool:
        """Whether calls for one timestep are a loop: a known denoiser's, if a scheduler made a step of it or a VAE a picture."""
        is_known = self.form is not None and self.form.is_known
        return is_known and (self.is_stepped or self.pictures is not None)

    @property
    def is_stepped(self) -> bool:
        """Whether a scheduler made steps of it."""
        return any(denoising.stepped for denoising in self.denoisings)

    @property
    def is_at_random(self) -> bool:
        """Whether timesteps came in no order, as those that a model is evaluated at: no schedule, no solver has such.

        A third of the steps at least turn, and most pairs of timesteps do not lie the same way round (Kendall's tau).
        Where each sample has a timestep of its own, one turn is enough.
        """
        if self.is_stepped or self.turns < (1 if self.is_mixed else _FEWEST_TURNS):
            return False
        pairs = [(first > later) - (first < later) for first, later in combinations(self.numbers, 2)]
        return self.is_mixed or (3 * self.turns >= self.changes and abs(sum(pairs)) < len(pairs) / 2)

    def goes_to(self, number: float | None) -> None:
        """Note the timestep of a call that is made now."""
        last, self.last = self.last, number
        if number is not None and last is not None and number != last:
            self.changes += 1
            if self.changes <= _MOST_NUMBERS:
                self.numbers.append(number)
            rises = number > last
            if self.rises is not None and rises != self.rises:
                self.turns += 1
            self.rises = rises

    def starts_again(self, number: float | None, planned: int | None) -> bool:
        """Whether a timestep is that of another loop's beginning: the first one, after others; or one after 0, where no
        schedule says that more follow, as it does where a solver jumps back.
        """
        if number is None or number == self.last:
            return False
        return number == self.first or (planned is None and self.last == 0.0 < number and self.first != 0.0)


class OwnLoopObserver(Observer):
    """A generation for each loop outside of pipelines, where none is named."""

    name: ClassVar[str] = "own_loops"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._look_out = LookOut(session)
        self._looked_at: weakref.WeakSet[type] = weakref.WeakSet()
        self._forms: weakref.WeakKeyDictionary[type, _Form] = weakref.WeakKeyDictionary()
        self._named: ByIdentity[bool] = ByIdentity()
        self._refused: ByIdentity[bool] = ByIdentity()
        self._trained: ByIdentity[bool] = ByIdentity()

    def start(self) -> None:
        """Know the classes that there are, and hear when an object of another is made."""
        self.session.observer(DenoiserObserver).gives_way_to = self
        if not self.session.is_everywhere:
            return
        self.hook_attribute(nn.Module, "__init__", self._before_init)
        for kind in _subclasses(nn.Module):
            self._know(kind)
        self.when_loaded("made", "diffusers.configuration_utils", "ConfigMixin", self._know_schedulers)
        self.when_loaded("compiled", "torch._dynamo.eval_frame", "OptimizedModule", self._hear_calls)
        self._look_out.start()
        self.keep_undo("look-out", self._look_out.stop)
        self._hear_training()

    def attach(self, parts: WatchedParts) -> None:
        """Hear a part that is named by itself."""
        part = parts.pipeline
        if self.session.is_everywhere or all(part is not held for held in parts.components.values()):
            return
        self._named.put(part, True)
        kind = type(unwrap(part) or part)
        if isinstance(part, nn.Module):
            self._know(kind)
            self._hear_training()
        else:
            self._know_scheduler(kind)

    def _hear_training(self) -> None:
        if not self.has("training"):
            hook = register_optimizer_step_post_hook(self._trained_here)
            self.keep_undo("training", hook.remove)

    def _is_meant(self, part: object) -> bool:
        """Whether it may be part of a loop: any, or what was named."""
        return self.session.is_everywhere or bool(self._named.get(part))

    # Which classes

    def _before_init(self, module: object, args: Arguments, kwargs: Keywords) -> None:
        kind = type(module)
        if kind not in self._looked_at:
            self._know(kind)

    def _know(self, kind: type) -> None:
        """Hear the calls of a class, if its objects can be part of a loop."""
        self._looked_at.add(kind)
        library, name = kind.__module__.partition(".")[0], kind.__name__
        if library in ("torch", "sigmascope"):
            return
        if library == "transformers":
            if _TEXT_ENCODER.fullmatch(name):
                self.hook_attribute(kind, "__call__", self._before_text)
            return
        is_vae = all(callable(getattr(kind, way, None)) for way in ("encode", "decode"))
        if is_vae:
            self.hook_class(kind, "encode", partial(self._before_vae, "encoding"))
            self.hook_class(kind, "decode", partial(self._before_vae, "decoding"))
        elif library == "diffusers":
            self._know_model(kind, name)
        elif (form := _form_of(kind)) is not None:
            self._forms[kind] = form
            self._hear_calls(kind)

    def _know_model(self, kind: type, name: str) -> None:
        if not hasattr(kind, "from_pretrained"):
            return
        if _HELPER.fullmatch(name):
            self.hook_attribute(kind, "__call__", self._before_helper)
        elif _KNOWN.fullmatch(name) and not _PARTS.fullmatch(name) and (form := _form_of(kind)) is not None:
            self._forms[kind] = replace(form, is_known=True)
            self._hear_calls(kind)

    def _hear_calls(self, kind: type) -> None:
        self.hook_attribute(kind, "__call__", self._before)

    def _know_schedulers(self, base: type) -> None:
        """Hear `set_timesteps` and `step` of all schedulers of diffusers, also of those that are made later."""
        for kind in _subclasses(base):
            self._know_scheduler(kind)
        self.hook_attribute(base, "register_to_config", self._before_config)

    def _before_config(self, made: object, args: Arguments, kwargs: Keywords) -> None:
        kind = type(made)
        if kind not in self._looked_at and not isinstance(made, nn.Module):
            self._looked_at.add(kind)
            self._know_scheduler(kind)

    def _know_scheduler(self, kind: type) -> None:
        ways = ("set_timesteps", "step")
        if not issubclass(kind, nn.Module) and all(callable(getattr(kind, way, None)) for way in ways):
            self.hook_class(kind, "set_timesteps", self._before_schedule)
            self.hook_class(kind, "step", self._before_step)

    # What happens in a loop

    def _stack(self) -> StageStack | None:
        """The stack of this context, if no pipeline is being called here."""
        stack = self.session.stack_here()
        return None if stack is None or stack.pipeline_id is not None else stack

    def _before(self, module: object, args: Arguments, kwargs: Keywords) -> After | None:
        """Take a call of what may be a denoiser: the hot path."""
        stack = current_stack(self.session)
        own: OwnGeneration | None = None if stack is None else stack.loop
        going = None if own is None else own.going
        if (
            stack is None
            or own is None
            or going is None
            or going.denoising is not stack.denoising
            or own.calling is not None
            or own.denoiser() is not module
            or own.frame is not CURRENT.get()
        ):
            return self._before_first(module, args, kwargs)
        # As `_Form.read` and `_is_denoising` do, without the time of their calls.
        form, denoising = going.form, going.denoising
        if is_tracing() or (is_grad_enabled() and self._may_train(module)):
            return self._before_first(module, args, kwargs)
        if denoising.most_calls_a_step > 1 and form.is_known and denoising.called_again(going.name):
            own.calling = module
            return going.told
        timestep = args[form.at] if form.at < len(args) else kwargs.get(form.timestep)
        number, last, planned = number_of(timestep), own.last, stack.planned_steps
        if (
            (number != last and own.starts_again(number, planned))
            or (planned is not None and denoising.stepped >= planned)
            or not (
                form.is_known
                or self._may_denoise(module, args[0] if args else kwargs.get(form.latents), timestep)
            )
        ):
            return self._before_first(module, args, kwargs)
        own.calling = module
        if number != last:
            own.goes_to(number)
        denoising.called(going.name, number)
        return going.told

    def _before_first(self, module: object, args: Arguments, kwargs: Keywords) -> After | None:
        """Take a call of which not all is known from the one before it."""
        session = self.session
        if not self._is_meant(module):
            return None
        stack = session.stack_here()
        if stack is None or not isinstance(module, nn.Module):
            return None
        own: OwnGeneration | None = stack.loop
        is_same = own is not None and own.denoiser() is module
        if own is not None and own.reads is not None and is_same and own.calling is None:
            form = own.reads
        else:
            known = self._form(stack, own, module)
            if known is None:
                return None
            form = known
        latents, timestep = form.read(args, kwargs)
        number = number_of(timestep)
        if not self._is_denoising(module, form, latents, timestep, number):
            return None
        frame = CURRENT.get()
        if own is None or own.frame is not frame or frame is None:
            if _is_counted_by_host():
                return None
            if own is not None:
                own.frame = frame
        told = self._denoise(stack, own, module, form, latents, number)
        if isinstance(begun := stack.loop, OwnGeneration) and begun is not own:
            begun.is_mixed = _is_mixed(timestep)
        return told

    def _is_denoising(
        self, module: Any, form: _Form, latents: object, timestep: object, number: float | None
    ) -> bool:
        """Whether a call of what takes latents and a timestep is one of a loop: no training, and no tracer's."""
        if is_grad_enabled() and self._may_train(module):
            return False
        if not form.is_known and not self._may_denoise(module, latents, timestep):
            return False
        is_read = number is not None and isinstance(timestep, Tensor)  # no tracer lets one be read
        return is_read or not is_tracing()

    def _may_train(self, module: Any) -> bool:
        """Whether what is called with gradients is called to be trained."""
        return bool(module.training or self._trained.get(module))

    def _may_denoise(self, module: object, latents: object, timestep: object) -> bool:
        """Whether what is no denoiser of diffusers may be one."""
        return not self._refused.get(module) and _is_timestep_of(latents, timestep)

    def _form(self, stack: StageStack, own: OwnGeneration | None, module: nn.Module) -> _Form | None:
        """How a module takes latents and timestep that is not the one that was called last; None: it is no denoiser here."""
        kind = type(module)
        form = self._forms.get(kind)
        if form is None:
            inner = unwrap(module)
            form = None if inner is None else self._forms.get(type(inner))
            if form is None:
                return None
        if stack.pipeline_id is not None:
            if not self._is_heard(module):
                self._let_go(kind, form, None)
            return None
        if own is not None and own.calling is not None:
            self._let_go(kind, form, own.calling)
            return None
        return form

    def _let_go(self, kind: type, form: _Form, around: object) -> None:
        """Hear no more of a class that works inside denoisers."""
        inner = None if around is None else unwrap(around)
        if not form.is_known and kind not in (type(around), type(inner)):
            self._forms.pop(kind, None)
            self.forget((id(kind), "__call__"))

    def _denoise(
        self,
        stack: StageStack,
        own: OwnGeneration | None,
        module: nn.Module,
        form: _Form,
        latents: object,
        number: float | None,
    ) -> After:
        if own is not None and (
            own.starts_again(number, stack.planned_steps) or _is_complete(stack)
            if own.has_denoised
            else _has_another_in(own.stage)
        ):
            self._end(stack)
            own = None
        if own is None:
            own = self._begin(stack)
        is_first = not own.has_denoised
        if is_first:
            own.has_denoised, own.first, own.form = True, number, form
            own.switches = switches_now()  # autocast and no_grad may be over when the loop is known to be
            # A loop that begins with an image makes fewer steps than are planned.
            stack.loop_steps = None if own.has_image else stack.planned_steps
            own.latents = tuple(latents.shape) if isinstance(latents, Tensor) else ()
        own.is_repeated = own.is_repeated or (not is_first and (number is None or number != own.first))
        own.calling = module
        own.goes_to(number)
        if own.denoiser() is not module:
            own.denoiser, own.reads = weakref.ref(module), form
            own.name = own.uses(
                "unet" if "UNet" in type(unwrap(module) or module).__name__ else "denoiser", module
            )
        denoising = start_denoising(stack)
        if denoising not in own.denoisings:
            own.denoisings.append(denoising)
        denoising.called(own.name, number)
        if is_first and not form.is_known:
            return partial(self._after_first, stack, own, module, latents)
        told = self._end_of_call(stack, own)
        own.going = _Going(denoising, form, own.name, told) if own.is_repeated else None
        return told

    def _after_first(
        self,
        stack: StageStack,
        own: OwnGeneration,
        module: nn.Module,
        latents: object,
        result: object,
        error: BaseException | None,
    ) -> None:
        """Take the end of the first call of what may be a denoiser, by what it gave."""
        self._end_of_call(stack, own)(result, error)
        if error is None and not _has_form_of(latents, result):  # type: ignore[arg-type]
            self._refused.put(module, True)
            self._drop(stack)

    def _end_of_call(self, stack: StageStack, own: OwnGeneration) -> After:
        """What takes the end of a denoiser's call: the hot path."""
        clock = self.session.recorder.clock

        def told(_result: object, error: BaseException | None) -> None:
            own.calling = None
            own.last_ns = at_ns = clock()
            if error is not None:
                self._end(stack, error, is_now=True)
            elif stack.planned_steps is None and stack.denoising is not None:
                stack.denoising.returned(at_ns)

        return told

    def _before_helper(self, helper: object, args: Arguments, kwargs: Keywords) -> None:
        stack = self._stack()
        own: OwnGeneration | None = None if stack is None else stack.loop
        if stack is not None and own is not None and own.calling is None:
            own.uses("controlnet", helper)
            start_denoising(stack).prepared()

    def _before_schedule(self, scheduler: object, args: Arguments, kwargs: Keywords) -> After | None:
        if not self._is_meant(scheduler):
            return None
        stack = self._stack()
        if stack is not None:
            own: OwnGeneration | None = stack.loop
            if own is not None and own.has_denoised:
                self._end(stack)
                own = None
            (own or self._begin(stack)).uses("scheduler", scheduler)
        return self.session.observer(SchedulerObserver)._before_schedule(scheduler, args, kwargs)

    def _before_step(self, scheduler: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = current_stack(self.session)
        own: OwnGeneration | None = None if stack is None else stack.loop  # no pipeline's stack has one
        if stack is None or own is None or stack.denoising is None:
            return None
        if not (self.session.is_everywhere or self._is_meant(scheduler)):
            return None
        if own.stepper() is not scheduler:
            self._steps_by(stack, own, scheduler, args[2] if len(args) > 2 else kwargs.get("sample"))
        return stack.denoising.scheduler_began()

    def _steps_by(self, stack: StageStack, own: OwnGeneration, scheduler: object, sample: object) -> None:
        """Take a step of another scheduler than the one before: its own schedule says how many there will be.

        Several may have been set before the loop began. One that only follows another's steps (audio beside video) makes none.
        """
        own.uses("scheduler", scheduler)
        if stack.denoising is None or not stack.denoising.is_in_step:
            return
        if isinstance(sample, Tensor) and sample.dim() == len(own.latents):
            own.samples = int(sample.shape[0])
        is_first, own.stepper = own.stepper() is None, weakref.ref(scheduler)
        planned = _planned_by(scheduler)
        if is_first:
            if planned is not None and stack.planned_steps is not None:
                stack.planned_steps = planned
                stack.loop_steps = None if own.has_image else planned
            return
        own.handovers += 1
        if planned is None or stack.planned_steps is None:
            return
        if own.handovers == 1:
            stack.planned_steps += planned
        elif own.handovers == 2:  # they take turns
            stack.loop_steps = stack.planned_steps

    def _before_text(self, encoder: object, args: Arguments, kwargs: Keywords) -> After | None:
        stack = self._stack()
        if stack is None or stack.is_in(ENCODING_STAGE):
            return None
        own: OwnGeneration | None = stack.loop
        if own is not None and own.has_denoised:
            if not _is_complete(stack):  # a new prompt within a loop
                return None
            self._end(stack)
            own = None
        (own or self._begin(stack)).uses(_ENCODER_NAME, encoder)
        if self._is_heard(encoder):
            return None
        texts = self.session.observer(TextEncodingObserver)
        return texts._before_encoder(ENCODING_STAGE, _ENCODER_NAME, encoder, args, kwargs)

    def _before_vae(self, way: Any, vae: object, args: Arguments, kwargs: Keywords) -> After | None:
        if not self._is_meant(vae):
            return None
        stack = self._stack()
        if stack is None or stack.is_in(*VAE_STAGES.values()):
            return None
        own: OwnGeneration | None = stack.loop
        if own is not None and own.has_denoised and way == "encoding":
            self._end(stack)
            own = None
        if own is None and (way == "decoding" or not type(vae).__module__.startswith("diffusers.")):
            return None
        own = own or self._begin(stack)
        own.uses("vae", vae)
        own.has_image = own.has_image or way == "encoding"
        is_last = way == "decoding" and own.has_denoised and is_final_decode(stack)
        vaes = self.session.observer(VaeObserver)
        told = vaes._before(way, vae, args, kwargs)

        def after(result: object, error: BaseException | None) -> None:
            if told is not None:
                told(result, error)
            own.last_ns = self.session.recorder.clock()
            picture = first_tensor(result)
            if way == "decoding" and picture is not None:
                own.pictures = int(picture.shape[0])
            if is_last or error is not None:
                self._end(stack, error, is_now=True)

        return after

    def _trained_here(self, *_: object) -> None:
        """Take a step of an optimizer: what was called before it, with gradients, was trained."""
        if not self.works or self.session.is_over:
            return
        try:
            stack = self._stack()
            own: OwnGeneration | None = None if stack is None else stack.loop
            if stack is None or own is None or stack.denoising is None or not is_grad_enabled():
                return
            for part in own.parts.values():
                if isinstance(module := part(), nn.Module):
                    self._trained.put(module, True)
            self._drop(stack)
        except Exception as failure:  # noqa: BLE001 - this runs in the host's training
            self.failed(failure)

    def _is_heard(self, module: object) -> bool:
        """Whether it is a part of a pipeline that was called already, whose own observers hear it."""
        return any(
            self.session.observer(kind).hears_calls(module)
            for kind in (DenoiserObserver, TextEncodingObserver)
        )

    # The generation

    def _begin(self, stack: StageStack) -> OwnGeneration:
        global_states = self.guard.read("watch.own_loops", lambda: global_states_of({}))
        own = OwnGeneration(stack.enter(GENERATION), global_states=global_states)
        stack.size, stack.most_calls_a_step = None, 0
        stack.runs.clear()
        stack.loop = own
        stack.leave_loop = partial(self._end, stack)
        stack.steps, stack.lora_changes = 0, []
        return own

    def _end(self, stack: StageStack, error: BaseException | None = None, *, is_now: bool = False) -> None:
        """Close the generation.

        Args:
            stack: Where it is.
            error: What ended it.
            is_now: Whether it has just ended; otherwise it has when it was last seen at work.
        """
        own: OwnGeneration | None = stack.loop
        stack.loop = stack.leave_loop = stack.loop_steps = None
        if own is None:
            return
        stage, denoising = own.stage, stack.denoising
        is_no_loop = not own.has_denoised or not (own.is_repeated or own.is_one_step) or own.is_at_random
        if not is_now and own.has_denoised and (own.last == 0 or _is_complete(stack)):
            error = None  # it came when the loop was over
        last_ns = own.last_seen_ns()
        if last_ns is not None and error is None and not is_now:
            stage.end_at(last_ns)
            if denoising is not None:
                denoising.stage.end_at(last_ns)
        with self.session.own_work():
            stack.leave(stage, error)
            if is_no_loop or _is_within_hosts():
                stage.dissolve(drops=self._dropped if is_no_loop else ())
                return
            self._tell(stack, own, error)

    def _drop(self, stack: StageStack) -> None:
        """Take back the generation: it was none."""
        own: OwnGeneration | None = stack.loop
        stack.loop = stack.leave_loop = stack.loop_steps = None
        if own is not None:
            stack.leave(own.stage, None)
            own.stage.dissolve(drops=self._dropped)

    @property
    def _dropped(self) -> tuple[str, ...]:
        """What goes with a generation that was none; of a denoiser that is named, each call is wanted."""
        return (DENOISING,) if self.session.is_everywhere else ()

    def _tell(self, stack: StageStack, own: OwnGeneration, error: BaseException | None) -> None:
        """Put on the generation what is put on a pipeline's: what it used and was asked for."""
        read, stage = self.guard.read, own.stage
        parts = {name: part for name, held in own.parts.items() if (part := held()) is not None}
        facts = read("watch.own_loops", lambda: pipeline_facts(parts))
        stage.fact("call", _call_of(stack, own))
        unclear = _why_unclear(own)
        if unclear is not None:
            for denoising in own.denoisings:
                denoising.stage.fact(STEPS_UNCLEAR, unclear)
        if facts is not None:
            stage.fact("pipeline", replace(facts, class_name=OWN_LOOP))
        calls = self.session.observer(CallObserver)
        why_not = None if error is None else "the loop failed"
        encoders = () if facts is None else facts.of_role("text_encoder")
        seen = SeenInCall({}, encoders=encoders, steps=stack.steps, changes=stack.lora_changes)
        read("watch.request", lambda: tell_request(stage, self.session.recorder.clock))
        self.session.recorder.settle()
        read(
            "watch.recipe",
            lambda: calls._tell_recipe(
                stage, OwnParts(parts), seen, [], why_not, own.switches, own.global_states
            ),
        )


class LookOut:
    """Says once, while the program runs, that modules work of which nothing is recorded, and what to write.

    A thread looks now and then which module the program's threads are in. It ends as soon as there is a stage.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the thread; if the system gives none, nothing is said."""
        with suppress(RuntimeError):
            start_thread(own_thread("look-out", self._work), self._stop)

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def _work(self) -> None:
        seen: Counter[str] = Counter()
        for _ in range(_MOST_LOOKS):
            if self._stop.wait(_LOOK_SECONDS) or self._session.has_stages or self._session.is_over:
                return
            seen.update(modules_at_work())
            name, times = next(iter(seen.most_common(1)), ("", 0))
            if times >= _LOOKS_TO_BE_SURE:
                log_quietly(_log, _UNRECOGNISED, name)
                return


def modules_at_work() -> set[str]:
    """The class of the outermost module that each thread is in, but for those in training."""
    names = set()
    for frame in sys._current_frames().values():
        outermost: nn.Module | None = None
        place: FrameType | None = frame
        while place is not None:
            if place.f_code is _MODULE_CALL:
                held = place.f_locals.get("self")
                outermost = held if isinstance(held, nn.Module) else outermost
            place = place.f_back
        if outermost is not None and not outermost.training:
            names.add(type(outermost).__name__)
    return names


def _planned_by(scheduler: object) -> int | None:
    """How many steps a scheduler's schedule has; None: that is not known."""
    timesteps = getattr(scheduler, "timesteps", None)
    return len(timesteps) if isinstance(timesteps, Tensor) and timesteps.dim() == 1 else None


def _is_each_once(scheduler: object) -> bool:
    """Whether no timestep of a schedule on the CPU follows itself, as those of Heun's method do."""
    timesteps = getattr(scheduler, "timesteps", None)
    if not (isinstance(timesteps, Tensor) and timesteps.is_cpu and timesteps.dim() == 1):
        return False
    return not bool((timesteps[1:] == timesteps[:-1]).any())


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)


def _why_unclear(own: OwnGeneration) -> str | None:
    """Why the steps may be those of several loops that went on in turn; None: they are those of one.

    A scheduler may let timesteps go back by itself.
    """
    if any(denoising.takes_turns for denoising in own.denoisings):
        names = dict.fromkeys(name for denoising in own.denoisings for name in denoising.calls)
        return f"{' and '.join(names)} were called in turn"
    if own.handovers > 1:
        schedulers = [name for name in own.parts if name.startswith("scheduler")]
        return f"{' and '.join(schedulers)} made steps in turn"
    stepped = sum(denoising.stepped for denoising in own.denoisings)
    if not stepped:
        return "timesteps went back and forth" if own.turns else None
    has_again = own.last is not None and own.changes + 1 < stepped
    return (
        "timesteps came again that the schedule has once"
        if has_again and _is_each_once(own.stepper())
        else None
    )


def _is_complete(stack: StageStack) -> bool:
    """Whether the open denoising has made all steps of the schedule."""
    denoising, planned = stack.denoising, stack.planned_steps
    return denoising is None or (planned is not None and denoising.stepped >= planned)


def _is_within_hosts() -> bool:
    """Whether the host has a generation of its own here, around what has just been closed."""
    return any(frame.scope.name == GENERATION and not _is_of_a_watch(frame.scope) for frame in frames_here())


def _has_another_in(own: LiveStage) -> bool:
    """Whether the host has opened a generation of its own inside this one."""
    for frame in frames_here():
        if own.is_of(frame.scope):
            return False
        if frame.scope.name == GENERATION and not _is_of_a_watch(frame.scope):
            return True
    return False


def _is_of_a_watch(scope: Scope) -> bool:
    """Whether a watch has opened it in this context: another one around this, too."""
    return any(stage.is_of(scope) for stack in STACKS.get() for _, stage in stack.open)


def _is_counted_by_host() -> bool:
    """Whether the host records this loop itself: it has a denoising of its own open here, or a step."""
    frame = CURRENT.get()
    while frame is not None:
        scope = frame.scope
        if frame.is_open and (scope.in_step or scope.name == DENOISING) and not _is_of_a_watch(scope):
            return True
        frame = frame.outer
    return False


def _call_of(stack: StageStack, own: OwnGeneration) -> CallFacts:
    """What an own loop shows of what it was asked for."""
    size = stack.size
    if size is None and len(own.latents) == 4 and own.latents[1] in _PICTURE_CHANNELS:
        size = own.latents[-2], own.latents[-1]
    batch = own.latents[0] if own.latents else None
    calls = sum(denoising.calls.total() for denoising in own.denoisings)
    steps = sum(denoising.steps for denoising in own.denoisings)
    # A solver of second order calls twice a step, too, but for the first step or the last.
    is_guided = stack.most_calls_a_step > 1 and calls == steps * stack.most_calls_a_step
    guidance = stack.most_calls_a_step if is_guided else None
    # Guidance doubles what the denoiser is given at once, and neither the scheduler nor the VAE.
    samples = own.pictures or own.samples
    if samples and batch and batch % samples == 0:
        guidance = guidance or batch // samples
        batch = samples
    return CallFacts(
        num_inference_steps=steps or None,
        guidance_batches=guidance,
        height=None if size is None else size[0],
        width=None if size is None else size[1],
        batch_size=batch,
        has_image=own.has_image,
    )
