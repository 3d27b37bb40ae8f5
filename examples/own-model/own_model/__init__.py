"""A model and a loss of one's own for `bloomery train`: `model.family: own`, once this package is installed.

This file is read by every command, so torch is imported only where the model is built.
"""

from dataclasses import replace
from typing import Any

from bloomery.families.family import Family


def build(config: Any) -> Any:
    import torch

    from own_model.model import Mixer

    with torch.device("meta"):
        return Mixer(config)


def losses(logits: Any, targets: Any) -> Any:
    from own_model.model import losses_of

    return losses_of(logits, targets)


def sums(config: Any, path: str) -> Any:
    """`path` is that of a source in the recipe: here, how many sums there are."""
    from own_model.model import Sums

    return Sums(int(path), config.seq_length)


FAMILY = Family(
    name="own",
    defaults={"dropout": 0.0, "norm_eps": 1e-5, "tie_embeddings": False},
    build=build,
    losses=losses,
)
SUMS = replace(FAMILY, name="own-sums", dataset=sums)
