"""Conformance kit and tiny-checkpoint factory for Modelbay plugins."""
