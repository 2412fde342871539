"""gpurun: run one command job on a GPU node, end to end."""

__version__ = "0.1.0"
