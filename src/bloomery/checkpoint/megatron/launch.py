"""Nodes, GPUs and time of a launch script: `#SBATCH` lines and the launcher's own flags."""

from __future__ import annotations

import re

from bloomery.base.errors import Problem
from bloomery.base.units import LONGEST_SECONDS
from bloomery.checkpoint.megatron.builder import Builder
from bloomery.checkpoint.megatron.flags import Given, Row
from bloomery.checkpoint.megatron.shell import Script
from bloomery.checkpoint.megatron.shell_expand import is_known

_NODES = ("--nnodes", "--num_nodes", "--num-nodes")
_MOST_NODES, _MOST_LEVELS = 10_000, 10_000
_GPUS = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus")


def fill_launch(b: Builder, script: Script | None, file: str) -> None:
    """The recipe's `launch` section, where the script says anything about it."""
    sbatch = script.sbatch if script is not None else {}
    nodes, gpus = _launcher(b, _NODES), _launcher(b, _GPUS)
    asked = _number(sbatch.get("nodes", ("", 0))[0])
    per_node = _number(sbatch.get("gpus-per-node", ("", 0))[0]) or _number(sbatch.get("gres", ("", 0))[0])
    if nodes is not None and asked is not None and nodes[0] != asked:
        what = f"#SBATCH --nodes is {asked} but the launcher starts {nodes[0]} ({nodes[1].flag})"
        rule = "the launcher would wait for ever, or leave nodes idle"
        place = f"{file}:{sbatch['nodes'][1]}"
        b.problems.append(Problem(what, rule, "make them equal: NNODES=$SLURM_NNODES", place))
    count = nodes[0] if nodes else asked
    ranks = gpus[0] if gpus else per_node
    if count is None and ranks is None:
        return
    where = "slurm" if sbatch else "hosts" if (count or 1) > 1 else "local"
    b.put("launch.on", where, remark="#SBATCH lines" if sbatch else "the launcher's flags")
    fitting = _fitting_nodes(b, count or 1, ranks or 1)
    remark = "#SBATCH --nodes" if asked else "the launcher's flags"
    if fitting != (count or 1):
        remark = "so many nodes make more replicas than every level of the batch ramp can feed"
        b.put("launch.nodes", fitting, remark=remark)
        b.rows[-1] = Row(
            "differs", "#SBATCH --nodes" if asked else "nodes", str(count), "launch.nodes", str(fitting), remark
        )
    else:
        b.put("launch.nodes", fitting, remark=remark)
    b.put("launch.gpus_per_node", ranks or 1, remark="#SBATCH, or the launcher's flags")
    _time(b, script, file)


def _time(b: Builder, script: Script | None, file: str) -> None:
    sbatch = script.sbatch if script is not None else {}
    if "time" in sbatch and (limit := _duration(sbatch["time"][0])):
        b.put("launch.time_limit", limit, remark=f"#SBATCH --time {sbatch['time'][0]}")
        b.places["launch.time_limit"] = f"{file}:{sbatch['time'][1]}"
    elif "time" in sbatch:
        b.rows.append(Row("left out", "#SBATCH --time", sbatch["time"][0], "launch.time_limit", remark="no limit here"))
    if "array" in sbatch and (match := re.fullmatch(r"(\d+)-(\d+)%1", sbatch["array"][0])):
        b.put("launch.array", int(match[2]) - int(match[1]) + 1, remark=f"#SBATCH --array {sbatch['array'][0]}")
    read = ("nodes", "gpus-per-node", "gres", "time", "array", "job-name")
    for name, (value, _) in sbatch.items():
        if name not in read:
            b.rows.append(Row("not needed", f"#SBATCH --{name}", value, remark="for the scheduler, not for training"))


def _launcher(b: Builder, names: tuple[str, ...]) -> tuple[int, Given] | None:
    for name in names:
        given = b.line.launcher.get(name)
        if given is not None and given.values:
            text = given.values[0]
            if is_known(text) and (number := _number(text)) is not None:
                return number, given
            b.rows.append(Row("left out", name, text, "launch", remark="only a running shell knows it"))
    return None


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
    levels = [*rising, batch["global_batch_size"]]
    for count in range(nodes, 0, -1):
        unit = count * gpus // replica * batch["micro_batch_size"]
        if count * gpus % replica == 0 and unit and all(level % unit == 0 for level in levels):
            return count
    return nodes


def _number(text: str) -> int | None:
    """The last number of `4`, `gpu:4` or `gpu:a100:4`."""
    match = re.fullmatch(r"(?:.*:)?([0-9]{1,9})", text)
    return int(match[1]) if match else None


def _duration(text: str) -> str:
    """Slurm's `20:00:00`, `1-00:00:00` or `90` (minutes) as a recipe says it; empty for no limit."""
    number = "([0-9]{1,9})"
    match = re.fullmatch(f"(?:{number}-)?{number}(?::{number})?(?::{number})?", text)
    if match is None:
        return ""
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None:
        seconds = days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        seconds = (first or 0) * 3600 + (second or 0) * 60 + third
    else:
        seconds = (first or 0) * 60 + (second or 0)
    if seconds > LONGEST_SECONDS:
        return ""
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    return "".join(f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if count)
