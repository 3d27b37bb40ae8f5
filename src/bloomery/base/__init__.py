"""Floor 0: errors, exit codes, units, storage, clock and the one door to the accelerator. Imports nothing of ours."""
