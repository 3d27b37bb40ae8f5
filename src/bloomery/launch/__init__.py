"""Floor 3: starting ranks and jobs; never imports torch."""
