"""The documents keep their word: every command in them runs, every link leads somewhere, every name is there.

In a document, a `console` block holds commands (`$ `) and what they print. All blocks of a document run in order in one
temporary folder; a `yaml` block that begins with `# name.yaml` is written there. Shown lines must be printed, numbers
masked. A comment before a block changes the rule: `<!-- exit 2 -->` for an error example, whose lines must match
exactly; `<!-- output varies -->` for text that no two machines share.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rank_commands
from bloomery.base import exit_codes
from bloomery.base.units import format_count
from bloomery.cli.main import COMMANDS, main
from bloomery.config.load import load_recipe, shipped_recipes
from bloomery.interop.hf.maps import their_shapes
from bloomery.launch.local import run_local_ranks
from bloomery.monitor import names
from bloomery.monitor.record import StepRecord, ValidationRecord
from bloomery.monitor.tensorboard import AXES, scalars
from bloomery.sizing.parameters import count_parameters
from bloomery.sizing.schedule import TrainingPlan
from monitor_samples import step_record, validation_record

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
BIN = Path(sys.executable).parent

Command = Callable[..., tuple[int, str, str]]


@dataclass
class Step:
    """A command and what a document shows of its output."""

    command: str
    shown: list[str] = field(default_factory=list)


@dataclass
class Block:
    language: str
    lines: list[str]
    remark: str
    """The comment before the block."""

    def steps(self) -> list[Step]:
        steps: list[Step] = []
        for line in self.lines:
            if line.startswith("$ "):
                steps.append(Step(line[2:]))
            else:
                assert steps, f"output before a command: {line}"
                steps[-1].shown.append(line)
        return steps


def blocks(page: Path) -> Iterator[Block]:
    lines = iter(page.read_text().splitlines())
    remark = ""
    for line in lines:
        if line.startswith("```"):
            inside = []
            for inner in lines:
                if inner.startswith("```"):
                    break
                inside.append(inner)
            yield Block(line[3:], inside, remark)
        if line.strip():
            remark = line if line.startswith("<!--") else ""


# ---------------------------------------------------------------- commands


def with_commands() -> list[Path]:
    return [page for page in PAGES if any(block.language in ("console", "yaml") for block in blocks(page))]


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, command: Command) -> Command:
    """Like `command`, with what several ranks print, who do so for themselves."""
    log = tmp_path_factory.mktemp("ranks") / "log"
    logged = partial(rank_commands.logged, main, str(log))

    def run_ranks(size: int, _: object, words: Sequence[str], **options: Any) -> int:
        return run_local_ranks(size, logged, words, **options)

    def run(*words: str) -> tuple[int, str, str]:
        log.write_text("")
        code, out, err = command(*words)
        return code, out + log.read_text(), err

    monkeypatch.setattr("bloomery.cli.train.run_local_ranks", run_ranks)
    return run


@pytest.mark.parametrize("page", with_commands(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_document_does_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for block in blocks(page):
        if block.language == "yaml" and block.lines[0].startswith("# "):
            (tmp_path / block.lines[0][2:]).write_text("\n".join(block.lines) + "\n")
        elif block.language == "python":
            exec(compile("\n".join(block.lines), str(page), "exec"), {})
        elif block.language == "console":
            run_block(block, here)


def run_block(block: Block, command: Command) -> None:
    steps = block.steps()
    if any(step.command.endswith("&") for step in steps):  # a background job needs one shell for the whole block
        steps = [Step("\n".join(step.command for step in steps))]
    expected = int(exits[1]) if (exits := re.search(r"exit (\d+)", block.remark)) else 0
    for step in steps:
        if step.command.startswith("make "):
            assert_is_a_target(step.command.removeprefix("make "))
            continue  # what `make quickstart` shows has a test of its own
        code, output = run(step, command)
        assert code == expected, f"{step.command} ended with {code} instead of {expected}:\n{output}"
        if "output varies" not in block.remark:
            assert_shown(step, output, exactly=expected != 0)


def run(step: Step, command: Command) -> tuple[int, str]:
    if "^C" in step.shown:
        return run_and_interrupt(step.command)
    needs_shell = re.search(r"[&|;<>\n]|\$\(", step.command)
    if step.command.startswith("bloomery ") and not needs_shell:
        code, out, err = command(*shlex.split(step.command)[1:])
        return code, out + err
    done = subprocess.run(
        ["bash", "-e", "-c", step.command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def run_and_interrupt(text: str) -> tuple[int, str]:
    """Ctrl-C once the training has printed a step."""
    process = subprocess.Popen(
        shlex.split(text), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    seen += process.stdout.read()
    return process.wait(60), seen


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


EXACT = (
    "bloomery check",
    "bloomery inspect model",
    "bloomery inspect schedule",
    "bloomery recipes",
    "bloomery plan days",
)
"""Their answers follow from the recipe alone."""
COUNTS = re.compile(
    r"(?<=step )(?<!resumed at step )\d[\d,]*(/\d[\d,]*)?|\d[\d,.]*[kMBT]?(?= (steps|parameters|tensors)\b)"
)
"""What no machine changes."""


def assert_shown(step: Step, output: str, *, exactly: bool, counts: bool = True) -> None:
    plain: Callable[[str], str] = str if exactly else partial(masked, counts=counts and "^C" not in step.shown)
    if step.command.startswith(EXACT):
        plain = lambda text: " ".join(text.split())  # noqa: E731 - columns are as wide as their widest cell
    printed = {plain(line) for line in output.splitlines()}
    for line in step.shown:
        if line.strip() and line not in ("...", "^C"):
            assert plain(line) in printed, f"`{step.command}` does not print: {line}\nIt prints:\n{output}"


def masked(line: str, *, counts: bool = True) -> str:
    """Without what may differ from machine to machine: measured numbers, hashes, times, sizes and the width of columns.
    `counts`: steps, parameters, tensors and samples are none of these."""
    line = re.sub(r"step +(?=\d)", "step ", line)
    if counts:
        line = COUNTS.sub(lambda found: re.sub(r"\d", lambda digit: chr(ord("a") + int(digit[0])), found[0]), line)
    line = re.sub(r"\b[0-9a-f]{12,}\b", "#", line)
    line = re.sub(r"\b(\d+[dhms])+\b", "#", line)
    line = re.sub(r"\d[\d,.]*(e[+-]?\d+)?( ?([KMGT]i)?B\b|[kMBT]\b)?", "#", line)
    return " ".join(line.split())


def test_numbers_are_masked_and_words_are_not() -> None:
    shown = "step 20/200  lm loss 6.15  6.1k tok/s  ETA 1m15s, hash ccdc7edb25ce, 478.4 KiB, 1.5e-04"
    printed = "step  20/200  lm loss 5  998 tok/s  ETA 9s, hash 0cdc7edb25c0, 9.2 MiB, 3.000000e-03"
    assert masked(shown) == masked(printed) != masked(shown.replace("20/200", "30/200"))
    assert masked("1.312B parameters, 20 steps") != masked("1.312B parameters, 30 steps")
    assert masked("reached 200 steps") != masked("received SIGINT")


def assert_is_a_target(target: str) -> None:
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target}"


QUICK = [
    "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.seq_length=32", "model.vocab_size=300",
    "batch.micro_batch_size=4", "batch.global_batch_size=4", "train.for=4 steps", "train.evaluate.every=2 steps",
    "train.evaluate.steps=2", "lr.warmup=1 steps", "monitor.log_every=2 steps", "checkpoint.phases.0.every=2 steps",
]  # fmt: skip


def test_the_quickstart_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command("quickstart", *QUICK, "--device", "cpu")
    assert code == 0, err
    (step,) = next(block for block in blocks(ROOT / "README.md") if block.language == "console").steps()
    assert step.command == "make quickstart"
    recipe = load_recipe("quickstart").recipe
    steps, tensors = TrainingPlan.of(recipe).train_steps, len(their_shapes(recipe.model))
    parameters = format_count(count_parameters(recipe.model).total)
    counts = re.findall(r"([\d.,]+\w?) (entries|parameters|steps|tensors)|(?:at )?(step) (\d+)", "\n".join(step.shown))
    assert {(kind or at, count or number) for count, kind, at, number in counts} == {
        ("entries", f"{recipe.model.vocab_size:,}"), ("parameters", parameters), ("tensors", str(tensors)),
        *((word, str(count)) for word in ("step", "steps") for count in (steps // 2, steps)),
    }  # fmt: skip
    assert "$(BIN)/bloomery quickstart" in (ROOT / "Makefile").read_text()
    step.shown = [line for line in step.shown if not line.startswith("def read(self, ")]  # the sample
    assert_shown(step, out, exactly=False, counts=False)  # QUICK has fewer of all
    assert "\ndef read(self, " in out
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert any(f"bloomery {name}" in page.read_text() for page in PAGES)


# ---------------------------------------------------------------- links


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of every link that stays in the repository."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)
    return [
        ((page.parent / target).resolve() if target else page, anchor)
        for target, anchor in found
        if not target.startswith(("http:", "https:"))
    ]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading for #{anchor}"


def test_every_document_can_be_found_from_the_readme_or_the_tour() -> None:
    linked = {target for page in (ROOT / "README.md", DOCS / "tour.md") for target, _ in links(page)}
    assert not {page for page in PAGES if page.name != "README.md"} - linked


def test_the_picture_is_small() -> None:
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < 200_000


# ---------------------------------------------------------------- names that documents and code share


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_recipe_reference", DOCS / "generate_recipe_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_reference_is_up_to_date() -> None:
    page = (DOCS / "recipe.md").read_text()
    assert generator().updated(page) == page, "run `python docs/generate_recipe_reference.py`"


def test_the_table_of_what_may_change_is_up_to_date() -> None:
    page = (DOCS / "training.md").read_text()
    made = generator()
    assert made.updated(page, "contract", made.contract()) == page, "run `python docs/generate_recipe_reference.py`"


def test_the_run_folder_page_names_every_field_event_and_tag() -> None:
    page = (DOCS / "run-folder.md").read_text()
    fields = {item.name for kind in (StepRecord, ValidationRecord) for item in dataclasses.fields(kind)}
    events: set[str] = set(names.Event)
    records = (
        step_record(1, mfu=0.5, loss_scale=1.0, memory_bytes=1, peak_memory_bytes=1),
        validation_record(1, group="{group}"),
    )
    tags = {tag for record in records for tag, _, _ in scalars(record) if not tag.endswith(AXES[1:])}
    tags = {tag.removesuffix(" ppl") for tag in tags}
    tags |= {"iteration-time/world_size", "recipe/text_summary", "energy/joules"}
    assert not {name for name in fields | events | tags if f"`{name}`" not in page}
    for file in (names.METRICS_FILE, names.EVENTS_FILE, names.TEXT_LOG_FILE, names.REPORT_FILE, names.RECIPE_FILE):
        assert file in page


def test_every_exit_code_is_in_the_table() -> None:
    page = (DOCS / "exit-codes.md").read_text()
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes


def test_every_stop_reason_is_in_the_table() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "src" / "bloomery" / "train").glob("*.py"))
    page = (DOCS / "training.md").read_text()
    for kind in set(re.findall(r'StopReason\(\s*"(\w+)"', code)):
        assert f"`{kind}`" in page


def test_the_table_of_shipped_recipes_is_right() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| (\w+) \| ([\d,]+) \|$", (DOCS / "models.md").read_text(), re.MULTILINE)
    table = {name: (family, int(number.replace(",", ""))) for name, family, number in rows}
    expected = {}
    for name in shipped_recipes():
        recipe = load_recipe(name).recipe
        parameters = count_parameters(recipe.model).total
        expected[name] = (recipe.model.family, parameters)
    assert table == expected
