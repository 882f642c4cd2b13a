"""What failed, in words of our own: they name dtypes, shapes, sizes and devices, and quote nothing.

Messages of exceptions may quote prompts; diffusers' own do. So `cause_in_words` reads a message for what it recognises
and writes that anew: of the message itself only numbers and known names are in the answer. `raised_in` reads a stack trace
in the same way.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from sigmascope.files import CELL, short_path
from sigmascope.records.run import ExceptionDetails, Stage
from sigmascope.units import format_size

OK: Final = "ok"
FAILED: Final = "failed"
RAN_OUT: Final = "out of memory"
INTERRUPTED: Final = "interrupted"
OUTCOMES: Final = (OK, FAILED, RAN_OUT, INTERRUPTED)
"""How a run, or a generation in it, can end."""
_RAN_OUT_BY_TYPE: Final = re.compile(r"\w*MemoryError(?::|$)")
"""How an error begins that says by its type alone that memory ran out."""
_INTERRUPTIONS: Final = ("KeyboardInterrupt", "SystemExit", "InterruptProcessingException", "CancelledError")
"""Exceptions by which a run is ended on purpose."""
OUT_OF_MEMORY: Final = re.compile(
    r"out of memory(?! bounds)"  # CUDA, HIP, MPS and their drivers
    r"|Allocation on device"  # CUDA's own asynchronous allocator, which ComfyUI takes
    r"|DefaultCPUAllocator"  # "can't allocate memory", on Windows "not enough memory"
    r"|can(?:'|no)t allocate memory"
    r"|not enough memory"
    r"|Invalid buffer size"  # MPS, for a buffer above what Metal allows
    r"|ALLOC(?:ATION)?_FAILED"  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER, cuFFT, cuRAND, hipBLAS
    r"|StatusAllocFailed|rocblas_status_memory_error"  # MIOpen, rocBLAS
    r"|OUT_OF_(?:DEVICE|HOST)_MEMORY"  # Level Zero, OpenCL
    r"|bad allocation|bad_alloc",
    re.IGNORECASE,
)
NO_ROOM_TO_WORK: Final = re.compile(
    r"CUDNN_STATUS_(?:NOT_SUPPORTED|NOT_INITIALIZED|INTERNAL_ERROR)"
    r"|unable to find an engine to execute"  # PyTorch, when each of cuDNN's algorithms has failed
    r"|could not create a primitive(?! desc)"  # oneDNN, on the CPU
    r"|_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR),? when calling `cu\w+Create\("
)
"""Libraries that found no memory for their handle, kernels or workspace, and name another error.

They say the same of tensors that are too large or not contiguous, and where they are not installed properly.
"""
_SIZE: Final = r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?([KMGT]i?B|bytes)"
_SIZES: Final = {
    "asked for": re.compile(rf"tried to allocate {_SIZE}", re.IGNORECASE),
    "free": re.compile(rf"{_SIZE} (?:is )?free", re.IGNORECASE),
}
"""What PyTorch's allocators say of an allocation that failed."""
_UNITS: Final = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_DTYPES: Final = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
    "bool": "bool",
}
"""As C++ says them, and as Python does; other names are those of Python already, or not known."""
_KNOWN_DTYPES: Final = re.compile(r"(?:b?float|int|uint|complex)[0-9]+(?:_e[0-9]m[0-9][a-z]*)?")

# What a place in a pattern of `_FAILURES` stands for.
_KINDS: Final = {
    "n": r"(-?[0-9]{1,40}(?:\.[0-9]{1,6})?)",
    "shape": r"(?:torch\.Size\()?[\[(]([0-9, ]{0,60})[\])]\)?",
    "sides": r"([0-9]{1,12}x[0-9]{1,12})",
    "dtype": r"(?:struct )?(?:torch\.|c10::)*(?:cuda\.)?(\w{3,20})",
    "device": r"'?((?:cpu|cuda|mps|xpu|meta|hpu|npu|xla)(?::[0-9]{1,3})?)'?",
}

_FAILURES: Final = (
    # PyTorch
    (r"m(?:at)?1 and m(?:at)?2 (?:must|to) have the same dtype, but got:? <dtype> (?:and|!=) <dtype>",
     "a matrix of {0} is multiplied with one of {1}"),
    (r"m(?:at)?1 and m(?:at)?2 (?:must|to) have the same dtype, but got:? <dtype>!= <dtype>",
     "a matrix of {0} is multiplied with one of {1}"),
    (r"mat1 and mat2 shapes cannot be multiplied \(<sides> and <sides>\)",
     "a matrix of {0} cannot be multiplied with one of {1}"),
    (r"Input type \(<dtype>\) and (?:bias|weight) type \(<dtype>\) should be the same",
     "the input is {0}, the weights are {1}"),
    (r"expected scalar type <dtype> but found <dtype>", "expected {0}, found {1}"),
    (r"same dtype, but got query\.dtype: <dtype> key\.dtype: <dtype>,? and value\.dtype: <dtype>",
     "attention got queries of {0}, keys of {1} and values of {2}"),
    (r"Expected tensor for argument #[0-9]+ '\w+' to have one of the following scalar types: Long, Int; but got <dtype>",
     "the indices are {0}, expected whole numbers"),
    (r"not implemented for '<dtype>'", "this operation does not exist for {0} on this device"),
    (r"weight of size <shape>, expected input<shape> to have <n> channels, but got <n> channels",
     "the input ({1}) has {3} channels, the weights ({0}) expect {2}"),
    (r"size of tensor a \(<n>\) must match the size of tensor b \(<n>\) at non-singleton dimension <n>",
     "sizes differ: {0} and {1} in dimension {2}"),
    (r"Sizes of tensors must match except in dimension <n>\. Expected size <n> but got size <n>",
     "tensors that are joined along dimension {0} differ in another one: {1} and {2}"),
    (r"expanded size of the tensor \(<n>\) must match the existing size \(<n>\) at non-singleton dimension <n>",
     "sizes differ: {0} and {1} in dimension {2}"),
    (r"shape '<shape>' is invalid for input of size <n>", "{1} elements do not fit the shape {0}"),
    (r"normalized_shape=<shape>, expected input with shape .{0,60}, but got input of size<shape>",
     "a normalization over {0} got {1}"),
    (r"got weight of shape <shape> and input of shape <shape>",
     "weights of shape {0} do not fit an input of shape {1}"),
    (r"input size per channel: \(([0-9 x]{1,40})\)\. Kernel size: \(([0-9 x]{1,40})\)",
     "the input ({0}) is smaller than the kernel ({1})"),
    (r"at least two devices, <device>(?: and|,) <device>", "tensors are on {0} and {1}"),
    (r"but got \w+ is on <device>, different from other tensors on <device>", "tensors are on {0} and {1}"),
    (r"Tensor on device <device> is not on the expected device <device>", "a tensor is on {0}, expected on {1}"),
    (r"Expected a <device> device type for generator but found <device>", "the generator is on {1}, expected on {0}"),
    (r"Cannot generate a <device> tensor from a generator of type <device>", "the generator is on {1}, expected on {0}"),
    (r"Cannot copy out of meta tensor", "weights were never loaded: they are on the meta device"),
    (r"index <n> is out of bounds for (?:dimension|axis) <n> with size <n>",
     "index {0} is outside of dimension {1}, which has {2}"),
    (r"index out of range in self", "an index is outside of the embedding, as of a token that the encoder does not know"),
    (r"copying a param with shape <shape> from checkpoint, the shape in current model is <shape>",
     "a weight of the file has shape {0}, that of the model {1}"),
    (r"Missing key\(s\) in state_dict", "the file lacks weights of the model"),
    (r"Unexpected key\(s\) in state_dict", "the file has weights that the model lacks"),
    (NO_ROOM_TO_WORK.pattern, "out of memory, or no kernel for this input"),
    (r"no kernel image is available for execution", "this build of PyTorch has no kernels for this GPU"),
    (r"device-side assert triggered", "an index was out of range on the GPU"),
    (r"illegal memory access", "the GPU read memory that is not its own"),
    (r"Torch not compiled with CUDA enabled", "this build of PyTorch is without CUDA"),
    (r"No CUDA GPUs are available|Found no NVIDIA driver", "there is no GPU that CUDA can use"),
    # Python, of the functions that a pipeline calls
    (r"'NoneType' object has no attribute 'pop'",
     "there is None in place of a dict: a callback_on_step_end must return one"),
    (r"'\w{1,80}' object has no attribute 'pop'",
     "there is something else in place of a dict: a callback_on_step_end must return one"),
    (r"takes (?:from [0-9]+ to )?<n> positional arguments? but <n> (?:positional arguments? .{0,80})?(?:was|were) given",
     "a function that takes {0} arguments got {1}"),
    (r"missing <n> required (?:positional|keyword-only) arguments?", "a function was called without {0} of its arguments"),
    (r"got an unexpected keyword argument", "a function got an argument that it does not take"),
    # Files of models, as diffusers, transformers and huggingface_hub miss them; their messages quote paths
    (r"[nN]o file named model_index\.json", "the folder has no model_index.json, so it is not a pipeline"),
    (r"[nN]o file named config\.json|not appear to have a file named config\.json", "the model has no config.json"),
    (r"[nN]o file named (?:diffusion_pytorch_model|pytorch_model|model)\.|not appear to have a file named "
     r"(?:diffusion_pytorch_model|pytorch_model|model)\.", "the model has no file of weights"),
    (r"[nN]o file named .{1,300} found in directory|not appear to have a file named", "the model lacks a file"),
    (r"neither a valid local path nor a valid repo id|Repo id must (?:be|use)"
     r"|not the path to a directory containing|Please set it to a valid URL",
     "there is no such file or folder, and it is not a name on the hub"),
    (r"not a local folder and is not a valid model identifier|Repository Not Found for url",
     "there is no such folder, and no such public model on the hub"),
    (r"Cannot access gated repo|Access to model .{1,200} is restricted", "the model on the hub needs permission"),
    (r"[cC]annot find an appropriate cached snapshot|[cC]annot find the requested files in the (?:disk|local) cache"
     r"|[cC]ouldn't connect to '[^']{1,200}' to load",
     "the model is no folder here and not in the hub's local cache, and the hub was not reached"),
    (r"variant=.{1,40}, but no such modeling files are available", "the model has no files of this variant"),
    (r"offline mode, you must specify a `weight_name`", "there is no such file, and offline no weight_name to look for"),
    # diffusers; what it says of prompts quotes them
    (r"`callback_on_step_end_tensor_inputs` has to be in",
     "callback_on_step_end_tensor_inputs names a tensor that this pipeline does not hand out"),
    (r"`height` and `width` have to be divisible by <n> but are <n> and <n>",
     "height {1} and width {2} must be multiples of {0}"),
    (r"list of generators of length <n>, but requested an effective batch size of <n>",
     "{0} generators were given for a batch of {1}"),
    (r"Unexpected latents shape, got <shape>, expected <shape>", "the latents have shape {0}, expected {1}"),
    (r"same shape when passed directly, but got: `prompt_embeds` <shape> != `negative_prompt_embeds` <shape>",
     "prompt_embeds have shape {0}, negative_prompt_embeds {1}"),
    (r"`negative_prompt`: .*has batch size <n>, but `prompt`: .*has batch size <n>",
     "{0} negative prompts were given for {1} prompts"),
    (r"Cannot forward both `(?:negative_)?prompt(?:_[23])?`", "a prompt and its embeddings were both given"),
    (r"Cannot leave both `prompt` and `prompt_embeds` undefined", "neither a prompt nor prompt_embeds were given"),
    (r"`prompt(?:_[23])?` has to be of type", "the prompt is neither text nor a list"),
    (r"`(?:negative_)?pooled_prompt_embeds` also have to be passed", "prompt_embeds were given without the pooled ones"),
    (r"`max_sequence_length` cannot be greater than <n> but is <n>", "max_sequence_length {1} is above {0}"),
    (r"value of strength should in? ?(?:be )?(?:in )?\[0\.0, 1\.0\] but is <n>", "strength {0} is not between 0 and 1"),
    (r"After adjusting the num_inference_steps by strength parameter: <n>.{0,200}? is <n> which is < 1",
     "strength {0} leaves {1} steps"),
    (r"`num_inference_steps`: <n> cannot be larger than `self\.config\.train_timesteps`: <n>",
     "{0} steps are more than the {1} that the model was trained with"),
    (r"does not support custom (?:timestep|sigmas) schedules", "the scheduler takes no custom timesteps or sigmas"),
    (r"Cannot duplicate `image` of batch size <n> to <n> text prompts", "{0} pictures cannot be shared out to {1} prompts"),
    (r"expects <n> but received `num_channels_latents`: <n> .{0,200}?= <n>",
     "the denoiser expects {0} channels and gets {2}"),
    (r"added time embedding vector of length <n>, but a vector of <n> was created",
     "the denoiser expects an added embedding of {0} numbers and gets {1}"),
    (r"Only one of `timesteps` or `sigmas` can be passed", "timesteps and sigmas were both given"),
    (r"not in the list of present adapters", "the pipeline has no adapter of this name"),
    (r"Target modules .* not found in the base model", "the model has no layer that the LoRA is for"),
)  # fmt: skip
"""How messages read, and what that means; `{0}` is what stands at the first place."""


def _compiled(pattern: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    kinds = tuple(re.findall(r"<(\w+)>", pattern))
    text = re.sub(r"<(\w+)>", lambda place: _KINDS[place[1]], pattern)
    return re.compile(text, re.DOTALL), kinds


@cache
def _known() -> list[tuple[re.Pattern[str], tuple[str, ...], str]]:
    """`_FAILURES` as patterns, which are made when something has failed."""
    return [(*_compiled(pattern), words) for pattern, words in _FAILURES]


_LONGEST_MESSAGE: Final = 20_000


_OWN_VALUE: Final = r"(?:-?[\w.:×]+|a scalar|another dtype)"
_OWN_SIZE: Final = r"[0-9.e+]+ (?:bytes|KB|MB|GB)"


@cache
def _own() -> re.Pattern[str]:
    """What this module says, and what `probes.reading.known_cause` says besides."""
    return re.compile(
        "|".join(
            [
                rf"out of memory(?:, {_OWN_SIZE} asked for)?(?:, {_OWN_SIZE} free)?",
                "NaN or Inf",
                *(re.escape(os.strerror(number)) for number in errno.errorcode),
                *(re.sub(r"\\{[0-9]\\}", lambda _: _OWN_VALUE, re.escape(words)) for _, words in _FAILURES),
            ]
        )
    )


_ERRNO: Final = re.compile(r"\[Errno ([0-9]{1,4})\]")


def cause_in_words(message: str) -> str | None:
    """What a message says, in words of our own; None if the message is unknown. Our own words stay as they are."""
    text = message[:_LONGEST_MESSAGE].removeprefix(": ").strip()
    if _own().fullmatch(text):
        return text
    number = _ERRNO.match(text)
    if number is not None and int(number[1]) in errno.errorcode:
        return os.strerror(int(number[1]))
    if OUT_OF_MEMORY.search(text):
        return memory_in_words(text)
    for pattern, kinds, words in _known():
        match = pattern.search(text)
        if match is not None:
            kinds_of_all = kinds or ("sides",) * len(match.groups())
            return words.format(*map(_value, kinds_of_all, match.groups()))
    return None


def _value(kind: str, text: str) -> str:
    if kind == "dtype":
        name = text.lower().removesuffix("tensor").removesuffix("type").removeprefix("cpu")
        known = _DTYPES.get(name, name)
        return known if known == "bool" or _KNOWN_DTYPES.fullmatch(known) else "another dtype"
    if kind == "shape":
        return "×".join(re.findall(r"[0-9]+", text)) or "a scalar"
    return text.replace(" ", "").replace("x", "×") if kind == "sides" else text


def memory_in_words(message: str) -> str:
    """That memory ran out, with how much was asked for and free where the message says it."""
    sizes = [f"{size} {what}" for what, pattern in _SIZES.items() if (size := _size_in(message, pattern))]
    return ", ".join(["out of memory", *sizes])


def _size_in(message: str, pattern: re.Pattern[str]) -> str | None:
    """A number of bytes that the message gives, rounded and written anew."""
    size = pattern.search(message)
    return None if size is None else format_size(round(float(size[1]) * _UNITS[size[2][0].upper()]))


_HEADER: Final = "Traceback (most recent call last):"
_GROUP_HEADER: Final = f"Exception Group {_HEADER}"
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
CAUSED, MEANWHILE = _CHAINED
_MARGIN: Final = re.compile(r"( +)(?:\| ?|\+ (?=Exception Group ))")
_MEMBER: Final = re.compile(r" +\+[+-]*-{16} (?:[0-9]+|\.\.\.) -{16}")
_MEMBERS_END: Final = re.compile(r" +\+-{36}")
_STRUCTURE: Final = re.compile(
    rf"(?m)^(?=(?: *[|+] ?)?(?:Exception Group )?{re.escape(_HEADER)}|(?:{'|'.join(_CHAINED)})$| *\+-)"
)
_FRAME: Final = re.compile(r'  File "([^"\n]*\.pyx?|<[\w .-]+>)", line ([0-9]+), in ([\w.<>]+)')
_LEFT_OUT: Final = re.compile(r"  \[[0-9]+ more\]")
_KIND: Final = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Group)(?=: |$)")


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception of a stack trace.

    Attributes:
        kind: Its type.
        cause: What is known of it, in words of our own; None: nothing.
        frames: From the outermost to where it was raised: "file:line in function".
        link: What Python says between it and the one that followed; None: it is the last.
        depth: 0, or in how many exception groups it is.
    """

    kind: str
    cause: str | None
    frames: tuple[str, ...]
    link: str | None = None
    depth: int = 0

    def __str__(self) -> str:
        """Its type and what is known of it."""
        return self.kind if self.cause is None else f"{self.kind}: {self.cause}"


def quoted(message: str) -> str:
    """A message as a stack trace may hold it: lines of it that read like the trace's own are set in."""
    return _STRUCTURE.sub("    ", message)


_KERNEL: Final = ("ipykernel/", "ipykernel_launcher.py:", "IPython/")


def raised_in(details: ExceptionDetails) -> list[Raised]:
    """The exceptions of a stack trace, in the order in which they were raised, without any word of their messages.

    Of a group, its members follow it. Nothing if a message quotes a stack trace and cannot be told apart from it.
    """
    lines = [(margin[1], line[margin.end() :]) if (margin := _MARGIN.match(line)) else ("", line)
             for line in details.traceback.splitlines()]  # fmt: skip
    whole = details.traceback.splitlines()
    said = _place_of_message(details.message, [line for _, line in lines])
    if said is None:
        return []
    found: list[Raised] = []
    begins = 0  # of the exception that is being read
    expected = True  # that one begins here
    for number, (_, line) in enumerate(lines):
        if number in said:
            continue
        if _MEMBER.fullmatch(whole[number]) or _MEMBERS_END.fullmatch(whole[number]):
            found += _exception(lines[begins:number])
            begins, expected = number + 1, True
        elif line in _CHAINED:
            found += _exception(lines[begins:number], line)
            begins, expected = number + 1, True
        elif line in (_HEADER, _GROUP_HEADER):
            if not expected:
                return []
            begins, expected = number, False
        elif line.strip():
            expected = False
    return found + _exception(lines[begins:])


def _place_of_message(message: str, lines: Sequence[str]) -> range | None:
    """Which lines are the message; none if it is of one line; None: it reads like a trace and is not found."""
    first, *rest = message.splitlines() or [""]
    for spelling in (rest, quoted(message).splitlines()[1:]):
        size = len(spelling)
        for number, line in enumerate(lines):
            if (
                rest
                and line.endswith(f": {first}")
                and list(lines[number + 1 : number + 1 + size]) == spelling
            ):
                return range(number + 1, number + 1 + size)
    own = [line for line in rest if _STRUCTURE.match(line)]
    return (
        range(0) if {quoted(line) for line in own} <= set(lines) else None
    )  # set in: nothing reads like a trace


def _exception(lines: Sequence[tuple[str, str]], link: str | None = None) -> list[Raised]:
    """The exception that these lines are about, each after its margin; nothing if they are empty."""
    texts = [line for _, line in lines]
    has_header = any(line in (_HEADER, _GROUP_HEADER) for line in texts[:1])
    depth = max(len(lines[0][0]) // 2 - 1, 0) if lines else 0
    if not (has_header or (depth and any(map(str.strip, texts)))):
        return []
    body = texts[1:] if has_header else texts
    end = next((number for number, line in enumerate(body) if line[:1].strip()), len(body))
    told = [line for line in body[end:] if line.strip()]
    kind = _KIND.match(told[0]) if told else None
    cause = cause_in_words("\n".join(told)[kind.end() :]) if kind is not None else None
    frames = _of_program(tuple(filter(None, map(_place, body[:end]))))
    return [Raised(kind[0] if kind else "an error", cause, frames, link, depth)]


def _of_program(frames: tuple[str, ...]) -> tuple[str, ...]:
    """The frames without those of a notebook's kernel, which lead to each of its cells."""
    first = next((number for number, frame in enumerate(frames) if frame.startswith(f"{CELL}:")), 0)
    return frames[first:] if any(frame.startswith(_KERNEL) for frame in frames[:first]) else frames


def _place(line: str) -> str | None:
    frame = _FRAME.fullmatch(line)
    if frame is not None:
        return f"{short_path(frame[1])}:{frame[2]} in {frame[3]}"
    return line.strip() if _LEFT_OUT.fullmatch(line) else None


def members_in_words(raised: Iterable[Raised]) -> str | None:
    """What is known of the exceptions in groups, each once; None: there is no group."""
    members = dict.fromkeys(
        str(one) for one in raised if one.depth and one.link is None and not one.kind.endswith("Group")
    )
    return ", ".join(members) or None


def trace_without_words(raised: Sequence[Raised]) -> str:
    """A stack trace with types, places and what is known, as Python writes one: no message and no line of source."""
    texts = []
    members: dict[int, int] = {}
    for number, one in enumerate(raised):
        following = raised[number + 1].depth if number + 1 < len(raised) else 0
        before = raised[number - 1] if number else None
        is_group = following > one.depth
        margin = f"{'  ' * (one.depth + 1)}| " if one.depth or is_group else ""
        if one.depth and (before is None or before.depth != one.depth or before.link is None):
            members[one.depth] = (
                1 if before is None or before.depth < one.depth else members.get(one.depth, 0) + 1
            )
            branch = "+-+" if before is None or before.depth < one.depth else "  +"
            texts.append(f"{'  ' * one.depth}{branch}{'-' * 16} {members[one.depth]} {'-' * 16}")
        places = [
            re.sub(r"(.+):([0-9]+) in (.+)", r'  File "\1", line \2, in \3', frame) for frame in one.frames
        ]
        places = [place if place.startswith("  ") else f"  {place}" for place in places]
        header = _GROUP_HEADER if is_group else _HEADER
        block = [header, *places, str(one)] if places else [str(one)]
        block += ["", one.link, ""] if one.link else []
        texts += [f"{margin}{line}".rstrip() for line in block]
        if is_group and not one.depth and places:
            texts[-len(block)] = f"  + {header}"
        texts += [f"{'  ' * (depth + 1)}+{'-' * 36}" for depth in range(one.depth, following, -1)]
    return "".join(f"{text}\n" for text in texts)


def outcome_of(stages: Iterable[Stage], *, complete: bool = True) -> str:
    """How a run ended: by the stages that lie in no other, since what failed inside may have been caught.

    Args:
        stages: Those that lie in no other.
        complete: Whether the record was made to its end.

    Returns:
        One of `OUTCOMES`.
    """
    failed = [stage for stage in stages if not stage.success]
    for stage in failed:
        if any(OUT_OF_MEMORY.search(error) or _RAN_OUT_BY_TYPE.match(error) for error in _errors(stage)):
            return RAN_OUT
    if any(error.startswith(_INTERRUPTIONS) for stage in failed for error in _errors(stage)):
        return INTERRUPTED
    if failed:
        return FAILED
    return OK if complete else INTERRUPTED


def _errors(stage: Stage) -> Iterator[str]:
    if stage.error is not None:
        yield stage.error
    if stage.exception_details is not None:
        yield stage.exception_details.type.rpartition(".")[2]
        yield f"{stage.exception_details.type}: {stage.exception_details.message}"
