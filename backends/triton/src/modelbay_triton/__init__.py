"""Triton kernels for the ops of Modelbay that belong to no model family."""
