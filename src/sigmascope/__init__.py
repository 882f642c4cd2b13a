"""Know what your LoRA does and where your diffusion pipeline's time and memory go.

`__init__.pyi` lists what the package offers. A name is loaded when it is first used (PEP 562), so that
`import sigmascope` stays light.
"""

import lazy_loader

from sigmascope.__about__ import __version__

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = ["__version__", *(name for name in _names if not name.startswith("_"))]
