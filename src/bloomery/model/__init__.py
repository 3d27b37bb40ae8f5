"""Floor 3: plain modules. No ranks, meshes, DTensor, collectives, autocast or environment reads."""
