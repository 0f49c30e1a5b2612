"""minillm: a transformer engine to read, one layer at a time, from bytes to continuous batching."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.engine import Engine, Output
    from minillm.errors import InputError, WeightsError
    from minillm.model import Llama
    from minillm.params import SamplingParams
    from minillm.request import Event, Request
    from minillm.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "Event",
    "InputError",
    "Llama",
    "Output",
    "Request",
    "SamplingParams",
    "Tokenizer",
    "WeightsError",
]

# Where each name lives. Imported when first used: `minillm --help` need not wait for torch.
_HOME = {"Output": "engine", "InputError": "errors", "WeightsError": "errors", "Llama": "model"}
_HOME |= {"SamplingParams": "params", "Event": "request", "Request": "request"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    return getattr(import_module(f"minillm.{_HOME.get(name, name.lower())}"), name)
