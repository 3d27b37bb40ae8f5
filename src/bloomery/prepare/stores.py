"""Stores that a URL names, through fsspec: S3, Azure, Google, Hugging Face, and whatever else it knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bloomery.base.errors import DataError, Problem

EXTRAS = {"s3": ("s3", "s3a"), "gs": ("gs", "gcs"), "abfs": ("abfs", "abfss", "az"), "hf": ("hf",)}
"""What to install for which URLs: `pip install 'bloomery[s3]'`."""
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "last_commit", "LastModified", "last_modified", "mtime", "created")


def is_url(text: str) -> bool:
    return "://" in text


def open_store(url: str) -> tuple[Any, str]:
    """(fsspec's file system, the path in it). DataError if a package is missing; else what the library raises."""
    import fsspec  # type: ignore[import-untyped]

    fsspec.config.conf.setdefault("http", {}).setdefault("client_kwargs", {"trust_env": True})  # reads ~/.netrc
    try:
        store, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        scheme = url.partition("://")[0].rpartition("::")[2]
        extra = next((name for name, schemes in EXTRAS.items() if scheme in schemes), None)
        remedy = f"run `pip install 'bloomery[{extra}]'`" if extra else "install it beside Bloomery with pip"
        what = f"needs a package that is not installed: {first_line(error)}"
        raise DataError(Problem(what, remedy=remedy, place=url)) from error
    return store, str(path)


def version_of(info: Mapping[str, Any]) -> str:
    """What changes when the file does, as its store says; empty where it says nothing."""
    return next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")


def first_line(error: BaseException) -> str:
    """Of its text: some libraries write pages. Of a mistake in a library, that it is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return f"the library that reads it fails with {type(error).__name__}: {line}" if is_stumble(error) else line


def is_stumble(error: BaseException) -> bool:
    """A library has not looked at what it was given, such as fsspec at a URL `dir://x` without what is behind `::`."""
    return isinstance(error, AttributeError | TypeError | LookupError | NameError)
