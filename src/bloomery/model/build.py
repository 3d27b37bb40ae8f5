"""From a recipe's model section to a module, first without memory, then with."""

from __future__ import annotations

import torch

from bloomery.base.piece import Piece
from bloomery.config.recipe import ModelSection
from bloomery.model.decoder import Decoder
from bloomery.model.encoder import Encoder
from bloomery.model.families import ARCHITECTURES
from bloomery.model.init import initialise


def build_model(config: ModelSection) -> Decoder | Encoder:
    """The model on the meta device, in fp32: names and shapes, no memory. In training mode."""
    architecture = ARCHITECTURES[config.family]
    with torch.device("meta"):
        return Encoder(config, architecture) if architecture.encoder else Decoder(config, architecture)


def materialise(
    model: Decoder | Encoder, config: ModelSection, *, seed: int, device: torch.device | str, dtype: torch.dtype
) -> None:
    """Give a meta-device model memory and its initial values, in place.

    The order matters: `to_empty` makes new parameters, which separates tied ones, and leaves garbage in buffers.
    """
    model.to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    model.rebuild_buffers(device)
    initialise(((name, Piece.whole(each.data)) for name, each in model.named_parameters()), config, seed)
