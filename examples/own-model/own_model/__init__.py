"""A model and a loss of one's own for `bloomery train`: `model.family: own`, once this package is installed.

This file is read by every command, so torch is imported only where the model is built.
"""

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


FAMILY = Family(
    name="own",
    defaults={"dropout": 0.0, "norm_eps": 1e-5, "tie_embeddings": False},
    build=build,
    losses=losses,
)
