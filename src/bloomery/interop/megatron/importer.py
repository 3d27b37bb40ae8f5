"""From a command line, or a script that holds one, to a recipe that keeps every rule."""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bloomery.base.bounded import read_text
from bloomery.base.errors import Problem, RecipeError
from bloomery.config.load import COMMAND_LINE, Draft
from bloomery.config.recipe import Recipe
from bloomery.config.yaml_nodes import dump_yaml
from bloomery.interop.megatron import flags as table
from bloomery.interop.megatron.builder import Builder, Row
from bloomery.interop.megatron.ds_config import DsConfig, compare, read_ds_config
from bloomery.interop.megatron.flags import CommandLine, is_known, parse_command
from bloomery.interop.megatron.read_script import read_script
from bloomery.interop.megatron.recipe import fill, fill_launch
from bloomery.interop.megatron.run_script import Command, Script, is_training, run_script
from bloomery.sizing.check import check

_ORDER = (
    "name", "seed", "model", "tokenizer", "data", "batch", "optimizer", "lr", "train", "precision", "loss_scale",
    "parallel", "checkpoint", "monitor", "launch",
)  # fmt: skip
_KINDS = ("mapped", "default", "differs", "left out", "not needed", "not understood")


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
    execute: bool = True,
    ds_config: Path | None = None,
    without_ds_config: bool = False,
    given: Mapping[str, str] | None = None,
    name: str | None = None,
) -> Imported:
    """`words`: what the program gets, or flags that overrule those of the `script`. RecipeError with every problem.
    `execute`: run the script under bash with stubs, else only read it. `given`: variables and arguments of it."""
    given = given or {}
    found, line, source = _read(words, script, execute, given)
    b = Builder(line, found.reasons if found else None, find_file=lambda path: _text_of(path, found, source))
    ds = _find_ds_config(b, ds_config, without_ds_config)
    fill(b, ds)
    fill_launch(b, found, source)
    if ds is not None:
        compare(b, ds)
    _rest(b)
    job = found.sbatch.get("job-name", ("", 0))[0] if found else ""
    b.raw["name"] = name or _as_name(job or Path(source).stem if found else "imported")
    raw = {key: b.raw[key] for key in _ORDER if key in b.raw}
    recipe, warnings = _checked(raw, b, source)
    warnings += _warnings(b, found, source, given)
    rows = sorted(b.rows, key=lambda row: _KINDS.index(row.kind))
    return Imported(recipe, raw, rows, warnings, source)


def _read(
    words: Sequence[str], path: Path | None, execute: bool, given: Mapping[str, str]
) -> tuple[Script | None, CommandLine, str]:
    if wrong := [name for name in given if not re.fullmatch(r"[A-Za-z]\w*|_[A-Za-z]\w*|[1-9][0-9]?", name, re.ASCII)]:
        rule = "it sets a variable of the script such as NAME, or an argument of it such as 1"
        raise RecipeError([Problem(f"--set {name}={given[name]}", rule, "correct the name") for name in wrong])
    if path is None:
        if not words:
            remedy = "bloomery import megatron -- FLAGS, or --script FILE"
            raise RecipeError(Problem("there is nothing to import", remedy=remedy))
        return None, parse_command(words, COMMAND_LINE), COMMAND_LINE
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        rule = "a script is a file; flags begin with --, and a program such as pretrain_gpt.py may stand before them"
        raise RecipeError(Problem(f"cannot read {path}: {error}", rule, "correct the path")) from error
    script = (run_script if execute else read_script)(path, text, given)
    command = _training_command(script, path)
    line = parse_command(command.words, f"{path}:{command.line}")
    for outer in script.commands:  # `srun --nodes 2 bash -c ...` around it
        if outer.line == command.line and outer is not command:
            line.launcher = parse_command([*outer.words, ".py"], f"{path}:{outer.line}").launcher | line.launcher
    more = parse_command(["x.py", *words], COMMAND_LINE)
    line.flags |= more.flags
    line.stray += more.stray
    return script, line, str(path)


def _training_command(script: Script, file: Path) -> Command:
    """The command that trains: the one with a model's size, of a program called pretrain if there is one."""
    found = [each for each in script.commands if is_training(each) and each.words[0] != "echo"]
    for pattern in (r"\.py(\0|$)", r"pretrain\w*\.py(\0|$)"):
        found = [each for each in found if re.search(pattern, "\0".join(each.words))] or found
    if not found:
        unread = "; ".join(f"line {line}: {what}" for line, what in script.unread)
        rule = f"none of its {len(script.commands)} commands has --num-layers" + (f". {unread}" if unread else "")
        remedy = "give variables that it needs with --set NAME=VALUE, or name the script that starts the training"
        raise RecipeError(Problem("there is no training in this script", rule, remedy, str(file)))
    last, flags = found[-1], parse_command(found[-1].words, "").flags
    for other in found[:-1]:
        theirs = parse_command(other.words, "").flags
        for name in {**flags, **theirs}:
            one, two = (f"{name} {side[name].text}" if name in side else f"no {name}" for side in (theirs, flags))
            if one != two and not all(each.doubt for each in found):
                what = f"lines {other.line} and {last.line} are different trainings: line {other.line} has {one}, "
                remedy = "import a copy of the script with one of them, or choose with --set NAME=VALUE"
                place = f"{file}:{last.line}"
                raise RecipeError(
                    Problem(f"{what}line {last.line} has {two}", "a recipe is one training", remedy, place)
                )
    if doubt := last.doubt or _hidden_flags(script, last):
        remedy = "run the script: --script FILE, or give the flags themselves behind `--`"
        raise RecipeError(Problem("this command may be another one", doubt, remedy, f"{file}:{last.line}"))
    return last


def _hidden_flags(script: Script, command: Command) -> str:
    """A word of the command that may hold flags, and has no value."""
    for before, word in zip(command.words, command.words[1:], strict=False):
        why = script.reasons.get(word.removeprefix("$"), "") if word.startswith("$") else ""
        is_value = before.startswith("--") and (before[2:] in table.MAPPED or not why.startswith("it depends"))
        if why and not is_value:
            return f"{word} may hold flags. {why}"
    return ""


def _find_ds_config(b: Builder, named: Path | None, may_lack: bool) -> DsConfig | None:
    """The one that the user or a flag names, where it is here. Whoever has one means DeepSpeed."""
    b.deepspeed = b.has("deepspeed") or named is not None
    flag = b.given("deepspeed_config")
    found = b.find_file(flag.text) if flag is not None and named is None else None
    if named is not None:
        try:
            found = read_text(named), str(named)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(Problem(f"cannot read {named}: {error}", remedy="correct --ds-config")) from error
    if found is None and (b.deepspeed or flag is not None):
        if not may_lack:
            what = f"the ds_config {flag.text!r} cannot be seen" if flag else "--deepspeed has no ds_config"
            rule = "it is not here, or a program writes it; ZeRO stage, precision, clipping and loss scale are in it"
            remedy = "give it with --ds-config FILE, or import without it: --without-ds-config"
            b.problem(flag or b.given("deepspeed"), what, rule, remedy)
        remark = "not seen, so it was neither read nor compared with the flags"
        b.rows.append(Row("left out", "--deepspeed_config", flag.text if flag else "", remark=remark))
    if found is None:
        return None
    b.note("not needed", "deepspeed_config", f"{found[1]} is read and compared with the flags")
    if not b.has("deepspeed"):
        remark = (
            "a ds_config means DeepSpeed, so it counts, though --deepspeed is not there: without it nobody reads it"
        )
        b.rows.append(Row("differs", "ds_config", found[1], remark=remark))
    b.deepspeed = True
    return read_ds_config(*found)


def _text_of(path: str, script: Script | None, source: str) -> tuple[str, str] | None:
    """(text, place) of a file that the script writes, or that lies here or beside it."""
    name = os.path.normpath(path)
    if script is not None and name in script.files:
        text = script.files[name]
        return None if text is None else (text, f"{source} {name}")
    for place in (Path(path), Path(source).parent / path):
        if os.path.isfile(place):
            try:
                return read_text(place), str(place)
            except (OSError, UnicodeDecodeError) as error:
                raise RecipeError(Problem(f"cannot read {place}: {error}", remedy="correct the path")) from error
    return None


def _rest(b: Builder) -> None:
    """Rows and problems for the flags that no field came from."""
    reported = {row.flag for row in b.rows}
    for flag, given in b.line.flags.items():
        name = flag.removeprefix("--")
        if flag in reported:
            continue
        if name in table.REFUSED and not (given.values and set(given.values) <= table.REFUSED[name][1]):
            what = f"{flag} {given.text[:60]}".strip()
            b.problem(given, f"{what} is set", table.REFUSED[name][0], "remove it, if the training may go without")
        elif name in table.REFUSED:
            b.note("not needed", name, "that turns it off")
        elif name in table.MAPPED:
            b.note("not needed", name, "this training does not read it, or decides it with other flags")
        elif (other := table.other_flag(name)) is not None:
            b.note(other[0], name, other[1])
        else:
            near = difflib.get_close_matches(name, list(table.known_names()), n=1, cutoff=0.8)
            hint = f"did you mean --{near[0]}?" if near else "unknown here: check whether it changes what is trained"
            b.note("not understood", name, hint)


def _warnings(b: Builder, script: Script | None, source: str, given: Mapping[str, str]) -> list[Problem]:
    found = [
        Problem(f"{before.flag} is {before.text} and then {after.text}", "the last one counts", place=after.place)
        for before, after in b.line.repeated
    ]
    found += [Problem(f"{word!r} belongs to no flag", "it was passed over") for word in b.line.stray]
    unset: dict[str, Problem] = {}
    for number, row in enumerate(b.rows):  # fields with a variable in them that has no value
        if not is_known(row.result):
            why, names = b.why_unknown(row.result), b.unset_names(row.result)
            b.rows[number] = replace(row, kind="left out", remark=f"complete it by hand: {why}")
            remedy = f"give it with --set {names[0]}=VALUE" if names and script else "complete the recipe"
            unset[why] = Problem(f"{row.field} is {row.result}", why, remedy, b.places.get(row.field, ""))
    found += unset.values()
    found += [Problem(f"{row.flag} is not understood", row.remark) for row in b.rows if row.kind == "not understood"]
    for name, value in given.items():
        if script is None or name not in script.asked:
            rule = "there is no script" if script is None else f"the script has no ${name}"
            found.append(Problem(f"--set {name}={value} changes nothing", rule, place=COMMAND_LINE))
    if script is not None:
        found += [Problem(what, place=f"{source}:{at}") for at, what in script.unread]
    return found


def _checked(raw: dict[str, Any], b: Builder, source: str) -> tuple[Recipe, list[Problem]]:
    """The recipe that `bloomery check` would accept. Problems of flags come first: they may explain those of fields."""
    draft = Draft(source=source, places=dict(b.places), problems=list(b.problems))
    if not draft.problems:
        draft.validate(copy.deepcopy(raw))
    checked = check(draft)
    return checked.recipe, checked.warnings


def _as_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text.removesuffix(".slurm").removesuffix(".sh")).strip("-._")
    return name[:100] or "imported"
