"""`python -m bloomery` is the `bloomery` command."""

from bloomery.cli.main import command

command()
