"""Everything that only a GPU can tell, by one command, `make bench-gpu`: kernel tests, tuning, rooflines,
whole models, and what graphs and steps ahead bring. Needs no network and no HTTP; a tiny form of it runs on
a CPU in the tests, so that it works on the day when there is a GPU.
"""
