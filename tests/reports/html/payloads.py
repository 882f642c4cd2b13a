"""Texts that a page must show and never obey, and a run that holds each of them everywhere a stranger's text can be.

The payloads are the usual families: elements, attributes that break out, handlers, URLs, encodings, comments, CSS, and what
ends a script element or a string in one.
"""

import itertools
from dataclasses import asdict

from sigmascope.records.performance import HostPlace, HostStacks
from sigmascope.records.run import ExceptionDetails, Finding, HostFacts, Run, Stage, Steps, TensorFacts

_HANDLERS = ("onerror", "onload", "onclick", "onfocus", "onmouseover", "ontoggle")
_ELEMENTS = ("img src=x", "svg", "body", "input autofocus", "video src=x", "details open")
PAYLOADS: tuple[str, ...] = (
    *(
        f"<{element} {handler}=attacked()>"
        for element, handler in itertools.islice(itertools.product(_ELEMENTS, _HANDLERS), 0, 36, 2)
    ),
    *(f'"{quote} {handler}="attacked()" x="' for quote in ("", ">") for handler in _HANDLERS),
    *(f"' {handler}=attacked() x='" for handler in _HANDLERS),
    "<script>attacked()</script>",
    "<ScRiPt>attacked()</sCrIpT>",
    "<script src=data:text/javascript,attacked()></script>",
    "</script><script>attacked()</script>",
    "</title><script>attacked()</script>",
    "</style><script>attacked()</script>",
    "</textarea><script>attacked()</script>",
    "<!--<script>attacked()</script>",
    "--><script>attacked()</script>",
    "<![CDATA[<script>attacked()</script>]]>",
    "<iframe srcdoc='<script>parent.attacked()</script>'>",
    "<a href='javascript:attacked()'>here</a>",
    "<form action=javascript:attacked()><button>",
    "<meta http-equiv=refresh content='0;url=javascript:attacked()'>",
    "<base href='https://example.com/'>",
    "<link rel=stylesheet href=data:text/css,*{display:none}>",
    "<object data=javascript:attacked()>",
    "<math><mi xlink:href='data:x,<script>attacked()</script>'>",
    "{{ 7 * 7 }}{% raw %}",
    "${attacked()}`${attacked()}`",
    "\\u003cscript\\u003eattacked()\\u003c/script\\u003e",
    "&lt;script&gt;attacked()&lt;/script&gt;",
    "&#x3c;script&#x3e;attacked()&#x3c;/script&#x3e;",
    "%3Cscript%3Eattacked()%3C/script%3E",
)


def run_that_holds(text: str) -> Run:
    """The text as a name, an error, a finding, a fact, a callback, a prompt, a library."""
    tensor = TensorFacts((2, 3), text, text, 24, 6, 0.0, 1.0, 0.5, 0.1, 0, 0)
    finding = Finding(text, "warning", text, {text: text}, text, text)
    facts = {
        "call": {"callback": text},
        "prompts": {"prompt": {"sha256": "0" * 64, "text": text}},
        "recipe": {"arguments": {text: text}, "loras": {text: {"strength": [1.0], "layers": 1, "active": 1}}},
    }
    lora = {
        "effective": True,
        "lora_file": {"filename": text, "rank": text},
        "verdict": {
            "matched_modules": text,
            "total_modules": text,
            "modules": [{"name": text, "detail": text}],
        },
        "unet_weight_changes": {"by_block": [{"name": text, "relative_change": 0.5}]},
    }
    steps = Steps((0.0, 0.5, 1.0, 1.5), (0.5, 0.5, 0.5, 0.5))
    inner = Stage(
        text, 1.0, 3.0, steps=steps, tensors={text: tensor}, findings=(finding,), facts={"component": text}
    )
    stage = Stage(
        "generation",
        0.0,
        5.0,
        success=False,
        error=text,
        exception_details=ExceptionDetails(text, text, text),
        children=(inner, Stage("lora_application", 0.0, 1.0, facts={"lora_application": lora})),
        facts=facts,
    )
    host = HostFacts(cpu_model=text, os=text, python_version=text, libraries={text: text})
    place = HostPlace("after the last stage", "outside stages", text, text, 1, 1.0, 9)
    seen = asdict(HostStacks(9, 0.001, 0.001, (place,)))
    run_facts = {text: text, "host_stacks": {**seen, "places": [asdict(place)]}}
    return Run("1", text, text, 6.0, host=host, stages=(stage,), findings=(finding,), facts=run_facts)
