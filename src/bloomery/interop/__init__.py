"""What speaks to other training systems: their checkpoints, model folders and command lines."""
