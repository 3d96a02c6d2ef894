"""What the measurements of this folder and of tests/gpu share: where things are, programs that they start, and tables."""
