"""`python -m fedmerge`."""

from fedmerge.cli import main

if __name__ == "__main__":
    main()
