"""Floor 2: arithmetic from a recipe: parameters, FLOPs, batch ramp, learning rate, the whole plan. No torch."""
