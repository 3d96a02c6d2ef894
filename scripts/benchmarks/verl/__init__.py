"""The section `verl`."""
