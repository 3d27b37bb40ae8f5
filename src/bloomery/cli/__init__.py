"""Floor 6: one small file a command: parse, call, print, exit code."""
