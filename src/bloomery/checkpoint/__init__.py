"""Floor 4: the checkpoint folder: save, load, retention, remote copies."""
