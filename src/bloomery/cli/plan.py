"""`bloomery plan RECIPE`: memory, time, cost, energy and checkpoints of a training, and the layouts to choose from."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.base.doing import doing
from bloomery.base.errors import Problem, RecipeError
from bloomery.cli.arguments import add_json, add_recipe_arguments, as_text, load, positive, show, warn, whole_number

if TYPE_CHECKING:
    from bloomery.config.recipe import Recipe
    from bloomery.plan.candidates import Question
    from bloomery.plan.hardware import Catalogue

_READS = ("name", "model", "batch", "train", "precision", "parallel", "checkpoint", "launch", "monitor", "data")
_GPU = "a100-80g"
_SENTENCES = ("largest_costs", "advice")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--gpu", help=f"a device of docs/plan.md or of --hardware; default: this one if calibrated, or {_GPU}"
    )
    parser.add_argument("--gpus", type=whole_number(1, 1_000_000), help="how many; default: those of the recipe")
    parser.add_argument("--nodes", type=whole_number(1), help="machines; default: as many as the devices fill")
    parser.add_argument("--network", help="between nodes; default: the usual one of the device")
    parser.add_argument("--price", type=positive, metavar="USD", help="of a device for an hour; default: a table's")
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="YAML with your devices, networks and storage")
    parser.add_argument("--why", metavar="LAYOUT", help="what a layout such as tp4-pp12-dp8-zero1-mb2 has against it")
    parser.add_argument("--emit", type=Path, metavar="FILE", help="write the recipe with the best layout")
    parser.add_argument("--score", nargs="+", type=Path, metavar="RUN", help="instead: predicted against measured runs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write pictures of the plan")
    add_json(parser)


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """`--score` takes runs instead of a recipe."""
    if "--score" not in words:
        return parser.parse_intermixed_args(words)
    scorer = argparse.ArgumentParser(prog=parser.prog, allow_abbrev=False)
    scorer.add_argument("--score", nargs="+", type=Path, metavar="RUN", required=True)
    add_json(scorer)
    return scorer.parse_args(words)


def run(args: argparse.Namespace) -> int:
    if args.score:
        from bloomery.plan.answer import scores

        return show(args, scores(args.score))
    from bloomery.base.storage import write_atomically
    from bloomery.config.load import as_yaml
    from bloomery.plan.answer import answer
    from bloomery.plan.hardware import read_catalogue
    from bloomery.plan.search import why, with_layout

    catalogue = read_catalogue(args.hardware)
    question = _question(args, catalogue)
    if args.why:
        return show(args, {"why": why(question)}, _lines)
    with doing("ranking the layouts"):
        found = answer(question, catalogue, args.price)
    warn(*found.warnings)
    if args.emit:
        best = found.ranking.name(found.ranking.best())
        _, emitted = with_layout(args.recipe, args.overrides, best, question.machine.node)
        write_atomically(args.emit, as_yaml(emitted.recipe))
    if args.html:
        from bloomery.plan.pictures import picture_page

        write_atomically(args.html, picture_page(found, question.recipe))
    words = ["bloomery", "verify", args.recipe, *args.overrides, "--simulate-world", str(found.facts["world"])]
    hint = f"Activations are estimated. This measures them: {shlex.join(words)}"
    return show(args, found.facts, lambda facts: f"{_text(facts)}\n\n{hint}")


def _question(args: argparse.Namespace, catalogue: Catalogue) -> Question:
    from bloomery.plan.candidates import Question
    from bloomery.plan.constants import fitted
    from bloomery.plan.hardware import Machine, here, named
    from bloomery.plan.search import Ranking, with_layout
    from bloomery.sizing.check import layout_problems
    from bloomery.sizing.layout import ranks_per_node

    name = args.gpu or (here() if here() in catalogue.devices else _GPU)
    device = named(catalogue.devices, name, "device")
    constants = fitted().on(device)
    given = args.overrides
    args.overrides = [*given, *_launch_words(args, device.node)]
    recipe = _unchecked(args)
    alone = ranks_per_node(recipe) == 1
    machine = Machine.of(catalogue, name, args.network, device.node if alone else ranks_per_node(recipe))
    if args.why:
        recipe = with_layout(args.recipe, args.overrides, args.why, machine.node)[1].recipe
    elif (args.gpus or args.nodes) and (wrong := layout_problems(recipe)):
        ranking = Ranking.of(Question(recipe, machine, constants))
        best = ranking.name(ranking.best())
        words, loaded = with_layout(args.recipe, given, best, machine.node)
        args.overrides, recipe = [*given, *words], loaded.recipe
        warn(f"the layout of the recipe takes another number of devices: {wrong[0]}. This is the plan of {best}")
    else:
        recipe = load(args, reads=_READS).recipe
    return Question(recipe, machine, constants)


def _unchecked(args: argparse.Namespace) -> Recipe:
    from bloomery.config.load import load_recipe

    return load_recipe(args.recipe, args.overrides).recipe


def _launch_words(args: argparse.Namespace, usual_node: int) -> list[str]:
    """Overrides for --gpus and --nodes."""
    if not (args.gpus or args.nodes):
        return []
    section = _unchecked(args).launch
    usual = section.gpus_per_node if section and section.gpus_per_node > 1 else usual_node
    nodes = args.nodes or max(1, args.gpus // usual)
    each, rest = divmod(args.gpus or usual * nodes, nodes)
    if rest or not each:
        near = f"use {nodes * each or nodes} or {nodes * (each + 1)}"
        raise RecipeError(Problem(f"--gpus is {args.gpus}", f"{nodes} nodes have equally many", near, "command line"))
    on = ["launch.on=hosts"] if nodes > 1 and (section is None or section.on == "local") else []
    return [f"launch.nodes={nodes}", f"launch.gpus_per_node={each}", *on]


def _text(facts: dict[str, Any]) -> str:
    plain = {name: value for name, value in facts.items() if name not in _SENTENCES}
    return "\n\n".join([as_text(plain), *(f"{name}:\n{_lines({name: facts[name]})}" for name in _SENTENCES)])


def _lines(facts: dict[str, Any]) -> str:
    return "\n".join(f"- {sentence}" for sentences in facts.values() for sentence in sentences)
