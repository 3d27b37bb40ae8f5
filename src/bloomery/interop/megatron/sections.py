"""Flags of the batch ramp, the learning rate, the length of a training, its data, and its launch."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from bloomery.base.errors import Problem
from bloomery.base.units import LONGEST_SECONDS
from bloomery.interop.megatron.builder import Builder, Row, real_number
from bloomery.interop.megatron.flags import Given, is_known
from bloomery.interop.megatron.run_script import Script

_BIGSCIENCE = (
    "tokenizer-name-or-path", "pad-vocab-size-to", "codecarbon-dir", "skip-train-iteration-range",
    "train-weighted-split-paths", "train-weighted-split-paths-path",
)  # fmt: skip
"""Flags that only BigScience's Megatron-DeepSpeed has."""
_FORM = '"NAME: WEIGHT START:END PATH, WEIGHT START:END PATH", WEIGHT > 0 and 0 <= START < END <= 1'
_MOST_NODES, _MOST_LEVELS = 10_000, 10_000


def fill_schedule(b: Builder) -> None:
    """`lr`, but its peak and schedule."""
    style = b.raw["lr"]["schedule"]
    length = next((name for name in ("train-samples", "train-iters", "train-tokens") if b.has(name)), "train-iters")
    flag = next((name for name in ("lr-decay-samples", "lr-decay-iters") if b.has(name)), length)
    decay, unit = b.value(flag, int, 1), _unit(flag)
    if style != "constant":
        b.put("lr.min", b.value("min-lr", float, 0.0), "min-lr")
        if b.has("lr-decay-tokens"):
            for name in ("lr-decay-samples", "lr-decay-iters"):
                b.note("not needed", name, "--lr-decay-tokens overrules it")
            b.put("lr.decay", f"{b.value('lr-decay-tokens', int, 1)} tokens", "lr-decay-tokens")
        else:
            remark = "" if flag != length else "Megatron's default: the length of the training"
            b.put("lr.decay", f"{decay} {unit}", *([flag] if flag != length else []), remark=remark)
    _warmup(b, style, decay, unit)
    if style == "wsd":
        shape = b.value("lr-wsd-decay-style", str, "exponential")
        if shape != "linear":
            what, remedy = f"--lr-wsd-decay-style is {shape}", "use --lr-wsd-decay-style linear"
            b.refuse("lr-wsd-decay-style", what, "it is linear here", remedy)
        flag = b.first("lr-wsd-decay-iters", "lr-wsd-decay-samples")
        b.put("lr.cooldown", f"{b.value(flag, int, 0)} {_unit(flag)}", flag)


def _unit(flag: str) -> str:
    return {"samples": "samples", "tokens": "tokens"}.get(flag.rpartition("-")[2], "steps")


def _warmup(b: Builder, style: str, decay: int, unit: str) -> None:
    names = ("lr-warmup-tokens", "lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction")
    flags = [name for name in names if b.has(name)]
    flags = [name for name in flags if b.value(name, float, 0.0) != 0] or flags[:1]
    flag, *others = flags or [""]
    if others and flag != "lr-warmup-tokens":
        both = " and ".join(f"--{name}" for name in flags)
        b.refuse(others[0], f"{both} are both set", "there is one warm-up", "remove one")
    for name in others:
        b.note("not needed", name, f"--{flag} overrules it")
    if flag == "lr-warmup-fraction":
        share = b.value(flag, float, 0.0)
        if not 0 <= share < 1:
            rule = "it is the part of the decay that is warm-up: at least 0, less than 1"
            b.refuse(flag, f"--{flag} is {share:g}", rule, "use for example 0.01")
            share = 0.0
        count = round(share * decay, 6)
        if count != int(count):  # Megatron counts samples, so a fraction of a step is exact in samples
            count, unit = count * (b.raw["batch"]["global_batch_size"] if unit == "steps" else 1), "samples"
        b.put("lr.warmup", f"{int(count)} {unit}", flag, remark=f"{share:g} of the decay")
    elif flag:
        jumps = flag == "lr-warmup-tokens" and style != "constant" and not b.has("lr-decay-tokens")
        remark = "the decay begins with its end; in Megatron, without --lr-decay-tokens, as if there were no warm-up"
        text = f"{b.value(flag, int, 0)} {_unit(flag)}"
        b.put("lr.warmup", text, flag, kind="differs" if jumps else "mapped", remark=remark if jumps else "")
    else:
        b.put("lr.warmup", "0 samples")


def fill_train(b: Builder, has_validation: bool) -> None:
    """`train`, the batch ramp and `checkpoint.phases`."""
    if (ramp := b.given("rampup-batch-size")) is not None:
        numbers = [b.convert(ramp, text, int, 1) for text in ramp.values]
        if len(numbers) != 3:
            what = f"--rampup-batch-size has {len(numbers)} values"
            b.problem(ramp, what, "it takes START INCREMENT SAMPLES", "give three")
            numbers = [1, 1, 1]
        start, increment, samples = numbers
        rampup = {"start": start, "increment": increment, "samples": samples}
        b.put("batch.rampup", rampup, "rampup-batch-size")
    _length(b)
    _exit(b)
    if skips := b.given("skip-train-iteration-range"):
        b.put("train.skip", [f"{text} steps" for text in skips.values], "skip-train-iteration-range")
    elif single := b.given("iterations-to-skip"):
        counts = sorted({b.convert(single, text, int, 0) + 1 for text in single.values})
        remark = "Megatron counts them from 0, a recipe from 1"
        b.put("train.skip", [f"{step}-{step} steps" for step in counts], "iterations-to-skip", remark=remark)
    every, each = b.value("eval-interval", int, 1000), b.value("eval-iters", int, 100)
    if each and has_validation:
        b.put("train.evaluate", {"every": f"{every} steps", "steps": each}, "eval-interval", "eval-iters")
    else:
        for name in ("eval-interval", "eval-iters"):
            b.note("left out", name, "there is nothing to evaluate" if each else "0 turns it off")
    saves = b.first("save-interval", "persistent-save-interval")
    if interval := b.value(saves, int, 0):
        b.put("checkpoint.phases", [{"every": f"{interval} steps"}], saves)
    b.put("monitor.tensorboard", b.has("tensorboard-dir"), "tensorboard-dir")


def _length(b: Builder) -> None:
    samples, iters, tokens = (b.given(name) for name in ("train-samples", "train-iters", "train-tokens"))
    if samples and iters:
        what = f"--train-samples is {samples.text} and --train-iters is {iters.text}"
        b.problem(iters, what, "Megatron takes one of them", "remove one")
    elif not samples and not iters and not tokens:
        b.problem(None, "--train-samples is missing", "a training has a length", "add --train-samples or --train-iters")
    if iters and b.has("rampup-batch-size"):
        b.problem(iters, "--train-iters with --rampup-batch-size", "Megatron forbids it", "use --train-samples")
    flag = "train-samples" if samples else "train-iters"
    count, most = b.value(flag, int, 1), b.value("train-tokens", int, 1)
    total = count * (1 if samples else b.raw["batch"]["global_batch_size"]) * b.raw["model"]["seq_length"]
    mark = next((name for name in _BIGSCIENCE if b.has(name)), "")
    remark = "it ends with whichever comes first"
    if tokens and not ((samples or iters) and (mark or most >= total)):
        b.note("not needed", flag, f"{remark}, which is --train-tokens")
        remark += "; the step that would pass it is not taken"
        b.put("train.for", f"{most} tokens", "train-tokens", remark=remark)
        return
    b.put("train.for", f"{count} {_unit(flag)}", flag)
    why = f"BigScience's Megatron-DeepSpeed, which has --{mark}, reads it and never uses it"
    b.note("not needed", "train-tokens", why if mark else f"{remark}, which is --{flag}")


def _exit(b: Builder) -> None:
    minutes, interval = b.value("exit-duration-in-mins", int, 0), b.value("exit-interval", int, 0)
    if minutes < 0:
        what, remedy = f"--exit-duration-in-mins is {minutes}", "remove it, or use 1190"
        b.refuse("exit-duration-in-mins", what, "a job lasts some minutes", remedy)
    elif minutes * 60 > LONGEST_SECONDS:
        remark = f"{minutes / 60 / 24 / 365:.0f} years are never, so there is no limit"
        b.note("mapped", "exit-duration-in-mins", remark, path="train.exit_after", result="null")
    elif minutes:
        b.put("train.exit_after", _duration(minutes * 60), "exit-duration-in-mins")
        b.note("left out", "exit-interval", "a job ends by one rule: the wall clock")
        return
    if interval:
        remark = "Megatron ends a job at every multiple of it, ours after that many steps of the job"
        b.put("train.exit_after", f"{interval} steps", "exit-interval", kind="differs", remark=remark)


def _duration(seconds: int) -> str:
    parts = ((seconds // 3600, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count)


def fill_data(b: Builder, family: str) -> bool:
    """`data`; whether there is something to evaluate."""
    if family == "bert":
        b.put("data.masking.probability", b.value("mask-prob", float, 0.15), "mask-prob")
        b.put("data.masking.short_sequence_probability", b.value("short-seq-prob", float, 0.1), "short-seq-prob")
        if b.has("bert-no-binary-head"):
            b.refuse("bert-no-binary-head", "--bert-no-binary-head is set", "bert has its order head here")
    weighted = b.first("train-weighted-split-paths", "train-weighted-split-paths-path")
    plain = [name for name in ("data-path", "train-data-path", weighted) if b.has(name)]
    if len(plain) > 1:
        both = f"--{plain[0]} and --{plain[1]} are both set"
        b.refuse(plain[1], both, "Megatron takes one of them", "remove one")
    elif plain and plain[0] != weighted and (sources := _sources(b, plain[0])):
        blends_one = len(sources) == 1 and "weight" in sources[0]
        remark = "Megatron blends one source with a weight: data.order=megatron needs data.blend_one_source=true"
        b.put("data.train", sources, plain[0], remark=remark if blends_one else "")
    evaluates = _weighted_splits(b)
    if "train" not in b.raw.get("data", {}):
        _no_data(b)
        return False
    if plain[0] == weighted:
        return evaluates
    if b.has("valid-data-path"):
        b.put("data.validation", {"valid": _sources(b, "valid-data-path")}, "valid-data-path")
        return True
    split = b.value("split", str, "969,30,1").strip("'\"")  # quotes that a shell left in an item of an array
    b.put("data.split", split, "split")
    shares = re.findall(r"[0-9]+(?:\.[0-9]+)?", split)
    return len(shares) > 1 and float(shares[1]) > 0


def _sources(b: Builder, flag: str) -> list[dict[str, Any]]:
    given = b.given(flag)
    assert given is not None
    words, rule = given.values, "it is one path, or pairs of weight and path"
    if any(word.startswith("$(") for word in words):
        b.note("left out", flag, "only a running program knows these paths: add `data:` to the recipe")
        return []
    if len(words) == 1:
        return [{"path": words[0]}]
    if len(words) > 1 and not any(re.fullmatch(r"[0-9.eE+-]+", word) for word in words):
        rule = "Megatron then blends by their lengths and ends when all is read once, which no recipe can express"
        what, remedy = f"names {len(words)} paths without weights", f"give each path a weight, `--{flag} 0.7 A 0.3 B`"
        b.problem(given, f"--{flag} {what}", rule, remedy)
    elif not words or len(words) % 2:
        b.problem(given, f"--{flag} has {len(words)} words", rule, "give one path, or pairs")
    else:
        pairs = zip(words[::2], words[1::2], strict=True)
        return [{"path": path, "weight": b.convert(given, weight, real_number, 1.0)} for weight, path in pairs]
    return []


def _no_data(b: Builder) -> None:
    """Without sources there is no `data` section, so whatever belongs to it is left out, and reported."""
    reported = {row.flag for row in b.rows if row.kind == "left out"}
    parts = ("train", "valid")
    for name in (*(f"{part}-weighted-split-paths{end}" for part in parts for end in ("", "-path")), "valid-data-path", "split"):
        if f"--{name}" not in reported:
            b.note("left out", name, "add `data:` with train and validation to the recipe")
    for number, row in enumerate(b.rows):
        if row.field.startswith("data.") and row.flag:
            remark = f"add it to `data:` as {row.field.removeprefix('data.')}: {row.result}"
            b.rows[number] = Row("left out", row.flag, row.value, remark=remark)
    b.rows = [row for row in b.rows if not row.field.startswith("data.")]
    b.raw.pop("data", None)


@dataclass(frozen=True)
class _Member:
    """Of a group of weighted split paths: the documents from one fraction of a shard to another."""

    weight: Decimal
    start: Decimal
    end: Decimal
    path: str

    def source(self) -> dict[str, Any]:
        return {"path": self.path, "weight": float(self.weight)}


def _weighted_splits(b: Builder) -> bool:
    """Weighted split paths of BigScience's fork: a recipe cuts all training sources at one place (`data.split`), and
    validates behind it or on whole shards (`data.validation`). Whether there is something to evaluate."""
    train, valid = _groups(b, "train"), _groups(b, "valid")
    valid_flag = b.first("valid-weighted-split-paths", "valid-weighted-split-paths-path")
    if not train:
        b.note("left out", valid_flag if valid else "", "it is read with --train-weighted-split-paths only")
        return False
    flag = b.first("train-weighted-split-paths", "train-weighted-split-paths-path")
    for other in ("valid-data-path", "split"):
        if b.has(other):
            b.refuse(other, f"--{other} and --{flag} are both set", "Megatron takes one of them", "remove one")
    (members, *others), ends = train.values(), {each.end for each in next(iter(train.values()))}
    b.put("data.train", [member.source() for member in members], flag)
    if others or len(ends) > 1 or any(each.start for each in members):
        shown = ", ".join(f"{each.start}:{each.end} of {each.path}" for each in members[:5])
        what = f"has {len(train)} groups: {', '.join(train)}" if others else f"asks for documents {shown}"
        rule = "a training has one group, and a recipe cuts all its sources at the same place, from their beginning on"
        b.refuse(flag, f"--{flag} {what}", rule, "use one group with 0:END and one END, or prepare shards of their own")
        return False
    end = until = ends.pop()
    validation: dict[str, Any] = {}
    for name, group in (valid or {}).items():
        same = [(each.path, each.weight) for each in group] == [(each.path, each.weight) for each in members]
        spans = {(each.start, each.end) for each in group}
        if end == 1 and spans == {(Decimal(0), Decimal(1))}:
            validation[name] = [member.source() for member in group]
        elif until == end < 1 and same and len(spans) == 1 and group[0].start == end:
            until = group[0].end
            kind, remark = ("mapped", "") if name == "valid" else ("differs", "its group is called valid")
            b.rows.append(Row(kind, f"--{valid_flag}", name, "data.split", "", remark))  # type: ignore[arg-type]
        else:
            remark = (
                f"documents {group[0].start}:{group[0].end} of {group[0].path}: prepare these documents as a shard of "
                f"their own and add it to data.validation.{name}"
            )
            b.rows.append(Row("left out", f"--{valid_flag}", name, remark=remark))
    if end < 1:
        shares = (f"{share.normalize():f}" if share else "0" for share in (end, until - end, 1 - until))
        b.put("data.split", ",".join(shares), flag)
    if validation:
        b.put("data.validation", validation, valid_flag)
    return bool(validation) or until > end


def _groups(b: Builder, part: str) -> dict[str, list[_Member]] | None:
    """The groups of a flag or of the file that it names; None if there are none, which a row or a problem reports."""
    direct, by_file = f"{part}-weighted-split-paths", f"{part}-weighted-split-paths-path"
    given = b.given(direct) or b.given(by_file)
    if given is None:
        return None
    texts, place = given.values, given.place
    if b.has(direct) and b.has(by_file):
        b.refuse(by_file, f"--{direct} and --{by_file} are both set", "Megatron takes one of them", "remove one")
    elif b.has(direct):
        texts = texts if any(" " in text for text in texts) else [" ".join(texts)]
    elif (found := b.find_file(given.text)) is None:
        remark = f"the file is not here: add --{by_file} FILE behind the script, or `data:` to the recipe"
        b.note("left out", by_file, remark)
        return None
    else:
        try:
            texts, place = shlex.split(found[0]), found[1]
        except ValueError as error:
            b.problem(given, f"{found[1]} cannot be read: {error}", f"a group is {_FORM}", "correct it")
    members: dict[str, list[_Member]] = {}
    before = len(b.problems)
    for text in texts or [""]:
        name, _, rest = text.partition(":")
        if not rest or not name.strip() or name.strip() in members:
            what = f"{text[:60]!r} has no name, or that of another group" if text else "it is empty"
            b.problem(given, f"in {place}: {what}", f"a group is {_FORM}", "correct it")
        members[name.strip()] = [each for part in rest.split(",") if (each := _member(b, given, place, part))]
    return members if len(b.problems) == before else None


def _member(b: Builder, given: Given, place: str, text: str) -> _Member | None:
    words = text.split()
    if not is_known(" ".join(words[:2])):
        b.unknown_value(given, text.strip())
        return None
    try:
        weight, span, path = words
        start, end = span.split(":")
        found = _Member(Decimal(weight), Decimal(start), Decimal(end), path)
        if 0 <= found.start < found.end <= 1 and found.weight > 0:
            return found
    except (ValueError, InvalidOperation):
        pass
    b.problem(given, f"in {place}: {text.strip()[:80]!r} is no part of a group", f"a group is {_FORM}", "correct it")
    return None


def fill_launch(b: Builder, script: Script | None, file: str) -> None:
    """The recipe's `launch` section, where #SBATCH lines or the launcher's flags say anything about it."""
    sbatch = {name: value for name, (value, _) in script.sbatch.items()} if script is not None else {}
    nodes = _launcher(b, "--nnodes", "--num_nodes", "--num-nodes")
    gpus = _launcher(b, "--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus")
    asked = _number(sbatch.get("nodes", ""))
    gpus = gpus or _number(sbatch.get("gpus-per-node", "")) or _number(sbatch.get("gres", ""))
    if nodes is not None and asked is not None and nodes != asked and script is not None:
        what, rule = f"#SBATCH --nodes is {asked} but the launcher starts {nodes}", "it would wait, or leave nodes idle"
        place = f"{file}:{script.sbatch['nodes'][1]}"
        b.problems.append(Problem(what, rule, "make them equal: NNODES=$SLURM_NNODES", place))
    count = nodes or asked
    if count is None and gpus is None:
        return
    count, gpus = count or 1, gpus or 1
    source = "#SBATCH lines" if sbatch else "the launcher's flags"
    b.put("launch.on", "slurm" if sbatch else "hosts" if count > 1 else "local", remark=source)
    fitting = _fitting_nodes(b, count, gpus)
    b.put("launch.nodes", fitting, remark=source)
    if fitting != count:
        remark = "so many nodes make more replicas than every level of the batch ramp can feed"
        b.rows[-1] = Row("differs", "nodes", str(count), "launch.nodes", str(fitting), remark)
    b.put("launch.gpus_per_node", gpus, remark=source)
    if limit := _time_limit(sbatch.get("time", "")):
        b.put("launch.time_limit", limit, remark=f"#SBATCH --time {sbatch['time']}")
    elif "time" in sbatch:
        b.rows.append(Row("left out", "#SBATCH --time", sbatch["time"], "launch.time_limit", remark="no limit here"))
    if match := re.fullmatch(r"(\d{1,6})-(\d{1,6})%1", sbatch.get("array", "")):
        b.put("launch.array", int(match[2]) - int(match[1]) + 1, remark=f"#SBATCH --array {match[0]}")
    for name in sbatch.keys() - {"nodes", "gpus-per-node", "gres", "time", "array", "job-name"}:
        remark = "for the scheduler, not for training"
        b.rows.append(Row("not needed", f"#SBATCH --{name}", sbatch[name], remark=remark))


def _launcher(b: Builder, *names: str) -> int | None:
    given = next((b.line.launcher[name] for name in names if name in b.line.launcher), None)
    if given is not None and (number := _number(given.text)) is None:
        b.rows.append(Row("left out", given.flag, given.text, "launch", remark="only a running shell knows it"))
    return _number(given.text) if given is not None else None


def _fitting_nodes(b: Builder, nodes: int, gpus: int) -> int:
    """The most nodes, up to those asked for, with which every level of a ramp divides among the replicas."""
    batch, parallel = b.raw["batch"], b.raw["parallel"]
    ramp = batch.get("rampup")
    replica = parallel["tp"] * parallel["pp"] * parallel.get("cp", 1)
    if ramp is None or ramp["increment"] < 1 or replica < 1 or nodes > _MOST_NODES:
        return nodes
    rising = range(ramp["start"], batch["global_batch_size"], ramp["increment"])
    if len(rising) > _MOST_LEVELS:
        return nodes  # the rules of a recipe refuse it
    for count in range(nodes, 0, -1):
        unit = count * gpus // replica * batch["micro_batch_size"]
        levels = (*rising, batch["global_batch_size"])
        if count * gpus % replica == 0 and unit and all(level % unit == 0 for level in levels):
            return count
    return nodes


def _number(text: str) -> int | None:
    """The last number of `4`, `gpu:4` or `gpu:a100:4`."""
    match = re.fullmatch(r"(?:.*:)?([0-9]{1,9})", text)
    return int(match[1]) if match else None


def _time_limit(text: str) -> str:
    """Slurm's `20:00:00`, `1-00:00:00` or `90` (minutes) as a recipe writes it; empty for no limit."""
    number = "([0-9]{1,9})"
    match = re.fullmatch(f"(?:{number}-)?{number}(?::{number})?(?::{number})?", text)
    if match is None:
        return ""
    days, first, second, third = (int(part or 0) for part in match.groups())
    is_hours = match[1] is not None or match[4] is not None  # else minutes and seconds
    seconds = days * 86400 + (first * 3600 + second * 60 + third if is_hours else first * 60 + second)
    return _duration(seconds) if seconds <= LONGEST_SECONDS else ""
