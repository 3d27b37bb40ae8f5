"""From a command line, or a script that holds one, to a recipe that keeps every rule."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from bloomery.base.bounded import parse_json, parse_yaml, read_text
from bloomery.base.errors import Problem, RecipeError
from bloomery.config.load import COMMAND_LINE, Places, validated
from bloomery.config.recipe import Recipe
from bloomery.config.schema import by_place
from bloomery.config.yaml_nodes import dump_yaml
from bloomery.interop.megatron.data import fill_data
from bloomery.interop.megatron.flags import CommandLine, Given, Kind, Row, kind_of, parse_command
from bloomery.interop.megatron.recipe import Builder, fill
from bloomery.interop.megatron.script import Script, run_script
from bloomery.sizing.check import check

_DS_SECTIONS = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "fp16", "bf16",
    "nebula", "scheduler",
)  # fmt: skip


@dataclass(frozen=True)
class Imported:
    recipe: Recipe
    raw: dict[str, Any]
    """What is written: the fields that the flags decide."""
    rows: list[Row]
    warnings: list[Problem]
    source: str

    def rows_of(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row.kind in kinds]

    def yaml(self) -> str:
        """The recipe file; what was not imported as it is stands at its head."""
        lines = [f"# Imported by `bloomery import megatron` from {self.source}."]
        for kind in ("differs", "left out", "not understood"):
            rows = self.rows_of(kind)
            lines += [f"#\n# {kind.capitalize()}:"] if rows else []
            for row in rows:
                became = f" -> {row.field}: {row.result}" if row.result else ""
                lines.append(f"#   {f'{row.flag} {row.value}'.strip()}{became}  ({row.remark})")
        return "\n".join(lines) + "\n" + dump_yaml(self.raw)


def import_megatron(
    words: Sequence[str],
    *,
    script: Path | None = None,
    ds_config: Path | None = None,
    without_ds_config: bool = False,
    given: Mapping[str, str] | None = None,
    name: str | None = None,
) -> Imported:
    """`words`: what the program gets, or flags that overrule those of the `script`. RecipeError with every problem.
    `given`: variables and arguments of the script."""
    if script is None and not words:
        remedy = "bloomery import megatron -- FLAGS, or --script FILE"
        raise RecipeError(Problem("there is nothing to import", remedy=remedy))
    found, source = None, COMMAND_LINE
    line = parse_command(words if script is None else ["x.py", *words], COMMAND_LINE)
    if script is not None:
        found, source = run_script(script, _script_of(script), given or {}), str(script)
        own = _training_command(found, source)
        line = CommandLine(own.program, own.flags | line.flags, own.stray + line.stray)
    b = Builder(line, lambda path: _find_file(path, found, source))
    _find_ds_config(b, ds_config, without_ds_config)
    if strange := [given for given in line.flags.values() if re.search("[\ud800-\udfff]", given.flag + given.text)]:
        raise RecipeError(Problem(f"{strange[0].flag} is not UTF-8", "", "correct it", strange[0].place))
    for word in (word for word in line.stray if re.fullmatch(r"\$\w+", word)):
        remedy = f"give it with --set {word[1:]}=VALUE, or --set {word[1:]}= where it holds none"
        b.refuse("", f"{word} has no value", "it may hold flags", remedy)
    fill(b)
    fill_data(b)
    _rest(b)
    job = found.sbatch.get("job-name", Path(source).stem) if found else "imported"
    b.raw["name"] = name or re.sub(r"[^A-Za-z0-9._-]+", "-", job).strip("-._")[:100] or "imported"
    if b.problems:  # they may explain what is wrong with the recipe
        raise RecipeError(sorted(dict.fromkeys(b.problems), key=by_place))
    raw = {key: b.raw[key] for key in Recipe.model_fields if key in b.raw}
    checked = check(validated(dict(raw), Places(source, dict(b.places))))
    warnings = checked.warnings + _warnings(b, found, source)
    kinds = get_args(Kind)
    return Imported(checked.recipe, raw, sorted(b.rows, key=lambda row: kinds.index(row.kind)), warnings, source)


def _training_command(script: Script, source: str) -> CommandLine:
    """The command with a model's size, of a program called pretrain if there is one."""
    found = [each for each in script.commands if each.is_training]
    for pattern in (r"\.py(\0|$)", r"pretrain\w*\.py(\0|$)"):
        found = [each for each in found if re.search(pattern, "\0".join(each.words))] or found
    if not found:
        unread = "; ".join(f"line {line}: {what}" for line, what in script.unread)
        rule = f"none of its {len(script.commands)} commands has --num-layers" + (f". {unread}" if unread else "")
        remedy = "give its variables with --set NAME=VALUE, check it with `bash -n`, or name the script that trains"
        raise RecipeError(Problem("there is no training in this script", rule, remedy, source))
    last = found[-1]
    line, place = parse_command(last.words, f"{source}:{last.line}"), f"{source}:{last.line}"
    for other in found[:-1]:
        if parse_command(other.words, place).flags != line.flags:
            what = f"lines {other.line} and {last.line} are different trainings"
            remedy = "import a copy of the script with one of them, or choose with --set NAME=VALUE"
            raise RecipeError(Problem(what, "a recipe is one training", remedy, place))
    return line


def _find_ds_config(b: Builder, named: Path | None, may_lack: bool) -> None:
    """Reads the one that the user or a flag names, where it is here. Whoever has one means DeepSpeed."""
    flag = b.line.flags.get("deepspeed_config")
    path, b.deepspeed = str(named or (flag.text if flag else "")), b.has("deepspeed") or named is not None
    if path and (found := (_text_of(named), path) if named else b.find_file(path)):
        b.note("not needed", "deepspeed_config", f"{found[1]} is read and compared with the flags")
        if not b.has("deepspeed"):
            remark = "though --deepspeed is not there: a ds_config means DeepSpeed, so it counts"
            b.rows.append(Row("differs", "ds_config", found[1], remark=remark))
        b.deepspeed = b.has_ds_config = True
        b.line.flags |= _read_ds_config(*found, is_fp16=b.has("fp16"))
    elif b.deepspeed or flag:
        remark = "not seen, so it was neither read nor compared with the flags"
        b.rows.append(Row("left out", "--deepspeed_config", flag.text if flag else "", remark=remark))
        if not may_lack:
            rule = "it is not here, or a program writes it; ZeRO stage, precision, clipping and loss scale are in it"
            remedy = "give it with --ds-config FILE, or import without it: --without-ds-config"
            b.refuse(b.first("deepspeed_config", "deepspeed"), f"the ds_config {path!r} cannot be seen", rule, remedy)


def _read_ds_config(text: str, place: str, *, is_fp16: bool) -> dict[str, Given]:
    """Its keys as flags with the names `ds:KEY`, without `auto` and null, which Hugging Face's Trainer fills in.
    RecipeError if it is no ds_config."""
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        rule = "a ds_config is a JSON object: numbers have no underscores, and nothing is computed in it"
        raise RecipeError(Problem(f"not valid JSON: {error}", rule, "correct it", place)) from error
    if "bfloat16" in content:
        content["bf16"] = content.pop("bfloat16")
    found, given = dict(_leaves(content, "")), {}
    if is_fp16 and isinstance(fp16 := content.get("fp16"), dict) and fp16.get("enabled") == "auto":
        found["fp16.enabled"] = True
    for key, value in found.items():
        section, text = key.partition(".")[0], value if isinstance(value, str) else json.dumps(value)
        is_off = section in ("fp16", "nebula") and key[-8:] != ".enabled" and not found.get(f"{section}.enabled")
        if isinstance(value, dict) and kind_of(f"ds:{key}", [])[0] == "refused":
            is_off = not value or ('"enabled": false' in text and '"enabled": true' not in text)
        given[f"ds:off:{key}" if is_off else f"ds:{key}"] = Given(f"ds_config {key}", [text], place)
    return given


def _leaves(content: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if f"{prefix}{key}" in _DS_SECTIONS and isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value not in (None, "auto"):
            yield f"{prefix}{key}", value


def _find_file(path: str, script: Script | None, source: str) -> tuple[str, str] | None:
    """(text, place) of a file that the script writes, or that lies here or beside it."""
    name = os.path.normpath(path)
    if script is not None and name in script.files:
        text = script.files[name]
        return None if text is None else (text, f"{source} {name}")
    places = (place for place in (Path(path), Path(source).parent / path) if os.path.isfile(place))
    return next(((_text_of(place), str(place)) for place in places), None)


def _script_of(path: Path) -> str:
    """A bash script; that of an AzureML job's YAML, whose `${{inputs.data}}` is a variable `inputs_data`."""
    text = _text_of(path)
    if path.suffix not in (".yaml", ".yml"):
        return text
    try:
        job = parse_yaml(text)
        command, variables = job["command"], job.get("environment_variables") or {}
        name = job.get("display_name") or job.get("experiment_name") or path.stem
        exports = [f"export {key}={shlex.quote(str(value))}" for key, value in variables.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        rule = "a YAML file here is a command job of AzureML, with a `command`"
        raise RecipeError(Problem(f"{path} is no job: {error!r}", rule, "name a job or a script")) from error
    lines = [f"#SBATCH --job-name={name}", *exports, str(command)]
    return re.sub(r"\$\{\{\s*(\w+)\.(\w+)\s*\}\}", r"${\1_\2}", "\n".join(lines)) + "\n"


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(Problem(f"cannot read {path}: {error}", remedy="correct the path")) from error


def _rest(b: Builder) -> None:
    """Rows and problems for the flags that no field came from."""
    reported = {row.flag for row in b.rows}
    for name, given in b.line.flags.items():
        kind, why = kind_of(name, given.values)
        if given.flag in reported:
            continue
        if kind == "refused":
            what = f"{given.flag} {given.text[:60]}".strip()
            b.refuse(name, f"{what} is set", why, "remove it, if the training may go without")
        else:
            b.note(kind, name, why)


def _warnings(b: Builder, script: Script | None, source: str) -> list[Problem]:
    found = [Problem(f"{word!r} belongs to no flag", "it is ignored") for word in b.line.stray]
    found += [Problem(f"{row.flag} is not understood", row.remark) for row in b.rows if row.kind == "not understood"]
    found += [Problem(f"{row.field} is {row.result}", row.remark) for row in b.rows if "$" in row.result]
    return found + [Problem(what, place=f"{source}:{at}") for at, what in (script.unread if script else [])]
