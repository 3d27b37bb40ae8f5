"""What each field of the recipe means: the text below it in config/recipe.py, read only when somebody asks."""

from __future__ import annotations

import ast
import inspect
from functools import cache

from pydantic import BaseModel

from bloomery.config import recipe


def meaning(section: type[BaseModel], name: str) -> str:
    """Of a field, by its name in Python; empty where nothing is written."""
    return _all().get((section.__name__, name), "")


@cache
def _all() -> dict[tuple[str, str], str]:
    # pydantic's use_attribute_docstrings does the same at every import, which cost every command 60 ms.
    found = {}
    for section in ast.parse(inspect.getsource(recipe)).body:
        if isinstance(section, ast.ClassDef):
            for field, text in zip(section.body, section.body[1:], strict=False):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        found[section.name, name] = inspect.cleandoc(words)
    return found
