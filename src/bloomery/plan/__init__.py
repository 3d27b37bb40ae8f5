"""Floor 5: what a training will take before a GPU is rented: memory, time, cost, and which layout to use. No torch."""
