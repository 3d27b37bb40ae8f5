"""The types of a recipe's fields (amounts with units, durations, sizes, paths), and what a resumed run may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from bloomery.base.units import Amount, AmountUnit, Duration, parse_amount, parse_duration


@dataclass(frozen=True)
class OnResume:
    """Marks a field: may a resumed run change it? A field without a mark has that of its section."""

    kind: Literal["free", "by name", "fixed"]
    """Freely, only with `--change FIELD`, or never."""
    why: str
    in_fingerprint: bool = True
    """False where it has no influence on what is learned."""


def _amount(*units: AmountUnit, positive: bool = True) -> Callable[[Any], Amount]:
    def parse(value: Any) -> Amount:
        if isinstance(value, Amount):
            value = str(value)
        if type(value) is int and value >= 0:
            examples = " or ".join(f"'{value} {unit}'" for unit in units)
            raise ValueError(f"needs a unit: write {examples}")
        found = parse_amount(value if isinstance(value, str) else "", units=units)
        if positive and not found.count:
            raise ValueError("must be greater than 0")
        return found

    return parse


def _duration(value: Any) -> Duration:
    found = value if isinstance(value, Duration) else parse_duration(value if isinstance(value, str) else "")
    if not found.seconds:
        raise ValueError("must be greater than 0")
    return found


def _amount_or_duration(value: Any) -> Amount | Duration:
    if isinstance(value, Amount) or (isinstance(value, str) and any(unit in value for unit in _UNITS)):
        found = parse_amount(str(value))
        if not found.count:
            raise ValueError("must be greater than 0")
        return found
    try:
        return _duration(value)
    except ValueError as error:
        raise ValueError(f"{error}; an amount is written like '500 steps'") from None


def _steps_or_auto(value: Any) -> Any:
    return value if value == "auto" else _steps(value)


def _text_of_number(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else value


_UNITS = ("step", "sample", "token")
_steps = _amount("steps")
_AS_TEXT = PlainSerializer(str, return_type=str)
Size = Annotated[int, Field(gt=0, le=10**12)]
"""A whole number of things; the limit only keeps nonsense out of later arithmetic."""
PathText = Annotated[str, Field(min_length=1)]
SplitText = Annotated[
    str,
    BeforeValidator(_text_of_number),  # one part alone is a number to YAML
    Field(pattern=r"^[0-9]{1,50}(\.[0-9]+)?([,/]\s*[0-9]{1,50}(\.[0-9]+)?){0,2}$"),
]
AnyAmount = Annotated[Amount, BeforeValidator(_amount("steps", "samples", "tokens", positive=False)), _AS_TEXT]
Steps = Annotated[Amount, BeforeValidator(_steps), _AS_TEXT]
StepsOrAuto = Annotated[Amount | Literal["auto"], BeforeValidator(_steps_or_auto), _AS_TEXT]
WallClock = Annotated[Duration, BeforeValidator(_duration), _AS_TEXT]
AmountOrDuration = Annotated[Amount | Duration, BeforeValidator(_amount_or_duration), _AS_TEXT]
