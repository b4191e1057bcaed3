"""Engines side by side: workers that each hold one engine, run in turn, and what is made of their times."""
