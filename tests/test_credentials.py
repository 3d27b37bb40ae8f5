"""Secrets in URLs: masked in all that is written or printed, refused in recipes; files have the user's umask."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

import rank_commands
from bloomery.base.errors import mask
from bloomery.cli.main import main
from bloomery.data.manifest import read_manifest
from bloomery.launch.local import run_local_ranks
from bloomery.train.hang import write_hang
from checkpoints import change_manifest
from conftest import Workshop
from prepare_samples import jsonl, make, make_texts, make_tokenizer, write_jsonl

Command = Callable[..., tuple[int, str, str]]
SECRET = "SeKr3tw0rd"
SIGNED = f"https://cdn.example/x?X-Amz-Credential={SECRET}&X-Amz-Date=1&X-Amz-Signature={SECRET}"


@pytest.mark.parametrize("word", ["secret", "passw", "x-", "?sig", "token", "authorization", "a:", "://", "s3://a:b@"])
def test_masking_takes_no_longer_for_what_somebody_repeated(word: str) -> None:
    started = time.process_time()
    mask(word * 20_000 + "key=")
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "text",
    [
        f"s3://AKIA:{SECRET}@bucket/x",
        f"s3://AKIA:12/{SECRET}+a/{SECRET}@bucket/x",
        f"http://me:p@{SECRET}@h/x",
        f"http://me::{SECRET}@[::1]:80/x",
        f"http://:{SECRET}@h",
        f"https://{SECRET}@h/x",
        f"simplecache::zip://a.csv::HTTPS://u:{SECRET}@h/x",
        f"s3:/u:{SECRET}@bucket",  # as pathlib writes it
        f"model is 's3://user:{SECRET[:6]} ...'".replace(SECRET[:6], SECRET),  # cut before its @
        f"[s3://u:{SECRET}@b/x, s3://u:{SECRET}@b/y]",
        f"403, url=URL('{SIGNED}')",
        f"https://a.blob.core.windows.net/c/x?sv=1&se=2&sig={SECRET}%3D",
        f"<a href='https://h/x?a=1&amp;sig={SECRET}'>",
        f"https://h/x?token={SECRET}&api_key={SECRET}#access_token={SECRET}",
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}==;EndpointSuffix=x",
        f"https://h/x?jwt={SECRET}",
        f"https://f.azurewebsites.net/api?code={SECRET} https://h/x?a=1&hmac={SECRET}&pw={SECRET}&sas={SECRET}",
        f"x-api-key: {SECRET} X-Amz-Security-Token: {SECRET} Bearer {SECRET}",
        f"S3FileSystem(key='a', secret='{SECRET}') {{'password': '{SECRET}'}}",
        f"{{'Authorization': 'Basic {SECRET}'}} Authorization: Bearer {SECRET}",
        f"AWS_SESSION_TOKEN={SECRET} HUGGING_FACE_HUB_TOKEN={SECRET} WANDB_API_KEY={SECRET} aws_secret_key = {SECRET}",
        f"Set-Cookie: a={SECRET}\nhttps://h/x?sessionid={SECRET}&ticket={SECRET}&bearer={SECRET}",
        f"the login hf_{SECRET}{'x' * 24} failed",
        f'"https:\\/\\/u:{SECRET}@h\\/x?a=1\\u0026sig={SECRET}"',  # as some servers write JSON
        f"https://h/?to=https%3A%2F%2Fh%3FX-Amz-Signature%3D{SECRET}%26a%3D1",
    ],
)
def test_every_form_of_a_secret_is_masked_and_stays_masked(text: str) -> None:
    assert SECRET not in mask(text)
    assert "***" in mask(text)
    assert mask(f"{mask(text)}, then") == f"{mask(text)}, then"
    assert SECRET not in json.dumps(mask(json.dumps({"a": text})))
    assert json.loads(mask(json.dumps({"a": text, "b": 1})))["b"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/x@y, tcp://[::1]:29500 and http://host:80.",
        "http://host: Connection refused by a@b",
        "zip://a.csv::simplecache::s3://bucket/x.zip",
        "abfs://container@account.dfs.core.windows.net/p hf://datasets/u/r@main/x sftp://me@host/x",
        "s3://b/x?versionId=abc http://h/x?author=me&keyword=x&tokenizer=y&design=2",
        '{"text_key": "text", "mask_token": "[MASK]", "eos_token": "x", "?key=": 3, "tokens": 5}',
        "hf_hub_download tokenizer.path=foo batch.micro_batch_size=4 max_tokens=5 file:///tmp/a:b@c",
    ],
)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert mask(text) == text


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("url", "instead"),
    [
        (f"s3://AKIA:{SECRET}@bucket/run", "AWS_SECRET_ACCESS_KEY"),
        (f"simplecache::s3a://AKIA:{SECRET}@bucket/run", "~/.aws/credentials"),
        (f"gs://bucket/x?X-Goog-Signature={SECRET}", "GOOGLE_APPLICATION_CREDENTIALS"),
        (f"abfs://c@account.dfs.core.windows.net/x?sv=1&sig={SECRET}", "AZURE_STORAGE_SAS_TOKEN"),
        (f"hf://user:{SECRET}@datasets/x", "HF_TOKEN"),
        (f"https://me:{SECRET}@host/x.jsonl", "~/.netrc"),
        (SIGNED, "bloomery download"),
        (f"webdav://me:{SECRET}@host/x", "the library of its store"),
    ],
)
@pytest.mark.parametrize(
    "way", ["file", "base", "override", "list", "wrong field", "unknown field", "key", "group", "syntax"]
)
def test_a_recipe_with_a_secret_is_refused_without_showing_it(
    way: str, url: str, instead: str, workshop: Workshop, command: Command
) -> None:
    recipe, words = yaml.safe_load(workshop.recipe.read_text()), [f"checkpoint.upload={{to: '{url}'}}"]
    if way in ("file", "base"):
        words, recipe["checkpoint"] = [], {"upload": {"to": url}}
    elif way == "list":
        words = [f"prepare=[{{output: x, sources: [y, '{url}']}}]"]
    elif way in ("wrong field", "unknown field"):
        words = [f"{'train.for' if way == 'wrong field' else 'checkpoint.uplod'}={url}", f"lr.peak={url}"]
    elif way == "key":
        words, recipe["data"][url] = [], 1
    elif way == "group":
        words, recipe["data"]["validation"] = [], {url: [{"path": "valid"}]}
    elif way == "syntax":
        words = [f"checkpoint.upload={{to: '{url}'", f"{url}", "base.x=1"]
    workshop.recipe.write_text(yaml.safe_dump(recipe))
    if way == "base":
        (workshop.folder / "child.yaml").write_text("base: small.yaml\n")
    name = "child.yaml" if way == "base" else "small.yaml"
    for verb in (["check", name, "--explain"], ["train", name, "--run-dir", "run"]):
        code, out, err = command(*verb, *words)
        assert code == 2
        assert SECRET not in out + err
        if way not in ("key", "syntax"):
            assert "with a secret in it. A recipe is copied into checkpoints" in err
            assert instead in err or way == "group"
    assert not (workshop.folder / "run").exists()


def test_a_secret_of_a_megatron_script_is_refused_or_masked(tmp_path: Path, command: Command) -> None:
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    words += "--micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --vocab-size 512 "
    code, out, err = command("import", "megatron", *words.split(), "--data-path", f"s3://AKIA:{SECRET}@bucket/x")
    assert (code, SECRET in out + err) == (2, False)
    words += f"--save s3://AKIA:{SECRET}@bucket/x --my-own s3://AKIA:{SECRET}{SECRET}{SECRET}{SECRET}{SECRET}@bucket/x"
    code, out, err = command("import", "megatron", *words.split(), "--output", str(tmp_path / "r.yaml"))
    assert code == 0, err
    assert SECRET not in out + err + (tmp_path / "r.yaml").read_text()


# ---------------------------------------------------------------- a run


class Telltale(MemoryFileSystem):
    """A store whose errors show how it logged in, as those of libraries do."""

    protocol = "telltale"

    def put_file(self, *_: object, **__: object) -> None:
        text = f"403 Forbidden for {SIGNED}\nAuthorization: Basic {SECRET}\ns3://AKIA:{SECRET}@bucket"
        raise PermissionError(text)

    pipe_file = put_file


def holding(folder: Path) -> list[str]:
    forms = (SECRET.encode(), b64encode(SECRET.encode()).rstrip(b"="))
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(form in path.read_bytes() for form in forms)]


def put_into_recipe(checkpoint: Path, url: str) -> None:
    """As an earlier version has saved it."""
    path = checkpoint / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["prepare"] = [{"output": "x", "sources": [url]}]
    path.write_text(yaml.safe_dump(recipe))
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    content = path.read_bytes()
    files["recipe.yaml"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change_manifest(checkpoint, files=files)


def test_no_file_of_a_run_and_no_line_holds_a_secret(
    workshop: Workshop, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fsspec.register_implementation("telltale", Telltale, clobber=True)
    overrides = ["checkpoint.phases=[{every: 2 steps}]", "monitor.tensorboard=true", "train.exit_after=4 steps"]
    upload = "checkpoint.upload={to: 'telltale://bucket/run'}"
    run = workshop.train(*overrides, upload)
    assert "***" in (run / "events.jsonl").read_text() + (run / "logs" / "main_log.txt").read_text()
    assert not holding(tmp_path)
    # A checkpoint and a ledger that an earlier version wrote: loaded, continued, reported, never shown.
    newest = max((run / "checkpoints").glob("step-*"))
    put_into_recipe(newest, f"s3://AKIA:{SECRET}@bucket/x")
    with open(run / "events.jsonl", "a") as ledger:
        event = {"kind": "overrides", "step": 4, "iso_time": "", "time": 0.0, "job": 1, "what": SIGNED}
        ledger.write(json.dumps(event) + "\n")
    kept = {str(newest / "recipe.yaml"), str(run / "events.jsonl")}
    assert set(holding(tmp_path)) == kept
    assert main(["inspect", "checkpoint", str(newest), "--json"]) == 0
    workshop.train(*overrides, "train.exit_after=6 steps")
    assert main(["report", str(run)]) == 0
    assert set(holding(tmp_path)) == kept
    assert main(["train", str(newest / "recipe.yaml"), "--run-dir", str(run)]) == 2
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err


def test_what_any_rank_appends_holds_no_secret(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    write_hang(tmp_path, 1, f"waits for {SIGNED}", {0: f"File x: {SIGNED}"})
    assert "***" in (tmp_path / "events.jsonl").read_text()
    assert not holding(tmp_path)


def test_a_manifest_holds_no_secret_of_its_sources(workshop: Workshop) -> None:
    MemoryFileSystem().pipe("/me:x@box/x.jsonl", jsonl(make_texts(20)))
    make(make_tokenizer(workshop.folder / "t"), sources=["memory://me:x@box/x.jsonl"])
    manifest = read_manifest("x")
    assert manifest is not None
    assert [source.name for source in manifest.sources] == ["memory://***@box/x.jsonl"]


def test_an_extraction_writes_no_secret_of_its_sources(workshop: Workshop, command: Command) -> None:
    MemoryFileSystem().pipe(f"/me:{SECRET}@box/x.jsonl", jsonl(make_texts(20)))
    words = ("extract", f"memory://me:{SECRET}@box/x.jsonl", "--output", "out", "--chunks", "1")
    assert command(*words)[0] == 0
    assert command(*words)[0] == 0
    assert {path.name: SECRET in path.read_text() for path in Path("out").iterdir()} == dict.fromkeys(
        (".lock", "chunk-00000-of-00001.jsonl", ".chunk-00000-of-00001.json", "manifest.json"), False
    )


def test_a_library_that_logs_a_traceback_is_silent(tmp_path: Path) -> None:
    code = "import logging; from bloomery.cli.main import main; main(['--version']); "
    code += "logging.getLogger('gcsfs').exception('no u:secret@b', exc_info=OSError())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def fails(arguments: list[str]) -> int:
    raise RuntimeError(f"no {SIGNED}")


def test_the_traceback_of_a_bug_shows_no_secret(tmp_path: Path) -> None:
    planted = (
        "from bloomery.cli import main, recipe\n"
        f"def fails(args): raise RuntimeError('no {SIGNED}') from OSError('http://me:{SECRET}@h')\n"
        "recipe.run_check = fails\n"
        "main.command()\n"
    )
    done = subprocess.run([sys.executable, "-c", planted, "check", "quickstart"], capture_output=True, text=True)
    log = tmp_path / "log"
    assert run_local_ranks(2, partial(rank_commands.logged, fails, str(log)), []) == 1
    for text in (done.stderr, log.read_text()):
        assert "RuntimeError: no https://cdn.example/x?X-Amz-Credential=***" in text
        assert SECRET not in text


# ---------------------------------------------------------------- what to use instead, and the umask


class Guarded(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        content = jsonl(make_texts(20))
        known = self.headers.get("Authorization") == "Basic " + b64encode(f"me:{SECRET}".encode()).decode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def guarded() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/x.jsonl"
        server.shutdown()


def test_prepare_logs_in_with_netrc(workshop: Workshop, guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (workshop.folder / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
    (workshop.folder / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(workshop.folder / "netrc"))
    make(make_tokenizer(workshop.folder / "t"), sources=[guarded])
    assert Path("x.bin").exists()


def test_files_are_created_with_the_umask_of_the_user(
    workshop: Workshop, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(workshop.folder / "texts.jsonl", make_texts(20))
    before = os.umask(0o027)
    try:
        overrides = ["checkpoint.phases=[{every: 2 steps}]", "monitor.tensorboard=true", "train.exit_after=2 steps"]
        run = workshop.train(*overrides, f"checkpoint.upload={{to: '{workshop.folder}/far'}}")
        assert command("report", str(run))[0] == 0
        make(make_tokenizer(workshop.folder / "made" / "t"), sources=["texts.jsonl"], output="made/x")
    finally:
        os.umask(before)
    made = [path for top in ("run", "far", "made") for path in (workshop.folder / top).rglob("*")]
    assert len(made) > 20
    wrong = {str(path): oct(path.stat().st_mode) for path in made if stat.S_IMODE(path.stat().st_mode) & 0o027}
    small = {str(path) for path in made if path.is_file() and stat.S_IMODE(path.stat().st_mode) != 0o640}
    assert (wrong, small) == ({}, set())
