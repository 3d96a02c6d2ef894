"""The sections of scripts/bench."""
