"""`bloomery download --list`: manifests of a dataset of the Hub, of an index page, and of a bucket."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from bloomery.prepare.download import download, read_download_manifest
from hub_standin import H, Hub, git_oid

Command = Callable[..., tuple[int, str, str]]
TEXTS = {f"train/chunk{n}/{m}.jsonl": f'{{"text": "{n} {m}"}}\n'.encode() for n in (1, 2, 10) for m in (9, 10)}
NATURAL = [f"train/chunk{n}/{m}.jsonl" for n in (1, 2, 10) for m in (9, 10)]


def paths(manifest: Path) -> list[str]:
    return [json.loads(line)["path"] for line in manifest.read_text().splitlines()]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Hub, str]]:
    hub = Hub(str(tmp_path / "hub"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (H,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def put(hub: Hub, repo: str, files: dict[str, bytes], *, real: bool = True) -> None:
    kept = {}
    for path, content in files.items():
        digest = hub.put(content) if real else hashlib.sha256(content).hexdigest()
        kept[path] = {"lfs": True, "size": len(content), "sha256": digest, "oid": git_oid(content)}
    oid = hashlib.sha1(repo.encode()).hexdigest()
    hub.save("datasets", repo, {"commits": [{"oid": oid, "title": "x", "files": kept}]})


def list_from_hub(endpoint: str, url: str, output: Path, folder: Path) -> str:
    """In a process of its own: huggingface_hub reads its endpoint once."""
    words = [sys.executable, "-m", "bloomery", "download", "--list", url, "--output", str(output)]
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_59166_files_of_slimpajama_are_counted(tmp_path: Path, hub: tuple[Hub, str]) -> None:
    names = [f"train/chunk{n % 10 + 1}/example_train_{n // 10}.jsonl.zst" for n in range(59_166)]
    put(hub[0], "cerebras/SlimPajama", {name: name.encode() for name in names}, real=False)
    hub[0].load = functools.cache(hub[0].load)
    said = list_from_hub(hub[1], "hf://datasets/cerebras/SlimPajama", tmp_path / "files.jsonl", tmp_path)
    assert "59,166 files" in said
    assert "; 0 without a size, 0 without a checksum" in said
    found = paths(tmp_path / "files.jsonl")
    assert len(set(found)) == 59_166
    assert found[:2] == ["train/chunk1/example_train_0.jsonl.zst", "train/chunk1/example_train_1.jsonl.zst"]
    assert found[-1] == "train/chunk10/example_train_5915.jsonl.zst"


def test_a_listed_dataset_is_downloaded_of_its_commit(tmp_path: Path, hub: tuple[Hub, str]) -> None:
    put(hub[0], "org/texts", {**TEXTS, "README.md": b"x"})
    list_from_hub(hub[1], "hf://datasets/org/texts/train/**/*.jsonl", tmp_path / "files.jsonl", tmp_path)
    assert paths(tmp_path / "files.jsonl") == NATURAL
    wanted = read_download_manifest(str(tmp_path / "files.jsonl"))
    assert hashlib.sha1(b"org/texts").hexdigest() in wanted[0].url
    assert not download(wanted, tmp_path / "raw", jobs=2).failures
    assert (tmp_path / "raw/train/chunk10/9.jsonl").read_bytes() == TEXTS["train/chunk10/9.jsonl"]


def test_an_index_page_and_all_below_it(tmp_path: Path, command: Command) -> None:
    for path, content in TEXTS.items():
        (tmp_path / "web" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "web" / path).write_bytes(content)
    (tmp_path / "web/other.txt").write_text('<a href="/">')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "web")))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/train"
    code, out, err = command("download", "--list", url, "--output", str(tmp_path / "files.jsonl"))
    assert code == 0, err
    assert "6 files" in out
    assert "0 without a size, 6 without a checksum" in out
    assert paths(tmp_path / "files.jsonl") == [path.removeprefix("train/") for path in NATURAL]
    code, _, _ = command("download", str(tmp_path / "files.jsonl"), "--output", str(tmp_path / "raw"))
    assert code == 0
    assert (tmp_path / "raw/chunk2/10.jsonl").read_bytes() == TEXTS["train/chunk2/10.jsonl"]
    code, _, err = command("download", "--list", f"{url}/nothing", "--output", str(tmp_path / "f.jsonl"))
    assert code == 3
    assert "404" in err
    server.shutdown()
    server.server_close()


def test_a_bucket_and_one_without_files(tmp_path: Path, command: Command) -> None:
    url = "memory://texts"
    store, root = fsspec.core.url_to_fs(url)
    for path, content in TEXTS.items():
        store.pipe_file(f"{root}/{path}", content)
    code, out, err = command("download", "--list", f"{url}/train", "--output", str(tmp_path / "files.jsonl"))
    assert code == 0, err
    assert "6 files" in out
    assert paths(tmp_path / "files.jsonl") == [path.removeprefix("train/") for path in NATURAL]
    code, _, err = command("download", str(tmp_path / "files.jsonl"), "--output", str(tmp_path / "raw"))
    assert code == 0, err
    assert (tmp_path / "raw/chunk1/9.jsonl").read_bytes() == TEXTS["train/chunk1/9.jsonl"]
    code, _, err = command("download", "--list", f"{url}/empty", "--output", str(tmp_path / "f.jsonl"))
    assert code == 3
    assert "no files are listed there" in err
