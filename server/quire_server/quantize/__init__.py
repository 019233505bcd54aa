"""From a model directory to a smaller one: ``quire-server quantize``, and what it cost: ``eval-quality``.

Programs of their own, never part of a server. One layer is in memory at a time: it is filled, shown the
calibration text, rounded by one of the algorithms (a file each), written, and left behind.
"""
