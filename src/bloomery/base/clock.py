"""When this job began. Imported first by the command line, so that imports and set-up count towards a deadline."""

import time

_STARTED = time.monotonic()


def job_seconds() -> float:
    """Wall-clock seconds since this process began its work."""
    return time.monotonic() - _STARTED
