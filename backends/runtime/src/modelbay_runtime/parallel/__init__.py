"""The place of a process among others, and its collectives."""
