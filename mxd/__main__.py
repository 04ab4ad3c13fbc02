"""``python -m mxd``, which torchrun and accelerate launch need."""

from mxd.cli import main

if __name__ == "__main__":
    main()
