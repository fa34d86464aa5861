"""Build, train, run, look inside and measure Transformers.

    import clearhead

    config = clearhead.preset("gpt2")            # frozen data; no weights are allocated
    print(clearhead.trace(config, batch=2))      # every step with its shape
    clearhead.cost(config).parameters.total      # 124439808
    model = clearhead.build(config)              # a torch module
    model = clearhead.load("path/to/checkpoint") # a Hugging Face folder
    model = clearhead.train("chars", ["input.txt"], "runs/mine")
    clearhead.check("my_attention.py")           # what is wrong with it?

Names are imported when they are first used, so `import clearhead` loads neither torch nor NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from clearhead.models.load import load

    from . import configs, functional, nn, optim, reference
    from .checker.check import check
    from .checker.magic import load_ipython_extension
    from .configs import dumps, loads
    from .measure.cost import cost
    from .measure.trace import trace
    from .models.model import build
    from .models.presets import preset
    from .models.quantize import dequantize, quantize
    from .nn.tap import Taps
    from .training.loop import train
    from .training.recipes import recipe

PLACES = {
    "preset": "models.presets",
    "build": "models.model",
    "load": "models.load",
    "dequantize": "models.quantize",
    "quantize": "models.quantize",
    "train": "training.loop",
    "recipe": "training.recipes",
    "trace": "measure.trace",
    "cost": "measure.cost",
    "dumps": "configs",
    "loads": "configs",
    "check": "checker.check",
    "load_ipython_extension": "checker.magic",
    "Taps": "nn.tap",
}
MODULES = ("configs", "functional", "nn", "optim", "reference")

__all__ = [*PLACES, *MODULES]


def __getattr__(name: str) -> Any:
    try:
        if name in PLACES:
            return getattr(import_module(f"clearhead.{PLACES[name]}"), name)
        if name in MODULES:
            return import_module(f"clearhead.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from .extras import torch_missing

        raise ModuleNotFoundError(torch_missing(f"clearhead.{name}"), name="torch") from None
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
