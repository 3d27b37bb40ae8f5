"""A training loop of one's own over Bloomery's shards and order: `python loop.py RECIPE STATE STEPS`.

Run it again and it goes on behind the last sample, without reading what it has seen.
"""

import sys
from pathlib import Path

import torch
from own_model.model import Mixer, losses_of
from torch.utils.data import DataLoader

import bloomery

recipe, place, steps = bloomery.load_recipe(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = Mixer(recipe.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
consumed = 0
if place.exists():
    saved = torch.load(place)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    consumed = saved["consumed"]
size = recipe.batch.global_batch_size
batches = DataLoader(bloomery.samples(recipe, first=consumed), batch_size=size)  # unshuffled: it is in its order
for _, batch in zip(range(steps), batches, strict=False):
    loss = losses_of(model(batch["tokens"]), {"lm loss": batch["lm loss"]})["lm loss"].sum() / batch["lm loss"].numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    consumed += size
    print(f"{consumed} {loss.item():.6f}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "consumed": consumed}, place)
