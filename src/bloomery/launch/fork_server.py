"""What the fork server of local.py imports before all else. A signal to it is meant for the job: the launcher, which
started it, passes it on to the ranks. It ends with the launcher, also while it still imports."""

import os
import signal

from bloomery.base import signals

for number in signals.STOPS:
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os.kill(os.getppid(), number))
signals.end_with_parent(signal.SIGKILL)
