"""Floor 5: the certificate that the layout of the machine changes nothing but speed. Trains nothing itself."""
