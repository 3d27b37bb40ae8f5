"""Bloomery: one recipe, from raw text to a verified language model. Start reading at train/loop.py.

From Python, see `bloomery.api`: what it offers is here too, and is imported when it is first used.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bloomery.api import (
        Recipe,
        RunFolder,
        load_model,
        load_recipe,
        load_tokenizer,
        open_run,
        prepare,
        samples,
        train,
    )

__version__ = "0.1.0"
__all__ = [
    "Recipe",
    "RunFolder",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "open_run",
    "prepare",
    "samples",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bloomery' has no attribute {name!r}")
    from bloomery import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _CallableRoom(ModuleType):
    __doc__ = property(lambda self: self.__wrapped__.__doc__)

    @property
    def __wrapped__(self) -> Any:
        """The function; `inspect.signature` looks here."""
        from bloomery import api

        return getattr(api, self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)


class _Package(ModuleType):
    """Rooms that have the name of a function, `train` and `prepare`, are that function too, once they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _CallableRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
