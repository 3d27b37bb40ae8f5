"""What fields of the recipe are made of: kinds of values, the marks of what a resumed run may do with a field, and the
base of all sections."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from bloomery.base.units import Amount, AmountUnit, Duration, Epochs, parse_amount, parse_duration


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
        found = parse_amount(str(value), units=units)
        if positive and not found.count:
            raise ValueError("must be greater than 0")
        return found

    return parse


def _length(value: Any) -> Amount | Epochs:
    if not (match := re.fullmatch(r"\s*([0-9]{1,9})\s+epochs?(?:\s+of\s+(\S.*?))?\s*", str(value))):
        return _amount("steps", "samples", "tokens", positive=False)(value)
    if not (count := int(match[1])):
        raise ValueError("must be greater than 0")
    return Epochs(count, match[2])


def _duration(value: Any) -> Duration:
    found = parse_duration(str(value))
    if not found.seconds:
        raise ValueError("must be greater than 0")
    return found


def _amount_or_duration(*units: AmountUnit) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if value == "auto" or re.fullmatch(r"([0-9.]+[dhms])+", str(value).strip()):
            return value if value == "auto" else _duration(value)
        try:
            return _amount(*units)(value)
        except ValueError as error:
            raise ValueError(f"{error}; or write a time, such as '90m'") from None

    return parse


def _split(value: Any) -> str:
    text = str(value)  # one part alone is a number in YAML
    if re.fullmatch(rf"{_SHARE}([,/]\s*{_SHARE}){{0,2}}", text):
        return text
    parts = re.findall(_SHARE, text)
    example = ",".join(parts) if 1 < len(parts) <= 3 else "90,10"
    raise ValueError(f"must be one to three numbers, such as '{example:.60}'")


_SHARE = r"[0-9]{1,50}(?:\.[0-9]+)?"
_AS_TEXT = PlainSerializer(str, return_type=str)
Size = Annotated[int, Field(gt=0, le=10**9)]
"""A whole number of things; the limit only keeps nonsense out of later arithmetic: torch counts bytes in 63 bits."""
PathText = Annotated[str, Field(min_length=1)]
SplitText = Annotated[
    str,
    BeforeValidator(_split),
]
AnyAmount = Annotated[Amount, BeforeValidator(_amount("steps", "samples", "tokens", positive=False)), _AS_TEXT]
Length = Annotated[Amount | Epochs, BeforeValidator(_length), _AS_TEXT]
Steps = Annotated[Amount, BeforeValidator(_amount("steps")), _AS_TEXT]
Documents = Annotated[Amount, BeforeValidator(_amount("documents")), _AS_TEXT]
StepsOrTime = Annotated[Amount | Duration, BeforeValidator(_amount_or_duration("steps")), _AS_TEXT]
StepsOrTimeOrAuto = Annotated[
    Amount | Duration | Literal["auto"], BeforeValidator(_amount_or_duration("steps")), _AS_TEXT
]
WallClock = Annotated[Duration, BeforeValidator(_duration), _AS_TEXT]
AmountOrDuration = Annotated[
    Amount | Duration, BeforeValidator(_amount_or_duration("steps", "samples", "tokens")), _AS_TEXT
]

MOST_LAYERS = 10_000
"""Before anything is built that would take for ever."""

# May a resumed run change it? In the order of the table in docs/training.md.
LAYOUT = OnResume(
    "free", "the same training on other ranks; dropout draws other numbers for another micro-batch size", False
)
DURATION = OnResume("free", "when to stop; a schedule or an order that follows from `train.for` is compared resolved")
JOB_END = OnResume("free", "when this job stops", in_fingerprint=False)
SPIKES = OnResume("free", "what future spikes do; past ones keep their effect")
REPORTING = OnResume("free", "what is saved, measured and reported", in_fingerprint=False)
VALIDATION = OnResume("free", "what is evaluated")
RATE = OnResume("by name", "the learning rate, compared as its value at each sample")
UPDATE = OnResume("by name", "the size of updates")
BATCH = OnResume("by name", "samples of a step; finished steps keep their count")
SOURCES = OnResume(
    "by name",
    "training data, each source known by its `name`, by default its path: a shard that has moved needs the `name` it "
    "had; new shares begin at the next sample. Fixed with the orders `megatron` and `bigscience`",
)
LENGTH = OnResume(
    "by name",
    "tokens of a sample; each source begins its next epoch. Fixed with learned positions (gpt2, bert) and with the "
    "orders `megatron` and `bigscience`",
)
ROTARY = OnResume("by name", "the rotary frequencies, which go with the sequence length")
NUMERICS = OnResume("by name", "how a step is computed")
SKIPS = OnResume("by name", "only for past steps (redo them with --from); ranges of future steps are free")
BEGINNING = OnResume("free", "null resumes any run; other weights than those that the run began with are refused")
ARCHITECTURE = OnResume("fixed", "the architecture and its initial weights")
TOKENIZER = OnResume("fixed", "compared by content: it may move to another path")
ORDER = OnResume("fixed", "the order of samples")
SAMPLES = OnResume("fixed", "what a sample is")
FIXED = OnResume("fixed", "it would make this another training")


class Section(BaseModel):
    """A part of the recipe: strict types, unknown fields refused, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
