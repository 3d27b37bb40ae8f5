"""`python -m bloomery` is the `bloomery` command. Stop signals are answered from its first line on."""

import os
import signal


def _leave(*_: object) -> None:
    os.write(2, b"bloomery: interrupted\n")
    os._exit(130)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, _leave)

from bloomery.base import signals  # noqa: E402

signals.listen()

from bloomery.cli.main import command  # noqa: E402

if __name__ == "__main__":
    command()
