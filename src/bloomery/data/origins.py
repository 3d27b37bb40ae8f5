"""Which file each document of a shard came from: `<prefix>.origins`, for each document the number of its file in the
manifest, as uint32. `prepare` writes it for shards of several files and `inspect` reads it; a shard is whole without.
"""

from __future__ import annotations

import os

import numpy as np

from bloomery.data.manifest import ShardManifest

DTYPE = np.dtype("<u4")


def origins_path(prefix: str) -> str:
    return f"{prefix}.origins"


def file_of(document: int, manifest: ShardManifest, prefix: str) -> str | None:
    """The name of the file that a document came from; None where nothing tells."""
    files = manifest.source_files
    if len(files) == 1:
        return files[0].name
    path = origins_path(prefix)
    try:
        if os.path.getsize(path) != manifest.documents * DTYPE.itemsize:
            return None  # of another shard
        number = int(np.fromfile(path, DTYPE, 1, offset=document * DTYPE.itemsize)[0])
    except (OSError, IndexError):
        return None
    return files[number].name if number < len(files) else None
