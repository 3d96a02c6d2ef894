"""Moves the GPU memory of RL frameworks' trainers. A framework is told to import its module; nothing here is imported otherwise."""
