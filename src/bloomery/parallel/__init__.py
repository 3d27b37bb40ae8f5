"""Floor 4: everything that knows more than one rank; today the plain runner of one process."""
