"""Folders of the Hugging Face Hub: `hf://org/name`, or `hf://org/name@revision`, becomes a folder of this machine."""

import os

from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, first_line

HUB = "hf://"
_TOKENIZER = ["*.json", "*.txt", "*.jinja", "*.tiktoken"]


def local_folder(path: str | os.PathLike[str], *, weights: bool = False) -> str:
    """The path itself, or the folder to which a name of the Hub was downloaded, into the cache of huggingface_hub,
    where it is found again without a network. `weights`: its safetensors too. DataError if that fails."""
    path = os.fspath(path)
    if not path.startswith("hf:/"):
        return path
    repository, _, revision = path.removeprefix("hf:").lstrip("/").partition("@")  # a Path has one slash only
    try:
        from huggingface_hub import snapshot_download

        with doing(f"downloading {path}"):
            patterns = [*_TOKENIZER, *["*.safetensors"] * weights]
            return str(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except ImportError as error:
        what, remedy = f"{path} needs the package huggingface_hub", "pip install 'bloomery[hf]'"
        raise DataError(Problem(what, "it is not installed", remedy)) from error
    except Exception as error:  # of the library, and of what it uses for the network
        rule = "a name of the Hub is hf://org/name or hf://org/name@revision"
        remedy = "check the name and the network, set HF_TOKEN for a private one, or give a folder"
        what = f"{path} cannot be downloaded: {type(error).__name__}: {first_line(error):.300}"
        raise DataError(Problem(what, rule, remedy)) from error
