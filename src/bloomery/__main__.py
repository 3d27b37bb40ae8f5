"""`python -m bloomery` is the `bloomery` command."""

from bloomery.cli.main import main

raise SystemExit(main())
