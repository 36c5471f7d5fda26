"""Imported by the process that the tests' worker processes are forked from: they start with all kernels loaded."""

from dshuffle.kernels import compile_kernels

compile_kernels()
