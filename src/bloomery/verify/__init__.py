"""Floor 5: proofs that a layout changes nothing but speed, and machines that are not there."""
