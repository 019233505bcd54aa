"""`make up`: from a checkout to a model's answer on a real cluster.

`python -m e2e.up` runs `flow`; `estimate` says what it will take, `together` runs programs side by side,
`artifacts` makes images and model, `plugin` installs `kubectl quire`, `place` knows whose cluster it is,
`volume` puts the model where pods find it, `question` asks it. Everything may be run again: what is there
already is left as it is.
"""
