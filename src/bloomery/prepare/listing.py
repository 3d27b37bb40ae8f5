"""`bloomery download --list URL`: the manifest of a dataset of the Hub, an index page of a web server, or a bucket."""

import base64
import html
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from glob import has_magic
from typing import Any
from urllib.parse import unquote, urljoin

import requests

from bloomery.base.errors import DataError, Problem, unreadable
from bloomery.prepare.download import RemoteFile, public_url
from bloomery.prepare.sources import natural_order, open_store

_REQUESTS = 16
"""At a time, for the sizes of the files of a web server."""
_SECONDS = 60.0


def list_files(url: str) -> list[RemoteFile]:
    """All files there, in natural order of their paths, with what is known of their sizes and checksums. DataError
    where it cannot be listed, or there are none."""
    try:
        is_web, is_hub = re.match("https?://", url), url.startswith("hf://")
        found = list(_web_files(url) if is_web else _hub_files(url) if is_hub else _stored_files(url))
    except DataError:
        raise
    except Exception as error:  # every library has its own kinds
        raise unreadable(public_url(url), error if isinstance(error, OSError) else OSError(str(error))) from error
    if not found:
        remedy = "name a dataset (hf://datasets/USER/NAME), an index page, or a folder or glob of a bucket"
        raise DataError(Problem("no files are listed there", remedy=remedy, place=public_url(url)))
    return sorted((RemoteFile(**facts) for facts in found), key=lambda file: natural_order(file.path))


def _stored_files(url: str) -> Iterator[dict[str, Any]]:
    """Of a store that fsspec knows."""
    store, path = open_store(url)
    listing = store.glob(path, detail=True) if has_magic(path) else store.find(path, detail=True)
    above = re.split(r"[*?\[]", path)[0].rpartition("/")[0] if has_magic(path) else path.rstrip("/")
    for name, info in listing.items():
        if info["type"] == "file":
            below = name.removeprefix(above).lstrip("/") or name.rpartition("/")[2]
            md5 = base64.b64decode(info["md5Hash"]).hex() if info.get("md5Hash") else None
            yield {"url": store.unstrip_protocol(name), "path": below, "size": info.get("size"), "md5": md5}


def _hub_files(url: str) -> Iterator[dict[str, Any]]:
    """Of the commit that is the newest now."""
    import fsspec.utils  # type: ignore[import-untyped]
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    store, path = open_store(url)
    at, api = store.resolve_path(re.split(r"[*?\[]", path)[0].rstrip("/")), HfApi()
    repo = {"repo_id": at.repo_id, "repo_type": at.repo_type}
    commit = api.repo_info(**repo, revision=at.revision).sha or at.revision
    pattern = path.partition(at.repo_id)[2].partition("/")[2].rstrip("/")
    wanted = re.compile(fsspec.utils.glob_translate(pattern)) if has_magic(path) else None
    for file in api.list_repo_tree(**repo, revision=commit, recursive=True):
        below = not pattern or f"{file.path}/".startswith(f"{pattern}/")
        if isinstance(file, RepoFile) and (wanted.match(file.path) if wanted else below):
            there = hf_hub_url(**repo, filename=file.path, revision=commit)
            yield {"url": there, "path": file.path, "size": file.size, "sha256": file.lfs and file.lfs.sha256}


def _web_files(url: str) -> Iterator[dict[str, Any]]:
    """Of an index page, and of those that it links below itself."""
    session, top = requests.Session(), url if url.endswith("/") else f"{url}/"
    pages, seen, files = [top], {top}, list[str]()
    while pages:
        answer = session.get(page := pages.pop(), timeout=_SECONDS)
        answer.raise_for_status()
        for link in re.findall(r"""href\s*=\s*["']?([^"'#?\s>]+)["'\s>]""", answer.text, re.I):
            there = urljoin(page, html.unescape(link))
            if there.startswith(top) and there not in seen:
                seen.add(there)
                (pages if there.endswith("/") else files).append(there)
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for file, size in zip(files, pool.map(_size_of, files), strict=True):
            yield {"url": file, "path": unquote(file.removeprefix(top)), "size": size}


def _size_of(url: str) -> int | None:
    """None where the server does not say."""
    answer = requests.head(url, allow_redirects=True, timeout=_SECONDS, headers={"Accept-Encoding": "identity"})
    answer.raise_for_status()
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None
