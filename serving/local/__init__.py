"""A whole Ray on this machine that belongs to one command or one test: start, deploy, stop, leave nothing.

Knows nothing of models, engines or HTTP bodies. Only `deploy` imports ray, in a process of its own.
"""
