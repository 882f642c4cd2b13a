"""What decides a call's output beside its arguments and weights: switches of PyTorch, modes, hooks, patched methods.

`surroundings_of` reads it at the end of a call, by name, as short texts that two runs can be compared by. It calls nothing of the
host's, reads no weight (but a scheduler's short tables), and waits for no accelerator. Of the environment it reads a fixed list of names, none of which
holds a secret.
"""

import functools
import inspect
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import contains, itemgetter
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, NoneType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from sigmascope.analysis.recipe import DYNAMIC
from sigmascope.integrations.diffusers.arguments import place_of
from sigmascope.integrations.diffusers.recipe import models_in
from sigmascope.probes.models import components_of
from sigmascope.probes.module_tree import OF_ADAPTERS, ModuleTree, tree_of
from sigmascope.probes.reading import attempt

ENVIRONMENT: Final = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_CACHE_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES",
    "DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_GGUF_CUDA_KERNELS", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA",
    "FLASH_ATTENTION_TRITON_AMD_ENABLE", "GLIBC_TUNABLES", "GOMP_CPU_AFFINITY", "HF_ENABLE_PARALLEL_LOADING",
    "HF_HUB_OFFLINE", "HF_PARALLEL_LOADING_WORKERS", "HIP_VISIBLE_DEVICES", "HSA_ENABLE_SDMA",
    "HSA_OVERRIDE_GFX_VERSION", "KMP_AFFINITY", "KMP_BLOCKTIME", "LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_CONF",
    "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_", "MIOPEN_FIND_ENFORCE",
    "MIOPEN_FIND_MODE", "MKL_CBWR", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_TUNABLEOP_ENABLED",
    "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_COMPILE_DISABLE", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "USE_HUB_KERNELS",
)  # fmt: skip
"""Switches of the libraries, and of the C library's memory, that change speed or numbers."""
_PATHS: Final = "LD_PRELOAD"
"""Of its values the names of the files are kept."""
_OF_TOKENIZER: Final = ("model_max_length", "padding_side", "truncation_side", "pad_token")
_TOKENS_LOOKED_AT: Final = 64
_OF_MODULE: Final = (
    "padding_mode",
    "eps",
    "scale",
    "scaling",
    "rescale_output_factor",
    "upcast_attention",
    "upcast_softmax",
    "num_groups",
    "slice_size",
    "_chunk_size",
)
"""Settings that scripts and pipelines write on a model's modules, and on what calculates their attention."""
_PROCESSOR: Final = "processor"
_PLAIN: Final = (bool, int, float, str)
_SETTINGS: Final = frozenset((*_PLAIN, NoneType, list, tuple))
_ACTIVATIONS: Final = "torch.nn.modules.activation"
_OF_TORCH: Final = frozenset(("torch", "torch.nn.functional"))
"""Modules that hold functions of PyTorch alone."""
_OWN_FOLDER: Final = str(PurePath(__file__).parents[2])
_STANDARD: Final = sysconfig.get_path("stdlib") + os.sep
_INSTALLED: Final = tuple({sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep})
_TYPED_IN: Final = ("<stdin>", "<ipython")
_LONGEST: Final = 60
_MOST_NAMED: Final = 4
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
_OWN: Final = "sigmascope."
_LIBRARIES: Final = ("torch", "diffusers", "transformers", "accelerate", "peft")
"""Their versions are in every record."""
_FACTORS: Final = ("scaling_factor", "shift_factor", "force_upcast")
"""Of a VAE's configuration: what pipelines multiply latents by, and whether they decode them in float32."""
_NUMBERS: Final = ("init_noise_sigma",)
_TABLES: Final = ("betas", "alphas_cumprod")
"""What a scheduler made of its configuration, from which each schedule is taken."""
_CPU: Final = torch.device("cpu")
_FREEU: Final = ("s1", "s2", "b1", "b2")
"""What diffusers' `enable_freeu` sets on the blocks of a U-Net's way up."""
_WITHOUT_BLOCKS: Final = frozenset(("torch", "peft"))


def _autocast() -> str:
    kinds = [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]
    return ", ".join(f"{kind} {_short(torch.get_autocast_dtype(kind))}" for kind in kinds) or "off"


def _attention_kernels() -> str:
    backends = torch.backends.cuda
    names = ("flash", "mem_efficient", "math", "cudnn")
    return " + ".join(name for name in names if getattr(backends, f"{name}_sdp_enabled", bool)()) or "none"


def _precisions(backend: Any) -> str:
    """What oneDNN calculates float32 in, where that is not what PyTorch chooses by itself."""
    parts = {"all": backend, **{part: getattr(backend, part, None) for part in ("matmul", "conv", "rnn")}}
    told = {name: getattr(part, "fp32_precision", "none") for name, part in parts.items()}
    return (
        ", ".join(f"{name} {value}" for name, value in told.items() if value not in ("none", "ieee"))
        or "default"
    )


_SMALLEST: Final = sys.float_info.min
"""Half of it is 0 where the processor flushes denormal numbers."""
_SWITCHES: Final[Mapping[str, Callable[[], object]]] = {
    "autocast": _autocast,
    "gradients": lambda: "inference mode" if torch.is_inference_mode_enabled() else torch.is_grad_enabled(),
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "TF32 matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
    "TF32 cuDNN": lambda: torch.backends.cudnn.allow_tf32,
    "cuDNN benchmark": lambda: torch.backends.cudnn.benchmark,
    "cuDNN deterministic": lambda: torch.backends.cudnn.deterministic,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "oneDNN": lambda: torch.backends.mkldnn.enabled,
    "oneDNN precision": lambda: _precisions(torch.backends.mkldnn),
    "flush denormals": lambda: _SMALLEST / 2 == 0.0,
    "processor kernels": torch.backends.cpu.get_cpu_capability,
    "processors allowed": lambda: len(os.sched_getaffinity(0)),
    "SDPA kernels": _attention_kernels,
    "default dtype": lambda: _short(torch.get_default_dtype()),
}


def switches_now() -> dict[str, str]:
    """PyTorch's switches in this context, by name. Never raises; what cannot be read is left out."""
    readings = {name: attempt(read) for name, read in _SWITCHES.items()}
    return {name: _short(reading.value) for name, reading in readings.items() if reading.reason is None}


def surroundings_of(pipeline: object, switches: Mapping[str, str] | None = None) -> dict[str, str]:
    """What decides the output of a call of this pipeline, by name. Never raises; what cannot be read is left out.

    Args:
        pipeline: What was called.
        switches: As they were in the call (`switches_now`), where they may be others by now; None: as they are.
    """
    found = dict(switches_now() if switches is None else switches)
    found |= {
        name: _switch(name, value) for name in ENVIRONMENT if (value := os.environ.get(name)) is not None
    }
    models = attempt(lambda: models_in(pipeline)).value or {}
    found["train mode"] = (
        ", ".join(name for name, module in models.items() if module.training is True) or "none"
    )
    for name, module in models.items():
        found |= attempt(lambda name=name, module=module: dict(_of_model(name, module))).value or {}  # type: ignore[misc]
    found |= attempt(lambda: dict(_of_compilers(pipeline, models))).value or {}
    found |= attempt(lambda: dict(_of_tokenizers(pipeline))).value or {}
    found |= attempt(lambda: dict(_of_parts(pipeline))).value or {}
    found |= attempt(lambda: dict(_of_pipeline(pipeline))).value or {}
    replaced = attempt(lambda: _in_libraries(pipeline, models))
    if replaced.value is not None:
        found["library functions"] = _in_words(replaced.value)
    patched = attempt(lambda: dict(_patched(pipeline)))
    if patched.value is not None:
        found["pipeline methods"] = _in_words(patched.value)
    found |= attempt(lambda: dict(_of_everywhere())).value or {}
    return found


def _switch(name: str, value: str) -> str:
    return _short(
        ", ".join(PurePath(path).name for path in re.split("[ :]+", value)) if name == _PATHS else value
    )


def _short(value: object) -> str:
    text = str(value).removeprefix("torch.")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _of_model(name: str, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Hooks and methods on a model's modules that neither it nor this package put there, and FreeU."""
    tree = tree_of(model)
    if hasattr(type(model), "enable_cache"):
        yield f"{name} cache", _in_plain_words(getattr(model, "_cache_config", None))
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(chosen, str):
        yield f"{name} attention", chosen
    hooks: dict[str, int] = {}
    patched: dict[str, int] = dict(_patched(model))
    freeu: dict[str, int] = {}
    for hook in chain.from_iterable(own[holder].values() for own in tree.hooked for holder in _HOOKS):
        _count(hooks, _name_of(hook))
    for own in tree.rerouted:
        if "forward" in own and own is not vars(model):
            _count(patched, _method("forward", own["forward"]))
    blocks = tree.derive(
        "blocks", lambda: tree.of_class(lambda kind: _library_of(kind) not in _WITHOUT_BLOCKS)
    )
    for own in tree.own_at(tree.holding("s1", blocks)):
        if own["s1"] is not None:
            _count(freeu, ", ".join(f"{key} {own.get(key)}" for key in _FREEU))
    foreign = tree.derive("foreign modules", lambda: _foreign_classes(model, tree.modules))
    for what, counts in (
        ("hooks", hooks),
        ("methods", patched),
        ("FreeU", freeu),
        ("foreign modules", foreign),
    ):
        yield f"{name} {what}", _in_words(counts)
    yield from _of_modules(name, tree)


def _of_compilers(pipeline: object, models: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Whether what is compiled was asked for graphs of all sizes (True), of one (False), or of those that come (automatic)."""
    parts = components_of(pipeline) or {"denoiser": pipeline}
    for name, model in models.items():
        compilers = [own.get("_compiled_call_impl") for own in tree_of(model).rerouted]
        compilers.append(parts.get(name))
        asked = {str(context._dynamic) for held in compilers if (context := _compiler_of(held)) is not None}
        if asked:
            yield f"{name}{DYNAMIC}", ", ".join(sorted(asked)).replace("None", "automatic")


def _compiler_of(held: object) -> Any:
    """What torch.compile keeps of how it was asked to compile something; None: it did not make that."""
    context = getattr(held, "dynamo_ctx", None)
    if context is None:  # the function that it made tells its configuration, and holds all of it for that
        cells = (
            getattr(vars(held).get("get_compiler_config"), "__closure__", None)
            if hasattr(held, "__dict__")
            else None
        )
        context = next((cell.cell_contents for cell in cells or ()), None)
    return context if hasattr(context, "_dynamic") else None


def _in_plain_words(settings: object) -> str:
    """An object's class with its plain attributes, such as "FirstBlockCacheConfig threshold 0.05"."""
    if settings is None:
        return "none"
    held = {key: value for key, value in vars(settings).items() if type(value) in _PLAIN}
    return _short(
        " ".join([type(settings).__name__, ", ".join(f"{key} {value}" for key, value in held.items())])
    )


def _foreign_classes(model: nn.Module, modules: Sequence[nn.Module]) -> dict[str, int]:
    """How many modules are of classes that neither the model's library nor one of `_LIBRARIES` has, by class and version."""
    own = _library_of(type(model))
    counts: dict[str, int] = {}
    for kind, number in Counter(map(type, modules)).items():
        library = _library_of(kind)
        if library in _LIBRARIES or library == own:
            continue
        version = getattr(sys.modules.get(library), "__version__", None)
        told = f"{library} {version}" if isinstance(version, str) else library
        counts[f"{kind.__qualname__.rsplit('<locals>.', 1)[-1]} ({told})"] = number
    return counts


def _library_of(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _patched(target: object) -> Iterator[tuple[str, int]]:
    """Methods of an object's class that lie on the object itself, by what lies there."""
    for attribute, held in list(vars(target).items()):
        if type(held) in _CALLABLES and callable(getattr(type(target), attribute, None)):
            method = _method(attribute, held)
            if method is not None:
                yield method, 1


def _method(attribute: str, held: object) -> str | None:
    name = _name_of(held)
    return None if name is None else f"{attribute} by {name}"


_CALLABLES: Final = (FunctionType, MethodType, functools.partial)


def _count(counts: dict[str, int], name: str | None) -> None:
    if name is not None:
        counts[name] = counts.get(name, 0) + 1


def _in_words(counts: Mapping[str, int]) -> str:
    told = [f"{count} × {name}" if count > 1 else name for name, count in sorted(counts.items())]
    return ", ".join(told[:_MOST_NAMED]) + (", …" if len(told) > _MOST_NAMED else "") if told else "none"


def _name_of(called: Any) -> str | None:
    """A function's qualified name, with its file and line where it is not a library's; None if it is this package's."""
    while isinstance(called, functools.partial):
        called = called.func
    function = getattr(called, "__func__", called)
    place = str(getattr(function, "__module__", None) or type(called).__module__)
    if place.startswith(_OWN):
        return None
    name = str(getattr(function, "__qualname__", type(called).__qualname__))
    code = getattr(function, "__code__", None)
    library, _, _ = place.partition(".")
    if code is None or (library in _LIBRARIES and code.co_filename.startswith(_roots())):
        return f"{library}.{name}"
    if library in _LIBRARIES:  # it has the name of what it replaced, as `functools.wraps` gives it
        name = code.co_name
    return f"{name.rsplit('<locals>.', 1)[-1]} ({place_of(code)})"


def _of_tokenizers(pipeline: object) -> Iterator[tuple[str, str]]:
    """Limits, special tokens and vocabulary, of which some tokens are taken as of a model's weights."""
    for name, part in (components_of(pipeline) or {}).items():
        if "tokenizer" not in str(name) or part is None:
            continue
        for key in _OF_TOKENIZER:
            value = getattr(part, key, None)
            if isinstance(value, int | str):
                yield f"{name} {key}", _short(value)
        if _library_of(type(part)) == "transformers":
            tokens = attempt(lambda part=part: _vocabulary_of(part))  # type: ignore[misc]
            if tokens.value is not None:
                yield f"{name} vocabulary", tokens.value


def _vocabulary_of(tokenizer: Any) -> str:
    size = len(tokenizer)
    some = range(0, size, max(1, size // _TOKENS_LOOKED_AT))
    added = sorted(map(str, getattr(tokenizer, "added_tokens_encoder", {}).items()))
    tokens = repr((tokenizer.convert_ids_to_tokens(list(some)), added))
    return f"{size} tokens {xxh3_64_hexdigest(tokens.encode())}"


def _of_pipeline(pipeline: Any) -> Iterator[tuple[str, str]]:
    """What a pipeline itself calculates with: the numbers that its class gives it, and how its image processors are set."""
    given = {
        name
        for kind in type(pipeline).__mro__
        if (code := getattr(inspect.unwrap(vars(kind).get("__init__", str)), "__code__", None)) is not None
        for name in code.co_names
    }
    own = getattr(pipeline, "config", None)
    for key, held in own.items() if isinstance(own, Mapping) else ():
        if isinstance(held, bool | int | float) and not key.startswith("_"):
            yield f"pipeline {key}", _short(held)
    for name, value in list(vars(pipeline).items()):
        if name not in given or name.startswith("_"):
            continue
        if isinstance(value, int | float):
            yield f"pipeline {name}", _short(value)
        elif _library_of(type(value)) == "diffusers" and name.endswith("processor"):
            for key, held in getattr(value, "config", {}).items():
                if isinstance(held, int | float | str) and not key.startswith("_"):
                    yield f"{name} {key}", _short(held)


def _of_modules(name: str, tree: ModuleTree) -> Iterator[tuple[str, str]]:
    """Settings of a model's modules, each value once: what a script may write on them in place."""
    places = _places_of_settings(tree)
    processors = [own for one in _processors(tree) if (own := getattr(one, "__dict__", None))]
    for key in _OF_MODULE:
        owns = [*tree.own_at(places[key]), *processors]
        owns = [*compress(owns, map(contains, owns, repeat(key)))]
        # Most modules have one and the same object.
        found = {id(value): value for value in map(itemgetter(key), owns) if type(value) in _SETTINGS}
        values = {"none" if value is None else str(value) for value in found.values() if _is_plain(value)}
        if values:
            yield f"{name} {key.removeprefix('_')}", _short(", ".join(sorted(values)))
    activations = tree.derive(
        "activations",
        lambda: Counter(kind.__name__ for kind in map(type, tree.modules) if kind.__module__ == _ACTIVATIONS),
    )
    yield f"{name} activations", _in_words(activations)


def _places_of_settings(tree: ModuleTree) -> dict[str, list[int]]:
    def find() -> dict[str, list[int]]:
        places = tree.of_class(lambda kind: not hasattr(kind, OF_ADAPTERS))
        return {key: tree.holding(key, places) for key in (*_OF_MODULE, _PROCESSOR)}

    return tree.derive("settings", find)


def _processors(tree: ModuleTree) -> list[Any]:
    """What calculates the attention of a model's modules, and is no module itself."""
    return tree.held(_PROCESSOR, _places_of_settings(tree)[_PROCESSOR])


def _is_plain(value: object) -> bool:
    """Whether it is a number, a switch, a word or none, or a list of them, as IP-Adapters keep their scales."""
    if isinstance(value, list | tuple):
        return 0 < len(value) <= _MOST_NAMED and all(type(one) in _PLAIN for one in value)
    return value is None or type(value) in _PLAIN


def _in_libraries(pipeline: object, models: Mapping[str, nn.Module]) -> dict[str, int]:
    """Functions of the libraries that a program has replaced: on their classes that work here, and in their modules."""
    kinds: set[type] = {type(part) for part in (pipeline, *(components_of(pipeline) or {}).values())}
    for model in models.values():
        tree = tree_of(model)
        kinds |= {*tree.classes(), *map(type, _processors(tree))}
    kinds = {base for kind in kinds for base in kind.__mro__ if _library_of(base) in _LIBRARIES}
    modules = {kind.__module__ for kind in kinds} | _OF_TORCH
    found: dict[str, int] = {}
    roots = _roots()
    for kind in kinds:
        for name in _replaced_in(kind, kind.__name__, roots):
            _count(found, name)
    for place in modules & sys.modules.keys():
        all_roots = roots if place in _OF_TORCH else (*roots, *_INSTALLED)
        for name in _replaced_in(sys.modules[place], place.rpartition(".")[2], all_roots):
            _count(found, name)
    return found


_UNREPLACED: Final["WeakKeyDictionary[object, list[int]]"] = WeakKeyDictionary()
"""By class and module what it held when nothing in it was replaced: the `id`s of all, and of its functions' code."""


def _replaced_in(owner: object, called: str, roots: tuple[str, ...]) -> list[str]:
    """What stands in the place of functions that a library's class or module holds; looked for again once it holds others."""
    held = list(vars(owner).items())
    of_functions = [value.__code__ for _, value in held if type(value) is FunctionType]
    marks = [*map(id, chain.from_iterable(held)), *map(id, of_functions)]
    if _UNREPLACED.get(owner) == marks:
        return []
    names = (_replacement(f"{called}.{name}", value, roots) for name, value in held)
    found = [name for name in names if name is not None]
    if not found:
        _UNREPLACED[owner] = marks
    return found


def _replacement(name: str, held: object, roots: tuple[str, ...]) -> str | None:
    """What stands in a library's function's place, if its code is not from these folders."""
    code = _code_of(held)
    if code is None or code.co_filename.startswith(roots):
        return None
    if code.co_filename.startswith("<") and not code.co_filename.startswith(_TYPED_IN):
        return None
    return f"{name} by {code.co_name} ({place_of(code)})"


def _code_of(held: object) -> CodeType | None:
    """A function's code, without this package's part in it."""
    if isinstance(held, classmethod | staticmethod):
        held = held.__func__
    while type(held) is FunctionType and held.__code__.co_filename.startswith(_OWN_FOLDER):
        held = vars(held).get("__wrapped__")
    return held.__code__ if type(held) is FunctionType else None


def _roots() -> tuple[str, ...]:
    """Where the code of the libraries lies, and what they decorate their functions with."""
    names = (*_LIBRARIES, "huggingface_hub", "typing_extensions")
    files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    return (
        _STANDARD,
        *(f"{PurePath(file).parent if '__init__' in file else file}" for file in files if file),
    )


def _of_parts(pipeline: object) -> Iterator[tuple[str, str]]:
    """What schedulers and VAEs calculate with beside their weights, and methods that others put on what is no model."""
    for name, part in (components_of(pipeline) or {}).items():
        if part is None:
            continue
        held = getattr(part, "config", None)
        config: Mapping[str, Any] = held if isinstance(held, Mapping) else {}
        for key in _FACTORS:
            if config.get(key) is not None:
                yield f"{name} {key}", _short(config[key])
        if getattr(part, "use_tiling", None) is True:
            tiles = {key: value for key, value in vars(part).items() if key.startswith("tile_")}
            yield f"{name} tiles", _short(", ".join(f"{key[5:]} {tiles[key]}" for key in sorted(tiles)))
        if not isinstance(part, nn.Module):
            yield f"{name} methods", _in_words(dict(_patched(part)))
            for key in _NUMBERS:
                if isinstance(value := getattr(part, key, None), int | float):
                    yield f"{name} {key}", _short(value)
            for key in _TABLES:
                table = getattr(part, key, None)
                if isinstance(table, Tensor) and table.device == _CPU:
                    yield f"{name} {key}", xxh3_64_hexdigest(table.detach().contiguous().numpy().tobytes())


def _of_everywhere() -> Iterator[tuple[str, str]]:
    """Hooks that PyTorch calls on every module."""
    hooks: dict[str, int] = {}
    for holder in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        for hook in getattr(torch.nn.modules.module, holder, {}).values():
            _count(hooks, _name_of(hook))
    yield "hooks on all modules", _in_words(hooks)
