"""Floor 2: arithmetic from a recipe: parameters, FLOPs, memory, batch ramp, learning rate, the whole plan. No torch."""
