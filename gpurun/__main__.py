"""`python -m gpurun` is the `gpurun` command."""

from gpurun.cli import main

if __name__ == "__main__":
    main()
