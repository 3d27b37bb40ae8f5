"""The types of the recipe's fields: amounts with units, durations, sizes and paths, as people write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from bloomery.base.units import DURATION_RULE, Amount, AmountUnit, Duration, parse_amount, parse_duration


def _amount(*units: AmountUnit) -> BeforeValidator:
    def parse(value: Any) -> Amount:
        if isinstance(value, Amount):
            value = str(value)
        if type(value) is int and value >= 0:
            examples = " or ".join(f"'{value} {unit}'" for unit in units)
            raise ValueError(f"needs a unit: write {examples}")
        return parse_amount(value if isinstance(value, str) else "", units=units)

    return BeforeValidator(parse)


def _amount_or_duration(value: Any) -> Amount | Duration:
    if isinstance(value, Amount | Duration):
        return value
    if isinstance(value, str) and value.strip().endswith(("step", "steps", "sample", "samples", "token", "tokens")):
        return parse_amount(value)
    try:
        return parse_duration(value if isinstance(value, str) else "")
    except ValueError as error:
        written = f"'{value} steps'" if type(value) is int and value > 0 else "'500 steps'"
        raise ValueError(f"{error}; an amount is written like {written}") from None


def _steps_or_auto(value: Any) -> Amount | str:
    if value == "auto":
        return "auto"
    if isinstance(value, Amount):
        value = str(value)
    if type(value) is int and value >= 0:
        raise ValueError(f"needs a unit: write '{value} steps'")
    try:
        return parse_amount(value if isinstance(value, str) else "", units=("steps",))
    except ValueError as error:
        raise ValueError(f"{error}, or `auto`") from None


def _duration(value: Any) -> Duration:
    if isinstance(value, Duration):
        return value
    if not isinstance(value, str):
        raise ValueError(DURATION_RULE)
    return parse_duration(value)


def _text_of_number(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else value


Size = Annotated[int, Field(gt=0, le=10**12)]
"""A whole number of things; the limit only keeps nonsense out of later arithmetic."""
PathText = Annotated[str, Field(min_length=1)]
SplitText = Annotated[
    str,
    BeforeValidator(_text_of_number),  # one part alone is a number to YAML
    Field(pattern=r"^[0-9]+(\.[0-9]+)?([,/]\s*[0-9]+(\.[0-9]+)?){0,2}$"),
]
_AS_TEXT = PlainSerializer(str, return_type=str)
AnyAmount = Annotated[Amount, _amount("steps", "samples", "tokens"), _AS_TEXT]
Steps = Annotated[Amount, _amount("steps"), _AS_TEXT]
WallClock = Annotated[Duration, BeforeValidator(_duration), _AS_TEXT]
StepsOrAuto = Annotated[Amount | Literal["auto"], BeforeValidator(_steps_or_auto), _AS_TEXT]
AmountOrDuration = Annotated[Amount | Duration, BeforeValidator(_amount_or_duration), _AS_TEXT]
