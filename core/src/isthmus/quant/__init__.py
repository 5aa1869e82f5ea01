"""Quantised storage: one module a format, used by the reader, so that no weight rule ever sees a code."""
