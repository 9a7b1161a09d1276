"""Entry of ``python -m bench.training``."""

from bench.training.benchmark import main

if __name__ == "__main__":
    main()
