"""``quire-server quantize`` writes a quantised copy of a model directory; ``eval-quality`` measures the loss.

Separate programs, never part of a server. One layer is in memory at a time: its weights are read, its inputs
are observed on the calibration text, it is quantised by one of the algorithms (one module each) and written.
"""
