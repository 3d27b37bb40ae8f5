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
from bloomery.checkpoint.megatron.builder import Builder
from bloomery.checkpoint.megatron.ds_config import DsConfig, Said, compare, read_ds_config
from bloomery.checkpoint.megatron.flags import ARITY, CommandLine, Row, parse_command
from bloomery.checkpoint.megatron.launch import fill_launch
from bloomery.checkpoint.megatron.layout import BF16_SHARDS
from bloomery.checkpoint.megatron.other_flags import NOT_NEEDED, REFUSED, TOLD, not_needed
from bloomery.checkpoint.megatron.recipe import clips_as_ds_config, fill
from bloomery.checkpoint.megatron.shell import Command, Script, read_script
from bloomery.checkpoint.megatron.shell_expand import is_known, is_settable, shown, unset_names
from bloomery.checkpoint.megatron.shell_words import ShellError
from bloomery.config.draft import COMMAND_LINE, Draft, by_place
from bloomery.config.faults import validate
from bloomery.config.recipe import Recipe
from bloomery.config.yaml_nodes import dump_yaml
from bloomery.sizing.check import findings

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
        """The recipe file; what did not come across stands at its head."""
        lines = [f"# Imported by `bloomery import megatron` from {self.source}."]
        for kind in ("differs", "left out", "not understood"):
            told = self.rows_of(kind)
            lines += [f"#\n# {kind.capitalize()}:"] if told else []
            for row in told:
                became = f" -> {row.field}: {row.result}" if row.result else ""
                lines.append(f"#   {f'{row.flag} {row.value}'.strip()}{became}  ({row.remark})")
        return "\n".join(lines) + "\n" + dump_yaml(self.raw)


def import_megatron(
    words: Sequence[str],
    *,
    ds_config: Path | None = None,
    without_ds_config: bool = False,
    given: Mapping[str, str] | None = None,
    name: str | None = None,
) -> Imported:
    """`words`: the command line itself, or a file with it, more flags behind it. RecipeError with every problem.
    `without_ds_config`: a ds_config that cannot be seen is left out, which else is a problem."""
    given = given or {}
    script, line, source = _read(words, given)
    reasons = script.reasons if script is not None else None
    b = Builder(line, reasons, find_file=lambda path: _text_of(path, script, source))
    ds = _find_ds_config(b, ds_config, without_ds_config)
    fill(b, ds)
    fill_launch(b, script, source)
    if ds is not None:
        problems, rows = compare(ds, _said_by_flags(b, ds))
        b.problems += problems
        told = {row.flag for row in b.rows}
        b.rows += [row for row in rows if row.flag not in told]
    _rest(b)
    job = script.sbatch.get("job-name", ("", 0))[0] if script is not None else ""
    b.raw["name"] = name or _as_name(job or Path(source).stem if script is not None else "imported")
    raw = {key: b.raw[key] for key in _ORDER if key in b.raw}
    recipe, warnings = _checked(raw, b, source)
    warnings += _warnings(b, script, source, given)
    rows = sorted(b.rows, key=lambda row: _KINDS.index(row.kind))
    return Imported(recipe, raw, rows, warnings, source)


def _warnings(b: Builder, script: Script | None, source: str, given: Mapping[str, str]) -> list[Problem]:
    found = [
        Problem(f"{before.flag} is {before.text} and then {after.text}", "the last one counts", place=after.place)
        for before, after in b.line.repeated
    ]
    found += [Problem(f"{word!r} belongs to no flag", "it was passed over") for word in b.line.stray]
    found += _unset(b)
    found += [Problem(f"{row.flag} is not understood", row.remark) for row in b.rows if row.kind == "not understood"]
    for name, value in given.items():
        if script is None or name not in script.asked:
            rule = "there is no script" if script is None else f"the script has no ${name}"
            found.append(Problem(f"--set {name}={value} changes nothing", rule, place=COMMAND_LINE))
    if script is not None:
        found += [Problem(what, place=f"{source}:{at}") for at, what in script.unread]
    return found


def _read(words: Sequence[str], given: Mapping[str, str]) -> tuple[Script | None, CommandLine, str]:
    if not words:
        remedy = "bloomery import megatron SCRIPT, or the flags themselves"
        raise RecipeError(Problem("there is nothing to import", remedy=remedy))
    if wrong := [name for name in given if not is_settable(name)]:
        rule = "it sets a variable of the script such as NAME, or an argument of it such as 1"
        raise RecipeError([Problem(f"--set {name}={given[name]}", rule, "mend the name") for name in wrong])
    first = Path(words[0])
    if words[0].startswith("-") or (words[0].endswith(".py") and len(words) > 1):
        return None, parse_command(words, COMMAND_LINE), COMMAND_LINE
    try:
        text = read_text(first)
    except (OSError, UnicodeDecodeError) as error:
        rule = "the first word is a flag, a program such as pretrain_gpt.py, or a file with the command line"
        raise RecipeError(Problem(f"cannot read {first}: {error}", rule, "correct the path")) from error
    try:
        script = read_script(text, given)
    except ShellError as error:
        remedy = "mend that line, or give the flags themselves: bloomery import megatron --num-layers ..."
        place = f"{first}:{error.line}"
        raise RecipeError(Problem(f"this script cannot be read: {error}", "", remedy, place)) from error
    command = _training_command(script, first)
    line = parse_command(command.words, f"{first}:{command.line}")
    more = parse_command(["x.py", *words[1:]], COMMAND_LINE)
    line.flags |= more.flags
    line.stray += more.stray
    return script, line, str(first)


def _training_command(script: Script, file: Path) -> Command:
    """The command that trains: the one with a model's size."""
    sizes = ("--num-layers", "--encoder-num-layers")
    found = [command for command in script.commands if any(word.startswith(sizes) for word in command.words)]
    found = [command for command in found if command.words[0] != "echo"]
    if not found:
        unread = "; ".join(f"line {line}: {what}" for line, what in script.unread)
        rule = f"none of its {len(script.commands)} commands that are run has --num-layers" + (
            f". Not read: {unread}" if unread else ""
        )
        remedy = "give variables that it needs with --set NAME=VALUE, or name the script that starts the training"
        raise RecipeError(Problem("there is no training in this script", rule, remedy, str(file)))
    found = [command for command in found if _trains(command)] or found
    command = found[-1]
    others = [other for other in found if other.words != command.words]
    if others and not all(each.doubt for each in found):
        raise RecipeError(_several(others, command, file))
    if command.doubt:
        rule = command.doubt
        remedy = "give the variable of that condition with --set NAME=VALUE; if it has none, give the flags themselves"
        raise RecipeError(Problem("this command may not be run", rule, remedy, f"{file}:{command.line}"))
    return command


def _trains(command: Command) -> bool:
    return any(Path(word).name.startswith("pretrain") and word.endswith(".py") for word in command.words)


def _several(others: Sequence[Command], last: Command, file: Path) -> Problem:
    """Two trainings: which one is meant?"""
    one, two = others[-1], last
    told = []
    for a, b in ((one, two), (two, one)):
        mine, other = parse_command(a.words, "").flags, parse_command(b.words, "").flags
        own = [f"{flag} {given.text}".strip() for flag, given in mine.items() if other.get(flag) != given]
        told.append(shown(" ".join(own))[:120] or "nothing of its own but the launcher")
    lines = " and ".join(str(each.line) for each in (*others, last))
    what = f"lines {lines} are different trainings: line {one.line} has {told[0]}, line {two.line} has {told[1]}"
    remedy = (
        "import a copy of the script with one of them, or choose with the variable of a condition: --set NAME=VALUE"
    )
    return Problem(what, "a recipe is one training", remedy, f"{file}:{two.line}")


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
    if flag is not None and named is not None:
        b.tell("not needed", "deepspeed_config", f"--ds-config {named} is read instead")
    elif flag is not None and found is not None:
        b.tell("not needed", "deepspeed_config", "read for what it says and compared with the flags")
    elif found is None and (b.deepspeed or flag is not None):
        if not may_lack:
            named_so = f"the ds_config {shown(flag.text)!r} cannot be seen" if flag else ""
            rule = "it is not here, or a program writes it; ZeRO stage, precision, clipping and loss scale stand in it"
            remedy = "give it with --ds-config FILE, or import without it: --without-ds-config"
            b.problem(flag or b.given("deepspeed"), named_so or "--deepspeed has no ds_config", rule, remedy)
        b.tell("left out", "deepspeed_config", "not seen, so it was neither read nor compared with the flags")
    if found is None:
        return None
    if not b.has("deepspeed"):
        remark = (
            "a ds_config means DeepSpeed, so it counts, though --deepspeed is not there: without it nobody reads it"
        )
        b.rows.append(Row("differs", "ds_config", found[1], remark=remark))
    b.deepspeed = True
    return read_ds_config(*found)


def _text_of(path: str, script: Script | None, source: str) -> tuple[str, str] | None:
    """(text, place) of a file that the script writes in a here-document, or that lies here or beside it."""
    if script is not None and path in script.files:
        written = script.files[path]
        return written and (written[0], f"{source}:{written[1]}")
    for place in (Path(path), Path(source).parent / path):
        if os.path.isfile(place):
            try:
                return read_text(place), str(place)
            except (OSError, UnicodeDecodeError) as error:
                raise RecipeError(Problem(f"cannot read {place}: {error}", remedy="correct the path")) from error
    return None


def _said_by_flags(b: Builder, ds: DsConfig) -> dict[str, Said]:
    """By path in a ds_config: what the flags, or Megatron's defaults, say of it."""
    said: dict[str, Said] = {}
    start = next((given.place for given in b.line.flags.values()), COMMAND_LINE)

    def say(path: str, field: str, value: Any, *flags: str) -> None:
        found = [given for name in flags if (given := b.line.flags.get(f"--{name}")) is not None]
        if found:
            written = " ".join(f"{given.flag} {given.text}".strip() for given in found)
            said[path] = Said(value, written, place=found[0].place, field=field)
        else:
            names = " ".join(f"--{name}" for name in flags)
            example = " ".join(f"--{name} {{}}" for name in flags)
            said[path] = Said(value, f"Megatron takes {value} without {names}", example, start, field)

    batch, optimizer = b.raw["batch"], b.raw["optimizer"]
    say("train_batch_size", "batch.global_batch_size", batch["global_batch_size"], "global-batch-size")
    say("train_micro_batch_size_per_gpu", "batch.micro_batch_size", batch["micro_batch_size"], "micro-batch-size")
    say("gradient_clipping", "optimizer.clip_grad_norm", b.value("clip-grad", float, 1.0), "clip-grad")
    say("optimizer.params.lr", "lr.peak", b.raw["lr"]["peak"], "lr")
    say("optimizer.params.betas", "optimizer.betas", optimizer["betas"], "adam-beta1", "adam-beta2")
    say("optimizer.params.eps", "optimizer.eps", optimizer["eps"], "adam-eps")
    say("optimizer.params.weight_decay", "optimizer.weight_decay", optimizer["weight_decay"], "weight-decay")
    if b.has("zero-stage"):
        say("zero_optimization.stage", "parallel.zero", b.value("zero-stage", int, 0), "zero-stage")
    elif ds.zero_stage is not None:
        said["zero_optimization.stage"] = Said(ds.zero_stage, "no flag says another", field="parallel.zero")
    if stage := said.get("zero_optimization.stage"):
        zero = b.raw["parallel"]["zero"]
        note = f"; {BF16_SHARDS}" if zero != stage.value else ""
        said["zero_optimization.stage"] = replace(stage, became=str(zero), note=note)
    if ds.gradient_clipping is not None and clips_as_ds_config(b):
        said["gradient_clipping"] = Said(ds.gradient_clipping, "no flag", field="optimizer.clip_grad_norm")
    for precision in ("fp16", "bf16"):
        is_set = b.has(precision)
        written = f"--{precision}" if is_set else f"no --{precision}"
        said[f"{precision}.enabled"] = Said(is_set, written, place=start, field="precision", became=b.raw["precision"])
    launch, parallel = b.raw.get("launch"), b.raw["parallel"]
    if launch and "rampup" not in batch:
        ranks = parallel["tp"] * parallel["pp"] * parallel.get("cp", 1)
        replicas = launch["nodes"] * launch["gpus_per_node"] // max(1, ranks)
        unit = batch["micro_batch_size"] * replicas
        if unit and batch["global_batch_size"] % unit == 0:
            steps = batch["global_batch_size"] // unit
            text = f"--global-batch-size {batch['global_batch_size']}, which takes {steps} with {replicas} replicas"
            said["gradient_accumulation_steps"] = Said(steps, text, place=start)
    return said


def _rest(b: Builder) -> None:
    """Rows and problems for the flags that no section asked for."""
    for flag, given in b.line.flags.items():
        name = flag.removeprefix("--")
        if name in ARITY:
            if not any(row.flag == flag for row in b.rows):
                was_read = name in b.read
                remark = (
                    "decided together with the other flags" if was_read else "this kind of training does not read it"
                )
                b.tell("not needed", name, remark)
        elif name in REFUSED and not (given.values and set(given.values) <= set(REFUSED[name].off)):
            what = f"{flag} {shown(given.text)[:60]}".strip()
            b.problem(given, f"{what} is set", REFUSED[name].rule, "leave it out, if the training may go without")
        elif name in REFUSED:
            b.tell("not needed", name, "that turns it off")
        elif name in TOLD:
            _, kind, remark = TOLD[name]
            b.tell(kind, name, remark)
        elif remark := not_needed(name):
            b.tell("not needed", name, remark)
        else:
            near = difflib.get_close_matches(name, [*ARITY, *NOT_NEEDED, *REFUSED, *TOLD], n=1, cutoff=0.8)
            hint = f"did you mean --{near[0]}?" if near else "unknown here: check whether it changes what is trained"
            b.tell("not understood", name, hint)


def _unset(b: Builder) -> list[Problem]:
    """Fields with a variable in them that has no value: told in their rows, and as warnings."""
    warnings = {}
    for number, row in enumerate(b.rows):
        if is_known(row.result):
            continue
        why, names = b.why_unknown(row.result), unset_names(row.result)
        b.rows[number] = replace(row, kind="left out", remark=f"complete it by hand: {why}")
        remedy = f"give it with --set {names[0]}=VALUE" if names and b.reasons is not None else "complete the recipe"
        warnings[why] = Problem(f"{row.field} is {row.result}", why, remedy, b.places.get(row.field, ""))
    return list(warnings.values())


def _checked(raw: dict[str, Any], b: Builder, source: str) -> tuple[Recipe, list[Problem]]:
    """The recipe that `bloomery check` would accept. Problems of flags come first: they may explain those of fields."""
    problems = list(b.problems)
    draft = Draft(source=source, places=dict(b.places))
    warnings: list[Problem] = []
    if not problems:
        validate(copy.deepcopy(raw), draft)
        problems += draft.problems
        for found in findings(draft):
            problem = Problem(found.what, found.rule, found.remedy, draft.place(*found.paths))
            (warnings if found.is_warning else problems).append(problem)
    if problems:
        raise RecipeError(sorted(problems, key=by_place))
    assert draft.recipe is not None
    return draft.recipe, warnings


def _as_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text.removesuffix(".slurm").removesuffix(".sh")).strip("-._")
    return name[:100] or "imported"
