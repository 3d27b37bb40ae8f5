"""Floor 5: the certificate that a layout changes nothing but speed, and machines that are not there. Trains nothing."""
