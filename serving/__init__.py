"""KVRelay's serving planes: HTTP door, links, workers, engines. Started by `serve run configs/*.yaml`."""

__version__ = "0.1.0"
