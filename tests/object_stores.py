"""Object stores for tests: S3 (moto), Azure (azurite) and Google (its emulator), each a process of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
GOOGLE = "import sys; from gcp_storage_emulator.server import create_server as c; c('127.0.0.1', {port}, True).run()"
PACKAGES = {"s3": ("s3fs", "moto"), "abfs": ("adlfs",), "gs": ("gcsfs", "gcp_storage_emulator")}


def server(scheme: str, port: int) -> tuple[list[str], dict[str, str]]:
    """(command, environment of its clients)."""
    address = f"http://127.0.0.1:{port}"
    if scheme == "s3":
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        return command, {"AWS_ENDPOINT_URL": address, **keys}
    if scheme == "gs":
        # Without the second: a minute of waiting for a service that the emulator does not have.
        environment = {"STORAGE_EMULATOR_HOST": address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        return [sys.executable, "-c", GOOGLE.format(port=port)], environment
    beside = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"  # where `make test` puts it
    azurite = shutil.which("azurite-blob") or (str(beside) if beside.exists() else None)
    if azurite is None:
        pytest.skip("azurite is not installed: `npm install azurite` (`make test` does it where there is npm)")
    command = [azurite, "--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--blobPort", str(port)]
    account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY}"
    return command, {"AZURE_STORAGE_CONNECTION_STRING": f"{account};BlobEndpoint={address}/devstoreaccount1;"}


@contextmanager
def bucket_in(scheme: str, name: str) -> Iterator[str]:
    """The URL of an empty bucket; the test is skipped where the store's packages are not installed."""
    for package in PACKAGES[scheme]:
        pytest.importorskip(package)
    port = free_port()
    command, environment = server(scheme, port)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        try:
            wait_for(process, port)
            fsspec.get_filesystem_class(scheme).clear_instance_cache()  # of another server
            files, bucket = fsspec.core.url_to_fs(f"{scheme}://{name}")
            files.mkdir(bucket)
            yield f"{scheme}://{name}"
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server does not answer")
