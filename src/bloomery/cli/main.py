"""The `bloomery` command: a table of commands, imported only when run, so that --help is fast."""

import argparse
import contextlib
import difflib
import errno
import importlib
import itertools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import NoReturn

from bloomery import __version__
from bloomery.base import exit_codes, signals
from bloomery.base.errors import BloomeryError, host_memory_problem, mask_streams, unreadable

COMMANDS = {
    "quickstart": ("quickstart", "everything once, on this machine's Python files, from tokenizer to report"),
    "init": ("init", "write a small recipe that fits a text and this machine, and make its tokenizer and shards"),
    "recipes": ("recipe", "the recipes that come with Bloomery, or the text of one"),
    "tokenizer train": ("prepare", "train a tokenizer on raw text: byte-level BPE, or characters or bytes"),
    "download": ("download", "download the files of a manifest and verify size and checksum"),
    "extract": ("download", "turn many compressed .jsonl files into N plain ones"),
    "prepare": ("prepare", "turn raw text into shards"),
    "check": ("recipe", "validate a recipe; --explain prints every value and where it came from"),
    "plan": ("plan", "what a recipe will take: memory, time, cost, energy, checkpoints; the best layouts"),
    "calibrate": ("planner", "measure this machine for later plans: products, attention, copies, links, disk, steps"),
    "tune": ("planner", "find the fastest micro-batch, recomputation, layout and precision here by short real trials"),
    "plan tflops": ("planner", "TFLOP/s by several definitions, from the time of a step"),
    "plan days": ("planner", "days of a training, from tokens, parameters and TFLOP/s"),
    "plan memory": ("planner", "bytes of states under named schemes and ZeRO stages, and of activations"),
    "plan left": ("planner", "days that remain of a run"),
    "inspect schedule": ("recipe", "steps, batch levels, learning rate and saves of a recipe"),
    "inspect data": ("inspect", "documents, tokens and vocabulary of shards; epochs of each source in a training"),
    "inspect sample": ("inspect", "the samples at some positions of a run, as text"),
    "inspect step": ("inspect", "the samples of one step, as text"),
    "inspect order": ("inspect", "epochs, ranges and shares of every source"),
    "inspect checkpoint": ("inspect", "contents of a checkpoint; --verify, --list"),
    "inspect model": ("recipe", "parameters by group and FLOPs per token of a recipe"),
    "inspect flops": ("recipe", "parameters, FLOPs and time of every module of a recipe's model, as it runs"),
    "train": ("train", "train, or resume where the run stopped"),
    "launch": ("launch", "start a training on this machine, hosts, Slurm or AzureML, and again until it is done"),
    "doctor": ("doctor", "what this machine has, what is missing for which feature, and whether it can train a recipe"),
    "sync": ("watch", "carry a run's new files to a hub, a bucket, a git remote or a folder"),
    "watch install": ("watch", "look every hour or day, by a Slurm job that submits itself again"),
    "watch": ("watch", "what a run is doing, live; --pulse: a line in its log, and alerts"),
    "scale": ("planner", "what more nodes bring: tokens per second and efficiency of short trainings"),
    "stop": ("watch", "ask a training to save and stop; --after-save: once its next scheduled checkpoint is begun"),
    "explain": ("report", "the documents that a step of a run read, those of the highest loss first"),
    "replay": ("report", "do one step of a run again, to tell bad data from bad hardware"),
    "verify": ("verify", "certify, on a small copy of a recipe, that every layout trains the same as one rank"),
    "generate": ("generate", "continue a prompt with a checkpoint"),
    "export": ("hf", "convert a checkpoint to a Hugging Face folder"),
    "import hf": ("hf", "start a run from a Hugging Face folder"),
    "import megatron-checkpoint": ("hf", "start a run from a checkpoint of Megatron, where that stopped"),
    "import megatron": ("import_megatron", "convert a Megatron command line, launch script and ds_config to a recipe"),
    "completion": ("completion", "what bash, zsh or fish needs to complete commands, options and fields of recipes"),
    "report": ("report", "write one HTML page about a run, or about several side by side"),
}
"""Name -> module and what it does. A module of several commands has a `run_<last word>` for each."""
_MEANT = {"resume": "train", "tokenize": "prepare", "sample": "generate", "convert": "export", "new": "init"}
_AS_IS = ("generate", "explain", "inspect sample", "inspect step")
"""Their output is the text of documents or of a model, which stays as it is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (docs/exit-codes.md)."""
    signals.job_seconds()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for them takes 15 ms of every command
    os.environ["RUST_BACKTRACE"] = "0"  # a library that panics at a foreign file is reported in a sentence
    signals.open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.lastResort = logging.NullHandler()  # libraries that log an error, with pages of traceback, raise it too
    mask_streams(output=not " ".join(arguments).startswith(_AS_IS))
    signals.requested = signals.asked  # forget the signals of an earlier command of this process
    try:
        return _answered(arguments)
    except (KeyboardInterrupt, Exception) as error:
        if not (signals.requested or isinstance(error, KeyboardInterrupt)):
            raise
        signals.say_once(f"interrupted by {signals.requested or signal.SIGINT.name}")
        return exit_codes.INTERRUPTED


def _answered(arguments: list[str]) -> int:
    """The exit code; prints the problems of an error."""
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe or a full disk can still be answered
        return code
    except BloomeryError as error:
        if signals.asked:  # while modules were loaded, for instance: nothing is wrong with the recipe
            raise
        for problem in error.problems if not error.reported_by_rank_0 else ():
            print(f"bloomery: {problem}", file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if (full := host_memory_problem(error)) is None:
            raise
        print(f"bloomery: {full}", file=sys.stderr)
        return exit_codes.USAGE
    except BrokenPipeError:  # `bloomery ... | head`: the reader has seen enough. (A training never ends up here.)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EIO, errno.ESTALE) and error.filename:
            print(f"bloomery: {unreadable(str(error.filename), error)}", file=sys.stderr)
            return exit_codes.DATA
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"bloomery: the answer could not be written to standard output: {error.strerror}", file=sys.stderr)
        return exit_codes.STORAGE


def command() -> NoReturn:
    """`main` as a process of its own. It exits at once when no thread or child is running: freeing every object would
    take longer than many a command."""
    signals.listen()
    code = main()
    signals.ignore()
    multiprocessing = sys.modules.get("multiprocessing")
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if others or (multiprocessing and multiprocessing.active_children()):
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full or none: `main` has answered
            stream.flush()
    os._exit(code)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(COMMANDS))
        return exit_codes.OK if arguments else exit_codes.USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"bloomery {__version__}")
        return exit_codes.OK
    group = [command for command in COMMANDS if command.startswith(f"{arguments[0]} ")]
    words = 2 if " ".join(arguments[:2]) in group or (group and arguments[0] not in COMMANDS) else 1
    if words == 2 and arguments[1:2] in ([], ["-h"], ["--help"]):  # `bloomery inspect`: which of them?
        print(_help(group))
        return exit_codes.OK if arguments[1:] else exit_codes.USAGE
    name = " ".join(arguments[:words])
    if name not in COMMANDS:
        guess = difflib.get_close_matches(_MEANT.get(name, name), group or COMMANDS, n=1, cutoff=0.5)
        remedy = f"did you mean `bloomery {guess[0]}`?" if guess else "see `bloomery --help`."
        print(f"bloomery: there is no command {name!r}; {remedy}", file=sys.stderr)
        return exit_codes.USAGE
    command = importlib.import_module(f"bloomery.cli.{COMMANDS[name][0]}")
    parser = parser_of(name, command)
    own_words = itertools.takewhile(lambda word: word != "--", arguments[words:])
    options = [word.partition("=")[0] for word in own_words if word.startswith("--")]
    known = {option for action in parser._actions for option in action.option_strings}
    unknown = [word for word in options if word not in known]
    if unknown and any(action.dest == "overrides" for action in parser._actions):
        from bloomery.config.schema import all_fields, instead_of

        field = unknown[0].lstrip("-").replace("-", "_")
        remedy = field if field in all_fields() else instead_of(field.split("."))
        if "." in remedy and "docs/" not in remedy:
            how = "fields are given as section.field=value, without dashes"
            print(f"bloomery: {name} has no option {unknown[0]}; {how}: {remedy}", file=sys.stderr)
            return exit_codes.USAGE
    try:
        parse = getattr(command, "parse", argparse.ArgumentParser.parse_intermixed_args)  # its own, if it has one
        args = parse(parser, arguments[words:])
    except SystemExit as answered:  # by argparse: help, or what is wrong with the arguments
        return int(answered.code or exit_codes.OK)
    args.command_line = arguments
    return int(getattr(command, f"run{_own(name, command)}")(args))


def parser_of(name: str, command: ModuleType) -> argparse.ArgumentParser:
    """Of a command and its module. Each option that has a default says it."""
    parser = argparse.ArgumentParser(prog=f"bloomery {name}", description=COMMANDS[name][1], allow_abbrev=False)
    getattr(command, f"add_arguments{_own(name, command)}")(parser)
    for action in parser._actions:
        if action.default not in (None, False, [], "", argparse.SUPPRESS) and "default" not in (
            action.help or "default"
        ):
            action.help = f"{action.help}; default: {action.default}"
    return parser


def _own(name: str, command: ModuleType) -> str:
    """What the functions of a command end with in a module of several."""
    return "" if hasattr(command, "run") else f"_{re.split('[ -]', name)[-1]}"


def _help(commands: Collection[str]) -> str:
    rows = "\n".join(f"  {name:<28}{COMMANDS[name][1]}" for name in commands)
    return (
        "usage: bloomery COMMAND [...]\n\nFrom raw text to a pretrained language model, with one recipe.\n\n"
        f"commands:\n{rows}\n\nSee also bloomery COMMAND --help. RECIPE is a file or the name of a shipped recipe."
    )
