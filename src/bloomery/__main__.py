"""`python -m bloomery` is the `bloomery` command."""

from bloomery.base import signals

signals.listen()  # before the imports that take time

from bloomery.cli.main import command  # noqa: E402

if __name__ == "__main__":
    command()
