"""Text in object stores, through the real client libraries: S3 (moto), Azure (azurite), Google (its emulator).

The servers run as processes of their own, as the workers of `prepare` are forked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from bloomery.base.errors import DataError
from bloomery.prepare.sources import find_files
from object_stores import PACKAGES, bucket_in
from prepare_samples import jsonl, make, make_texts, make_tokenizer, shard_bytes, small_units, write_jsonl


@pytest.fixture(scope="module", params=PACKAGES)
def store(request) -> Iterator[str]:
    """The URL of an empty bucket."""
    with bucket_in(request.param, "corpus") as url:
        yield url


def put(url: str, content: bytes) -> None:
    files, path = fsspec.core.url_to_fs(url)
    files.pipe(path, content)
    files.invalidate_cache()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    small_units(monkeypatch)
    return tmp_path


def test_a_store_gives_the_bytes_that_local_files_give(store, folder):
    tokenizer = make_tokenizer(folder / "t")
    long, short = make_texts(300), make_texts(100, seed=1)
    write_jsonl(folder / "local" / "deep" / "a.jsonl", long)
    write_jsonl(folder / "local" / "b.jsonl.zst", short)
    put(f"{store}/x/deep/a.jsonl", jsonl(long))
    put(f"{store}/x/b.jsonl.zst", zstandard.compress(jsonl(short)))
    put(f"{store}/x/.hidden/c.jsonl", jsonl(["no"]))
    make(tokenizer, sources=["local"], output="right")
    for output, sources in {"x0": [f"{store}/x"], "x1": [f"{store}/x/b.jsonl.zst", f"{store}/x/**/a*"]}.items():
        made = make(tokenizer, sources=sources, output=output, workers=2)
        assert made.manifest.source_files[0].name == f"{store}/x/b.jsonl.zst"
        assert shard_bytes(output) == shard_bytes("right")
    assert make(tokenizer, sources=[f"{store}/x"], output="x0", workers=2).reused
    put(f"{store}/x/deep/a.jsonl", jsonl([*long[:-1], long[-1].swapcase()]))
    assert not make(tokenizer, sources=[f"{store}/x"], output="x0", workers=2).reused, "a changed object is noticed"
    assert shard_bytes("x0") != shard_bytes("right")


def test_what_is_not_there_or_broken_is_named(store, folder):
    tokenizer = make_tokenizer(folder / "t")
    for url in (f"{store}/nothing/*.jsonl", f"{store}/nothing", f"{store}-of-nobody/a.jsonl"):
        with pytest.raises(DataError, match=r"matches no file|cannot be read") as caught:
            find_files([url])
        assert caught.value.problems[0].place == url
    put(f"{store}/broken/a.jsonl", jsonl(["fine"]) + b"{")
    with pytest.raises(DataError, match=rf"{store}/broken/a.jsonl:2: is not JSON"):
        make(tokenizer, sources=[f"{store}/broken"], workers=2)
    packed = zstandard.compress(jsonl(make_texts(50)))
    put(f"{store}/broken/a.jsonl.zst", packed[: len(packed) // 2])
    with pytest.raises(DataError, match=rf"{store}/broken/a.jsonl.zst: is truncated or damaged"):
        make(tokenizer, sources=[f"{store}/broken/*.zst"], workers=2)
    assert not Path("x.bin").exists()


def test_download_from_a_store(store, folder, command):
    content = jsonl(make_texts(200))
    put(f"{store}/d/a.jsonl", content)
    wanted = [{"url": f"{store}/d/a.jsonl", "size": len(content)}, {"url": f"{store}/d/none.jsonl"}]
    (folder / "wanted.json").write_text(json.dumps(wanted))
    part = folder / "got" / ".a.jsonl.part"
    part.parent.mkdir()
    part.write_bytes(content[:500])  # what an earlier run has left
    code, _, errors = command("download", "wanted.json", "--output", "got", "--retries", "0")
    assert code == 3
    assert "none.jsonl: it cannot be read: " in errors
    assert (folder / "got" / "a.jsonl").read_bytes() == content
    assert sorted(os.listdir("got")) == [".lock", "a.jsonl"]


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://b/x.jsonl", "s3fs", "s3"),
        ("gs://b/x.jsonl", "gcsfs", "gs"),
        ("abfs://b@account.dfs.core.windows.net/x.jsonl", "adlfs", "abfs"),
        ("hf://datasets/a/b/x.jsonl", "huggingface_hub", "hf"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(url, package, extra, folder, command, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    loaded = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(loaded, url.partition(":")[0], raising=False)  # by other tests
    with pytest.raises(DataError, match=rf"needs a package that is not installed.*pip install 'bloomery\[{extra}\]'"):
        find_files([url])
    (folder / "wanted.json").write_text(json.dumps([{"url": url}]))
    code, _, errors = command("download", "wanted.json", "--output", "got", "--retries", "0")
    assert code == 3
    assert f"pip install 'bloomery[{extra}]'" in errors
    extras = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f"{extra} = [" in extras


def test_an_hf_url_goes_to_the_hub_and_says_so_when_it_cannot_be_reached(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def unreachable(self, path):
        asked.append((self.endpoint, path))
        raise ConnectionError("Name or service not known\nand much more")

    monkeypatch.setattr(hub.HfFileSystem, "isfile", unreachable)  # the first question: nothing leaves this machine
    with pytest.raises(
        DataError, match=r"^hf://datasets/a/b: cannot be read: Name or service not known\. Check"
    ) as got:
        find_files(["hf://datasets/a/b"])
    assert asked == [("https://huggingface.co", "datasets/a/b")]
    assert "much more" not in str(got.value)


class AccountStore(MemoryFileSystem):
    """As adlfs does with `abfs://box@account.host/x`: the URL names the account, the path in the store does not."""

    protocol = "account"
    cachable = False

    def __init__(self, account: str | None = None, **options: object) -> None:
        super().__init__(**options)
        if account is None:
            raise ValueError("must provide an account")

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, str]:
        account, at, _ = url.removeprefix("account://").rpartition("@")
        return {"account": account} if at else {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("account://").rpartition("@")[2].strip("/")


def test_a_store_is_opened_again_with_what_its_url_says(folder):
    fsspec.register_implementation("account", AccountStore, clobber=True)
    AccountStore(account="me").pipe("/box/x.jsonl", jsonl(make_texts(60)))
    make(make_tokenizer(folder / "t"), sources=["account://me@box/x.jsonl"], workers=2)
    assert Path("x.bin").exists()
