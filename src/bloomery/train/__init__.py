"""Floor 5: the training. START HERE: loop.py; then step.py, setup.py."""
