"""What a `bloomery` process returns. Documented in docs/exit-codes.md; a scheduler may rely on these numbers."""

OK = 0
"""The command did what it was asked. A training that stopped early on request and saved also returns 0."""
BUG = 1
"""An internal error; the traceback was printed."""
FAILED_CERTIFICATE = 1
"""`bloomery verify` only: a layout differs from one rank. That is a bug in Bloomery too; the table shows where."""
USAGE = 2
"""The recipe or the command line is wrong. Nothing was started."""
DATA = 3
"""An input is missing, damaged or does not fit: shards, tokenizer, checkpoint."""
DIVERGED = 4
"""Training stopped itself: NaN losses, a loss scale at its minimum, or ranks that drifted apart. All is saved."""
STORAGE = 5
"""The run folder could not be written: read-only, no permission, disk full."""
LOST_RANK = 6
"""Another rank of the same training died or stopped answering, or the training itself hangs and was asked to stop.
Starting again resumes from the newest checkpoint."""
INTERRUPTED = 130
"""A stop signal outside of the training loop or before its first step was done, so that there was nothing to save; or a
later Ctrl-C: left at once, without the save the first had promised."""
