"""Shared by all tests: one thread, a small corpus of shards, and a small recipe in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

os.environ["BLOOMERY_SAY_AFTER"] = "600"  # a busy machine makes no test another
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before the fork server imports torch, as `train` does

from bloomery.cli.main import main
from bloomery.data.shards import ShardWriter
from forked import Forked, start_server
from monitor_samples import mounted

torch.set_num_threads(1)
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # what `bloomery calibrate` has found here must not change a test's plan
# Under nohup, SIGHUP is ignored, and so it would be by every training that a test starts.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

VOCAB = 64
SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 7,
    "model": {
        "family": "gpt2",
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "seq_length": 16,
        "vocab_size": VOCAB,
        "dropout": 0.0,
    },
    "data": {"train": [{"path": "train"}]},
    "batch": {"micro_batch_size": 4, "global_batch_size": 8},
    "optimizer": {"clip_grad_norm": 0.5},
    "lr": {"peak": 1e-2, "min": 1e-3, "schedule": "cosine", "warmup": "4 steps", "decay": "20 steps"},
    "train": {"for": "20 steps"},
    "precision": "fp32",
    "monitor": {"log_every": "1 steps", "tensorboard": False},
}


def write_shard(prefix: Path, *, seed: int = 0, documents: int = 60, vocab: int = VOCAB) -> None:
    """Documents in which each token mostly decides the next, so that a model has something to learn."""
    random = np.random.default_rng(seed)
    follower = np.random.default_rng(99).permutation(vocab)
    with ShardWriter(str(prefix), "uint16") as writer:
        for _ in range(documents):
            tokens = [int(random.integers(vocab))]
            for _ in range(int(random.integers(40, 120))):
                tokens.append(int(follower[tokens[-1]] if random.random() < 0.8 else random.integers(vocab)))
            writer.append(np.array(tokens))


class Workshop:
    """A folder with shards and a recipe, where commands are run as a user would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_shard(folder / "train")
        write_shard(folder / "valid", seed=1, documents=20)
        self.recipe = folder / "small.yaml"
        self.recipe.write_text(yaml.safe_dump(SMALL))

    def train(
        self,
        *overrides: str,
        run: str = "run",
        code: int = 0,
        device: str | None = "cpu",
        start_from: str | None = None,
        changes: Sequence[str] = (),
    ) -> Path:
        """`bloomery train` in this process; the run folder. Fails unless it ends with `code`."""
        where = ["--run-dir", str(self.folder / run), "--quiet", *(["--device", device] if device else [])]
        where += ["--from", start_from] if start_from else []
        where += [word for field in changes for word in ("--change", field)]
        ended = main(["train", str(self.recipe), *overrides, *where])
        assert ended == code, f"ended with {ended} instead of {code}"
        return self.folder / run

    @staticmethod
    def metrics(run: Path, kind: str = "step") -> list[dict[str, Any]]:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [record for record in records if record["kind"] == kind]

    @staticmethod
    def events(run: Path, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        return [event for event in events if event["kind"] == kind]

    @staticmethod
    def losses(run: Path) -> list[float]:
        return [float(record["losses"]["lm loss"]) for record in Workshop.metrics(run)]


def start_training(
    workshop: Workshop, run: Path, *overrides: str, **environment: str
) -> subprocess.Popen[str] | Forked:
    """`bloomery train` in a process of its own, for as long as nothing stops it."""
    words = ["train", str(workshop.recipe), "train.for=1000000 steps", *overrides, "lr.decay=null"]
    words += ["--run-dir", str(run), "--device", "cpu", "--quiet"]
    if not environment and not any("parallel" in override for override in overrides):
        return Forked(words, workshop.folder / "stderr.txt")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "bloomery", *words]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str] | Forked) -> None:
    """Until that many steps are in metrics.jsonl; fails if the process ends or a minute passes."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("no steps within a minute")


@pytest.fixture(autouse=True, scope="session")
def _a_fork_server() -> None:
    start_server()


@pytest.fixture(autouse=True)
def _same_kernels_as_a_new_process() -> None:
    """Where a processor has no bf16 units, torch gives up oneDNN for good at the first bf16 product that fails, and
    fp32 products come out otherwise from then on."""
    torch._C._set_mkldnn_enabled(True)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.chdir(tmp_path)
    return Workshop(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, which can be made read-only and full."""
    with mounted(tmp_path / "disk", "size=1m") as folder:
        yield folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `bloomery ...` in this process: (exit code, standard output, standard error)."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


HUB_TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The Hub's protocol on this machine; it wants the token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        sys.executable,
        str(Path(__file__).with_name("hub_standin.py")),
        "--port",
        str(port),
        "--root",
        str(tmp_path / "hub"),
        "--token",
        HUB_TOKEN,
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for name, value in {
        "HF_ENDPOINT": url,
        "HF_TOKEN": HUB_TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }.items():
        monkeypatch.setenv(name, value)
    try:
        yield url
    finally:
        process.kill()
        process.wait()
